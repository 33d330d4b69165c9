"""A partition in memory, for data that may be lost: nothing on disk, nothing journaled.

Batches are kept in blocks of about 1/64 of the limit; when the limit is passed, the oldest block goes and the log start
moves. What is appended is readable at once. No record tells of it; each life of the broker begins, empty, at an offset
that no life before it has reached, so that saved offsets of consumers point at no other messages.

Thread safety: as ``Partition``: readers take a copy of the list of blocks, and of a block's list of batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from txmq.errors import StorageError
from txmq.log.batch import stamp
from txmq.log.file_cache import FileCache
from txmq.log.history import NO_LIFE
from txmq.log.partition import Frozen, Partition
from txmq.model import Storage, TopicConfig

RETENTION_SIZE_BYTES = 64 << 20  # where the topic names none
EPOCH_SHIFT = 40  # an epoch has so many bits of offsets: a million a second for twelve days
_BLOCKS = 64


class _Block:
    """Consecutive batches."""

    __slots__ = ("base_offset", "base_offsets", "batches", "max_timestamps_ms", "size_bytes")

    def __init__(self, base_offset: int) -> None:
        self.base_offset, self.size_bytes = base_offset, 0
        self.base_offsets: list[int] = []
        self.max_timestamps_ms: list[int] = []
        self.batches: list[bytearray] = []


class MemoryPartition(Partition):
    """The surface of ``Partition``; ``append`` stands for place, stamp and publish."""

    __slots__ = ("_blocks", "_first", "_size_bytes")

    def __init__(self, topic_id: int, topic: str, number: int, config: TopicConfig) -> None:
        super().__init__(topic_id, topic, number, config)
        self._blocks: list[_Block] = []
        self._size_bytes = self._first = 0

    def append(self, batch: bytearray, count: int, max_timestamp_ms: int, crc: int) -> int:
        """Take in a checked batch (it is kept, not copied). Returns its base offset. Durability: none, ever."""
        base_offset = self.next_offset
        stamp(batch, self.topic_id, self.number, base_offset, crc)
        limit = self.config.retention_size_bytes or RETENTION_SIZE_BYTES
        blocks = self._blocks
        if not blocks or blocks[-1].size_bytes + len(batch) > limit // _BLOCKS:
            blocks.append(_Block(base_offset))
        block = blocks[-1]
        block.base_offsets.append(base_offset)
        block.max_timestamps_ms.append(max_timestamp_ms)
        block.batches.append(batch)  # last: readers go by this list's length
        block.size_bytes += len(batch)
        self._size_bytes += len(batch)
        self.next_offset = self.high_watermark = base_offset + count
        self._durable = (self.next_offset, 0, 0)
        while self._size_bytes > limit and len(blocks) > 1:
            self._drop_oldest()
        return base_offset

    def _drop_oldest(self) -> None:
        self._size_bytes -= self._blocks.pop(0).size_bytes
        self.log_start = self._blocks[0].base_offset

    @property
    def size_bytes(self) -> int:
        """Of all batches."""
        return self._size_bytes

    def read(self, files: FileCache, offset: int, size_bytes_max: int, *, nowait: bool = False) -> bytes | None:
        """As ``Partition.read``; ``files`` are not used, and it never waits."""
        end_offset = self._durable[0]
        blocks = list(self._blocks)
        if not self.log_start <= offset <= end_offset:
            raise self._out_of_range(offset)
        if offset == end_offset:
            return b""
        number = bisect_right(blocks, offset, key=_base_offset) - 1
        if number < 0:
            raise self._out_of_range(offset)  # a copy older than the log start's move
        chosen: list[bytearray] = []
        size = 0
        first = bisect_right(blocks[number].base_offsets, offset) - 1
        for block in blocks[number:]:
            for batch in block.batches[first:]:
                size += len(batch)
                if chosen and size > size_bytes_max:
                    return b"".join(chosen)
                chosen.append(batch)
            first = 0
        return b"".join(chosen)

    def offset_for(self, files: FileCache, timestamp_ms: int) -> int:
        """As ``Partition.offset_for``."""
        end_offset = self._durable[0]
        for block in list(self._blocks):
            for number, max_ms in enumerate(block.max_timestamps_ms):
                if max_ms >= timestamp_ms:
                    return min(block.base_offsets[number], end_offset)
        return end_offset

    def place(self, count: int, size: int, max_timestamp_ms: int, now_ms: int) -> tuple[int, int, int]:
        """Refused: the journal never sees these batches."""
        raise StorageError(f"topic {self.topic!r} is kept in memory: batches are appended, not placed")

    def redo(
        self, segment_base: int, position: int, base_offset: int, next_offset: int, max_timestamp_ms: int, size: int,
        clock_ms: int,
    ) -> None:  # fmt: skip
        """Refused: the journal never saw these batches."""
        raise StorageError(f"topic {self.topic!r} is kept in memory: the journal has nothing to redo for it")

    def publish(self, next_offset: int) -> None:
        """Nothing to do: what is appended is readable at once."""

    def expired_segments(self, now_ms: int) -> tuple[int, list[str]]:
        """By age, oldest blocks go at once; there are no files."""
        retention_ms, blocks = self.config.retention_ms, self._blocks
        while retention_ms is not None and len(blocks) > 1:
            newest_ms = max(blocks[0].max_timestamps_ms)
            if newest_ms < 0 or now_ms - newest_ms <= retention_ms:  # without times it goes by size alone
                break
            self._drop_oldest()
        return self.log_start, []

    def set_log_start(self, offset: int) -> None:
        """Forget whole blocks below ``offset``."""
        while len(self._blocks) > 1 and self._blocks[1].base_offset <= offset:
            self._drop_oldest()
        self.log_start = max(self.log_start, min(offset, self.next_offset))

    def began(self, epoch: int) -> None:
        """Empty, at the epoch's first offset. Nobody can go on with what former lives had."""
        self._blocks, self._size_bytes, self.lives = [], 0, ()
        self._begin(epoch << EPOCH_SHIFT)

    def _begin(self, offset: int) -> None:
        self._first = self.log_start = self.high_watermark = self.next_offset = offset
        self._durable = (offset, 0, 0)

    def freeze(self) -> Frozen:
        """Where its offsets began; the messages are not kept."""
        return self._first, self._first, self.lives, [], 0, 0, 0, 0

    def restore(self, snapshot: Sequence[Any]) -> None:
        """Empty, at the offset of the snapshot."""
        super().restore(snapshot)
        self._begin(self.next_offset)


def _base_offset(block: _Block) -> int:
    return block.base_offset


def new_partition(topic_id: int, topic: str, number: int, config: TopicConfig, life: str = NO_LIFE) -> Partition:
    """A partition of the kind its topic's storage asks for, made in a life of the broker."""
    kind = MemoryPartition if config.storage is Storage.MEMORY else Partition
    made = kind(topic_id, topic, number, config)
    made.live(life)
    return made
