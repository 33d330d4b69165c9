"""Sparse indexes of segments: offset and time to position. In memory only, rebuilt by walking headers, never trusted
from disk.

Theory of operation. A segment's index covers a prefix of it: entries at batch boundaries, one per 32 KiB or more, and
an end up to which the segment was walked. Readers extend it as far as they need, over bytes below the high watermark
only, so it never has to be taken back. Walking costs 0.25 us a batch, once for all readers; a segment of 128 MiB has at
most 4096 entries of 24 bytes. ``IndexCache`` keeps the recently used ones.

Invariants:
    * entry i is a batch's base offset, its position, and the largest timestamp of all batches before it;
    * positions, offsets and timestamps grow (timestamps not strictly);
    * ``end`` is one tuple, assigned after the entries below it are there: readers take no lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from txmq.errors import CorruptRecordError
from txmq.log.batch import HEADER_SIZE, headers

ENTRY_DISTANCE_BYTES = 32 << 10
ENTRIES_MAX = 1 << 20  # of all indexes together: 24 MiB, for 32 GiB of segments
_INDEX_WEIGHT = 32  # entries whose memory an empty index takes


class End(NamedTuple):
    """Up to where a segment was walked."""

    offset: int
    position: int
    timestamp_ms: int


class Extension(NamedTuple):
    """What a step of walking found; ``adopt`` adds it."""

    start_position: int
    entries: list[tuple[int, int, int]]
    end: End


class SegmentIndex:
    """The index of one segment. Any thread may read; ``adopt`` is called under the cache's lock."""

    __slots__ = ("_timestamps", "end", "offsets", "positions")

    def __init__(self, base_offset: int) -> None:
        self.offsets, self.positions, self._timestamps = array("q", [base_offset]), array("q", [0]), array("q", [-1])
        self.end = End(base_offset, 0, -1)

    def floor(self, offset: int) -> tuple[int, int]:
        """(offset, position) of the last entry at or below ``offset``, which is in the segment."""
        number = bisect_right(self.offsets, offset) - 1
        return self.offsets[number], self.positions[number]

    def before_time(self, timestamp_ms: int) -> tuple[int, int]:
        """(offset, position) of the last entry before which every batch is older than ``timestamp_ms``."""
        number = max(0, bisect_left(self._timestamps, timestamp_ms) - 1)
        return self.offsets[number], self.positions[number]

    def last_boundary(self, position: int) -> tuple[int, int]:
        """(offset, position) of the last known batch boundary at or before ``position``."""
        end = self.end
        if end.position <= position:
            return end.offset, end.position
        number = bisect_right(self.positions, position) - 1
        return self.offsets[number], self.positions[number]

    def next_boundary(self, position: int) -> tuple[int, int]:
        """(offset, position) of the first known batch boundary behind ``position``, which is below the end."""
        end = self.end
        number = bisect_right(self.positions, position)
        if number < len(self.positions):
            return self.offsets[number], self.positions[number]
        return end.offset, end.position

    def adopt(self, extension: Extension) -> int:
        """Add what was found, unless another reader was faster. Returns the number of new entries."""
        if extension.start_position != self.end.position:
            return 0
        for offset, position, timestamp_ms in extension.entries:
            self._timestamps.append(timestamp_ms)
            self.positions.append(position)
            self.offsets.append(offset)
        self.end = extension.end
        return len(extension.entries)


def extend(index: SegmentIndex, start: End, content: bytes, stop_position: int, path: str) -> Extension:
    """Walk the headers in ``content``, which begins at ``start``; bodies may lie beyond it.

    Args:
        stop_position: where the segment's durable part ends.

    Raises:
        CorruptRecordError: what stands there is no chain of batches with dense offsets.
    """
    offset, position, timestamp_ms = start
    last_entry = index.positions[-1]
    entries: list[tuple[int, int, int]] = []
    for at, size, base, count, max_ms in headers(content):
        found = start.position + at
        if base != offset or count < 1 or found + size > stop_position:
            raise CorruptRecordError(
                path, found, f"{count} messages of offset {base} in {size} bytes; {offset} follows"
            )
        if found - last_entry >= ENTRY_DISTANCE_BYTES:
            entries.append((offset, found, timestamp_ms))
            last_entry = found
        offset, position = base + count, found + size
        if max_ms > timestamp_ms:
            timestamp_ms = max_ms
    if position == start.position:
        raise CorruptRecordError(path, position, "no batch where one was written")
    if position > stop_position - HEADER_SIZE and position != stop_position:
        raise CorruptRecordError(path, position, f"{stop_position - position} bytes are no batch")
    return Extension(start.position, entries, End(offset, position, timestamp_ms))


class IndexCache:
    """The indexes of all segments in use; the least recently used go when there are too many entries.

    Thread safety: ``lock`` is held for the bookkeeping only.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX, *, lock: AbstractContextManager[Any] | None = None) -> None:
        self._entries_max, self._lock = entries_max, lock or nullcontext()
        self._indexes: OrderedDict[str, SegmentIndex] = OrderedDict()
        self._weight = 0

    def get(self, path: str, base_offset: int) -> SegmentIndex:
        """The index of a segment; a new one knows nothing yet."""
        with self._lock:
            index = self._indexes.get(path)
            if index is None:
                index = self._indexes[path] = SegmentIndex(base_offset)
                self._weight += _INDEX_WEIGHT + 1
                self._shrink()
            else:
                self._indexes.move_to_end(path)
            return index

    def adopt(self, path: str, index: SegmentIndex, extension: Extension) -> None:
        """Add to an index what a step of walking found."""
        with self._lock:
            added = index.adopt(extension)
            if self._indexes.get(path) is index:  # it may have been dropped while it was read
                self._weight += added
                self._shrink()

    def drop(self, path: str) -> None:
        """Forget a segment that is gone."""
        with self._lock:
            index = self._indexes.pop(path, None)
            if index is not None:
                self._weight -= _INDEX_WEIGHT + len(index.positions)

    def _shrink(self) -> None:
        while self._weight > self._entries_max and len(self._indexes) > 1:
            _, index = self._indexes.popitem(last=False)
            self._weight -= _INDEX_WEIGHT + len(index.positions)
