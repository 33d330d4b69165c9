"""The client: ``connect``, ``Client``, ``Producer`` and the partition selectors; see ``client``."""

from __future__ import annotations

from txmq.client.checks import HalfMessage
from txmq.client.client import Client, connect
from txmq.client.consumer import Consumer, ConsumerOptions
from txmq.client.file_offset_store import FileOffsetStore
from txmq.client.half import Half
from txmq.client.mysql_offset_store import MySQLOffsetStore
from txmq.client.offset_store import OffsetPosition, OffsetStore, OffsetStoreWithTransactions, StoredOffset
from txmq.client.ordered import OrderedMessageProducer, OrderedOptions
from txmq.client.producer import Producer
from txmq.client.selector import (
    FixedSelector,
    KafkaPartitionSelector,
    KeyHashSelector,
    PartitionSelector,
    RoundRobinSelector,
)

__all__ = [
    "Client",
    "Consumer",
    "ConsumerOptions",
    "FileOffsetStore",
    "FixedSelector",
    "Half",
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
