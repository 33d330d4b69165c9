"""The client: ``connect``, ``Client``, ``Producer`` and the partition selectors; see ``client``."""

from __future__ import annotations

from txmq.client.checks import HalfMessage
from txmq.client.client import Client, connect
from txmq.client.consumer import Consumer, ConsumerOptions
from txmq.client.half import Half
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
    "FixedSelector",
    "Half",
    "HalfMessage",
    "KafkaPartitionSelector",
    "KeyHashSelector",
    "OrderedMessageProducer",
    "OrderedOptions",
    "PartitionSelector",
    "Producer",
    "RoundRobinSelector",
    "connect",
]
