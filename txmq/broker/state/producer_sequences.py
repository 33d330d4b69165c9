"""Producer sequences: they tell a repeated batch from a new one.

Per partition and producer the last ``in_flight_max`` batches are remembered as (first sequence, base offset, CRC). A
batch whose sequence is the next one is new; one that repeats a remembered sequence with the same CRC is a duplicate and
gets the same answer; all else is refused. Sequences count records and wrap after 2^31 - 1.

There may be hundreds of thousands, so what is remembered is packed: 16 bytes a batch, where tuples of numbers took 150.

Source: Kafka protocol guide, idempotent producer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from txmq.errors import SequenceError

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
