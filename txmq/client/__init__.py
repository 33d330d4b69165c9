"""The client: ``connect``, ``Client``, ``Producer`` and the partition selectors; see ``client``."""

from __future__ import annotations

from txmq.client.client import Client, connect
from txmq.client.consumer.consumer import Consumer, ConsumerOptions
from txmq.client.consumer.offsets.file_store import FileOffsetStore
from txmq.client.consumer.offsets.mysql_store import MySQLOffsetStore
from txmq.client.consumer.offsets.store import OffsetPosition, OffsetStore, OffsetStoreWithTransactions, StoredOffset
from txmq.client.partitioner import (
    FixedSelector,
    KafkaPartitionSelector,
    KeyHashSelector,
    PartitionSelector,
    RoundRobinSelector,
)
from txmq.client.producer.producer import Producer
from txmq.client.spooling.ordered_producer import OrderedMessageProducer, OrderedOptions
from txmq.client.transaction.check_backs import CheckRequest
from txmq.client.transaction.half_message import HalfMessage

__all__ = [
    "CheckRequest",
    "Client",
    "Consumer",
    "ConsumerOptions",
    "FileOffsetStore",
    "FixedSelector",
    "HalfMessage",
    "KafkaPartitionSelector",
    "KeyHashSelector",
    "MySQLOffsetStore",
    "OffsetPosition",
    "OffsetStore",
    "OffsetStoreWithTransactions",
    "OrderedMessageProducer",
    "OrderedOptions",
    "PartitionSelector",
    "Producer",
    "RoundRobinSelector",
    "StoredOffset",
    "connect",
]
