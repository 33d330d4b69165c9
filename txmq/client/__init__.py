"""The client: the public names that ``txmq`` has as well, and the types of what their calls return."""

from __future__ import annotations

from txmq.client.admin.groups import Groups
from txmq.client.admin.transactions import Transactions
from txmq.client.client import Client, connect
from txmq.client.consumer.consumer import Consumer, ConsumerOptions
from txmq.client.consumer.offsets.database_store import DatabaseOffsetStore
from txmq.client.consumer.offsets.file_store import FileOffsetStore
from txmq.client.consumer.offsets.offset_store import (
    OffsetPosition,
    OffsetStore,
    OffsetStoreWithTransactions,
    StoredOffset,
)
from txmq.client.consumer.offsets.zookeeper_store import ZooKeeperOffsetStore
from txmq.client.partitioner import (
    FixedSelector,
    KafkaPartitionSelector,
    KeyHashSelector,
    PartitionSelector,
    RoundRobinSelector,
)
from txmq.client.producer.bulk import SendResults
from txmq.client.producer.producer import Producer
from txmq.client.relay.relay import Relay
from txmq.client.spooling.ordered_producer import OrderedMessageProducer, OrderedOptions
from txmq.client.topics import Topics
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.half_message import CheckRequest, HalfMessage
from txmq.client.transaction.xa_resource import BrokerXAResource

__all__ = [
    "BrokerXAResource",
    "CheckRequest",
    "Client",
    "Consumer",
    "ConsumerOptions",
    "DatabaseOffsetStore",
    "FileOffsetStore",
    "FixedSelector",
    "Groups",
    "HalfMessage",
    "KafkaPartitionSelector",
    "KeyHashSelector",
    "OffsetPosition",
    "OffsetStore",
    "OffsetStoreWithTransactions",
    "OrderedMessageProducer",
    "OrderedOptions",
    "PartitionSelector",
    "Producer",
    "Relay",
    "RoundRobinSelector",
    "SendResults",
    "StoredOffset",
    "Topics",
    "Transaction",
    "Transactions",
    "ZooKeeperOffsetStore",
    "connect",
]
