"""Sparse indexes of segments: offset and time to position. In memory only, rebuilt by walking headers, never trusted
from disk.

Theory of operation. A segment's index covers a prefix of it: entries at batch boundaries, one per 32 KiB or more, and
an end up to which the segment was walked. Readers extend it as far as they need, over bytes below the high watermark
only, so it never has to be taken back. A batch is walked over once for all readers; a segment of 128 MiB has at
most 4096 entries of 180 bytes. ``IndexCache`` keeps the recently used ones.

Invariants:
    * entry i is a batch's base offset, its position, and the largest timestamp of all batches before it;
    * positions, offsets and timestamps grow (timestamps not strictly);
    * an entry is one tuple and appears whole, and ``end`` is one tuple, assigned after the entries below it are there:
      readers take no lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

from txmq.errors import CorruptRecordError
from txmq.log.batch import headers

ENTRY_DISTANCE_BYTES = 32 << 10
ENTRIES_MAX = 1 << 18  # of all indexes together: 45 MiB, for 8 GiB of segments
_INDEX_WEIGHT = 5  # entries whose memory an empty index takes

Entry = tuple[int, int, int]  # offset, position, largest timestamp before it
_offset, _position, _timestamp_ms = itemgetter(0), itemgetter(1), itemgetter(2)


class End(NamedTuple):
    """The end of the walked part of a segment."""

    offset: int
    position: int
    timestamp_ms: int


class Extension(NamedTuple):
    """The finds of one step of walking; ``adopt`` adds them."""

    start_position: int
    entries: list[Entry]
    end: End


class SegmentIndex:
    """The index of one segment. Any thread may read; ``adopt`` is called under the cache's lock."""

    __slots__ = ("end", "entries")

    def __init__(self, base_offset: int) -> None:
        self.entries: list[Entry] = [(base_offset, 0, -1)]
        self.end = End(base_offset, 0, -1)

    def floor(self, offset: int) -> tuple[int, int]:
        """(offset, position) of the last entry at or below ``offset``, which is in the segment."""
        return self._boundary(bisect_right(self.entries, offset, key=_offset) - 1)

    def before_time(self, timestamp_ms: int) -> tuple[int, int]:
        """(offset, position) of the last entry before which every batch is older than ``timestamp_ms``."""
        return self._boundary(max(0, bisect_left(self.entries, timestamp_ms, key=_timestamp_ms) - 1))

    def last_boundary(self, position: int) -> tuple[int, int]:
        """(offset, position) of the last known batch boundary at or before ``position``."""
        end = self.end
        if end.position <= position:
            return end.offset, end.position
        return self._boundary(bisect_right(self.entries, position, key=_position) - 1)

    def next_boundary(self, position: int) -> tuple[int, int]:
        """(offset, position) of the first known batch boundary after ``position``, which is below the end."""
        end = self.end
        number = bisect_right(self.entries, position, key=_position)
        return self._boundary(number) if number < len(self.entries) else (end.offset, end.position)

    def _boundary(self, number: int) -> tuple[int, int]:
        offset, position, _ = self.entries[number]
        return offset, position

    def adopt(self, extension: Extension) -> int:
        """Add what was found, unless another reader was faster. Returns the number of new entries."""
        if extension.start_position != self.end.position:
            return 0
        self.entries.extend(extension.entries)
        self.end = extension.end
        return len(extension.entries)


def extend(index: SegmentIndex, start: End, content: bytes, stop_position: int, path: str) -> Extension:
    """Walk the headers in ``content``, which begins at ``start``; bodies may lie beyond it.

    Args:
        stop_position: where the segment's durable part ends.

    Returns:
        what is whole; damage after it is found by the step that begins there.

    Raises:
        CorruptRecordError: no batch of dense offsets begins at ``start``.
    """
    offset, position, timestamp_ms = start
    last_entry = index.entries[-1][1]
    entries: list[Entry] = []
    for at, size, base, count, max_ms in headers(content):
        found = start.position + at
        if base != offset or count < 1 or found + size > stop_position:
            if at == 0:
                raise CorruptRecordError(
                    path, found, f"{count} messages of offset {base} in {size} bytes; {offset} follows"
                )
            break
        if found - last_entry >= ENTRY_DISTANCE_BYTES:
            entries.append((offset, found, timestamp_ms))
            last_entry = found
        offset, position = base + count, found + size
        if max_ms > timestamp_ms:
            timestamp_ms = max_ms
    if position == start.position:
        raise CorruptRecordError(path, position, "no batch where one was written")
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
                self._weight -= _INDEX_WEIGHT + len(index.entries)

    def _shrink(self) -> None:
        while self._weight > self._entries_max and len(self._indexes) > 1:
            _, index = self._indexes.popitem(last=False)
            self._weight -= _INDEX_WEIGHT + len(index.entries)
