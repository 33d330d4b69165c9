"""Producer sequences: they tell a repeated batch from a new one.

Per partition and producer the last ``in_flight_max`` batches are remembered as (first sequence, base offset, CRC). A
batch whose sequence is the next one is new; one that repeats a remembered sequence with the same CRC is a duplicate and
gets the same answer; all else is refused. Sequences count records and wrap after 2^31 - 1.

There may be hundreds of thousands, so what is remembered is packed: 16 bytes a batch, where tuples of numbers took 150.
Partitions keep the sequences; the ``SequenceTable``, derived from them, says in which partitions a producer has some,
and how many there are.

Source: Kafka protocol guide, idempotent producer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from txmq.broker.state.session import BrokerSession, count_for
from txmq.errors import SequenceError
from txmq.log.partition import Partition

SEQUENCE_MASK = 0x7FFFFFFF
_BATCH: Final = struct.Struct("<IQI")  # first sequence, base offset, CRC
_SIZE: Final = _BATCH.size


class Sequences:
    """The sequences of one producer in one partition."""

    __slots__ = ("next", "recent")

    def __init__(self, following: int = 0) -> None:
        self.next = following
        self.recent = b""  # replaced, never changed: checkpoints keep it

    def duplicate_of(self, sequence: int, crc: int) -> int | None:
        """The base offset the same batch got before, or None if this one is new.

        Raises:
            SequenceError: a gap, a repeat with other content, or a repeat too old to tell.
        """
        if sequence == self.next:
            return None
        for known, offset, known_crc in _BATCH.iter_unpack(self.recent):
            if known == sequence:
                if known_crc == crc:
                    return int(offset)
                raise SequenceError(f"sequence {sequence} was used for another batch")
        raise SequenceError(f"sequence {sequence} does not follow: {self.next} is next")

    def accept(self, sequence: int, count: int, crc: int, offset: int, kept_max: int) -> None:
        """Remember a new batch; ``accept`` is the fold, also in recovery."""
        self.next = (sequence + count) & SEQUENCE_MASK
        recent = self.recent + _BATCH.pack(sequence, offset, crc)
        self.recent = recent[_SIZE:] if len(recent) > kept_max * _SIZE else recent

    @classmethod
    def restore(cls, following: int, recent: Iterable[Iterable[int]]) -> Sequences:
        """From ``next`` and what ``batches`` returned."""
        sequences = cls(following)
        sequences.recent = b"".join(_BATCH.pack(*fields) for fields in recent)
        return sequences


def batches(recent: bytes) -> list[tuple[int, ...]]:
    """First sequence, base offset and CRC of each batch."""
    return list(_BATCH.iter_unpack(recent))


class SequenceTable:
    """In which partitions producers have sequences, and how many that are.

    Args:
        sessions: the state's.
        by_user: ``Principals.sequences``, which is counted here.

    Attributes:
        produced_in: by producer id, the partitions.
        count: of all producers, each partition counted for each.
    """

    def __init__(self, sessions: dict[int, BrokerSession], by_user: dict[str, int]) -> None:
        self._sessions, self._by_user = sessions, by_user
        self.produced_in: dict[int, dict[Partition, None]] = {}
        self.count = 0

    def keep(self, producer: int, partition: Partition, sequences: Sequences) -> Sequences:
        """A producer has sequences in one more partition; returns them."""
        partition.producers[producer] = sequences
        self.produced_in.setdefault(producer, {})[partition] = None
        self._count(producer, 1)
        return sequences

    def forget(self, producer: int, partition: Partition) -> None:
        """The partition is deleted."""
        of_producer = self.produced_in[producer]
        del of_producer[partition]
        if not of_producer:
            del self.produced_in[producer]
        self._count(producer, -1)

    def take(self, producer: int, user: str) -> None:
        """A session that was nobody's is the user's now."""
        count_for(self._by_user, user, len(self.produced_in.get(producer, ())))

    def release(self, session: BrokerSession) -> None:
        """A session has ended, or its client is done with it: its sequences go."""
        partitions = self.produced_in.pop(session.number, {})
        for partition in partitions:
            partition.producers.pop(session.number, None)
        self.count -= len(partitions)
        count_for(self._by_user, session.user, -len(partitions))

    def _count(self, producer: int, more: int) -> None:
        self.count += more
        session = self._sessions.get(producer)
        if session is not None:
            count_for(self._by_user, session.user, more)
