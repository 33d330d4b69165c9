"""Choose the partition of a message.

A selector sees the topic's *declared* partitions, reachable or not: the same key always has the same partition (P7 of
docs/promises.md). With several brokers a producer passes by the selector for a message that goes to the next partition
(``goes_in_turn``): it skips partitions of homes that are away. Messages without a key stay with a partition while it
has unfinished ones, until they would fill a batch there (``Producer``): else, over thousands of partitions, each batch
would be of one message.

Source of that: KIP-480 and KIP-794 of Apache Kafka.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol

from crc32c import crc32c

from txmq.errors import LocalProtocolError
from txmq.model import Message


class PartitionSelector(Protocol):
    """Chooses partitions. Called by any thread that sends."""

    def select(self, topic: str, partitions: int, message: Message) -> int:
        """Choose the partition of a message.

        Args:
            topic: the topic's name.
            partitions: how many it has; they are numbered from 0.
            message: the message; its partition and offset are -1.

        Returns:
            0 to ``partitions - 1``.
        """


class RoundRobinSelector(PartitionSelector):
    """Each message to the next partition, whatever its key."""

    def __init__(self) -> None:
        self._numbers = count()

    def select(self, topic: str, partitions: int, message: Message) -> int:
        return next(self._numbers) % partitions


class KeyHashSelector(PartitionSelector):
    """CRC32C of the key modulo the partitions; without a key, the next partition, a batch at a time. The default."""

    def __init__(self) -> None:
        self._numbers = count()

    def select(self, topic: str, partitions: int, message: Message) -> int:
        return self.partition_of(message.key, partitions)

    def partition_of(self, key: bytes | None, partitions: int) -> int:
        """As ``select``, for a key."""
        return (next(self._numbers) if key is None else crc32c(key)) % partitions


class KafkaPartitionSelector(PartitionSelector):
    """As Kafka's default partitioner: murmur2 of the key; without a key, the next partition, a batch at a time.

    Source: Apache Kafka, ``Utils.murmur2`` and ``BuiltInPartitioner.partitionForKey``.
    """

    def __init__(self) -> None:
        self._numbers = count()

    def select(self, topic: str, partitions: int, message: Message) -> int:
        key = message.key
        return (next(self._numbers) if key is None else murmur2(key) & 0x7FFFFFFF) % partitions


class FixedSelector(PartitionSelector):
    """Every message to one partition."""

    def __init__(self, partition: int) -> None:
        self._partition = partition

    def select(self, topic: str, partitions: int, message: Message) -> int:
        return self._partition


class StickyPartition:
    """The partition that takes a topic's messages without a key for now.

    Attributes:
        left_bytes: how many more it takes; then it is the next one's turn.
    """

    __slots__ = ("left_bytes", "partition")

    def __init__(self, partition: int, left_bytes: int) -> None:
        self.partition, self.left_bytes = partition, left_bytes


def goes_in_turn(selector: PartitionSelector, key: bytes | None) -> bool:
    """Whether a message gets the next partition, so that it may skip those that cannot be written now."""
    kind = type(selector)
    return kind is RoundRobinSelector or (key is None and kind in (KeyHashSelector, KafkaPartitionSelector))


def checked(partition: object, topic: str, partitions: int) -> int:
    """A partition that exists.

    Raises:
        TypeError: not a number.
        LocalProtocolError: not one of the topic's partitions.
    """
    if not isinstance(partition, int):
        raise TypeError(f"a partition is an int, not {type(partition).__name__}")
    if not 0 <= partition < partitions:
        raise LocalProtocolError(f"topic {topic!r} has partitions 0 to {partitions - 1}, not {partition}")
    return int(partition)


_MASK = 0xFFFFFFFF
_M = 0x5BD1E995


def murmur2(key: bytes) -> int:
    """MurmurHash2 with Kafka's seed, as an unsigned 32 bit number."""
    size = len(key)
    h = 0x9747B28C ^ size
    whole = size & ~3
    for position in range(0, whole, 4):
        k = int.from_bytes(key[position : position + 4], "little") * _M & _MASK
        k = (k ^ (k >> 24)) * _M & _MASK
        h = (h * _M & _MASK) ^ k
    if size > whole:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    h = (h ^ (h >> 13)) * _M & _MASK
    return h ^ (h >> 15)
