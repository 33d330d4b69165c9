"""Reading one segment: whole batches from an offset on, and the offset for a time.

Theory of operation. The index says where to begin and where to stop, both at batch boundaries, so that a full chunk is
one ``pread`` without parsing. Only bytes that the index does not know yet are walked (headers, 1 MiB a step), and what
it knows too coarsely is trimmed (at most 32 KiB of headers, or one batch).

Invariants:
    * nothing beyond ``Extent.end_position`` of the caller, or of a later caller, is read: bytes above the high
      watermark may be half written;
    * with ``nowait`` no call waits for a disk, walks more than ``STEPS_NOWAIT`` MiB, or reads more than 1 MiB.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from txmq.errors import CorruptRecordError
from txmq.log.batch import headers
from txmq.log.file_cache import FileCache
from txmq.log.segment_index import SegmentIndex, extend

STEP_BYTES = 1 << 20
STEPS_NOWAIT = 2


class Extent(NamedTuple):
    """The durable part of a segment."""

    path: str
    base_offset: int
    end_offset: int
    end_position: int


class Chunk(NamedTuple):
    """The bytes read, and the position of the next batch."""

    batches: bytes
    end_offset: int
    end_position: int


class WouldWaitError(Exception):
    """The bytes are not in the page cache, and the caller must not wait."""


def read_chunk(
    files: FileCache, extent: Extent, offset: int, size_bytes_max: int, *, hint: int | None, nowait: bool
) -> Chunk:
    """Whole batches, the first of which holds ``offset``: at most ``size_bytes_max``, but at least one.

    Damage ends them; whoever reads on from there gets the error.

    Args:
        offset: in ``[extent.base_offset, extent.end_offset)``.
        hint: position of the batch that holds ``offset``, where the caller knows it.

    Raises:
        WouldWaitError: with ``nowait`` only.
        CorruptRecordError: the segment is damaged or cut off where ``offset`` is, or before it.
        FileNotFoundError: it is gone.
    """
    index = files.indexes.get(extent.path, extent.base_offset)
    steps = STEPS_NOWAIT if nowait else -1
    while index.end.offset <= offset:
        steps = _take_step(files, index, extent, steps)
    start = hint if hint is not None else index.floor(offset)[1]
    wanted = min(start + size_bytes_max, extent.end_position)
    with suppress(CorruptRecordError):
        while index.end.position < wanted:
            steps = _take_step(files, index, extent, steps)
    end_offset, stop = index.last_boundary(wanted)
    coarse = stop <= start
    if coarse:
        end_offset, stop = index.next_boundary(start)
    content = _fetch(files, extent.path, stop - start, start, nowait=nowait)
    if coarse or hint is None or len(content) < stop - start:
        chunk = _trim(content, start, offset, size_bytes_max)
        if not chunk.batches:
            end = start + len(content)
            raise CorruptRecordError(extent.path, end, f"the file ends here; it had {stop} bytes at least")
        return chunk
    return Chunk(content, end_offset, stop)


def _trim(content: bytes, start: int, offset: int, size_bytes_max: int) -> Chunk:
    """Cut off batches below ``offset``, beyond the size, and one that is not whole."""
    first, stop, end_offset = 0, 0, offset
    for position, size, base, count, _ in headers(content):
        if base + count <= offset:
            continue
        if position + size > len(content):
            break
        if stop == 0:
            first = position
        elif position + size - first > size_bytes_max:
            break
        stop, end_offset = position + size, base + count
    return Chunk(content[first:stop], end_offset, start + stop)


def find_time(files: FileCache, extent: Extent, timestamp_ms: int) -> int | None:
    """Base offset of the first batch whose max timestamp is not below ``timestamp_ms``; None if all are older."""
    index = files.indexes.get(extent.path, extent.base_offset)
    while index.end.position < extent.end_position and index.end.timestamp_ms < timestamp_ms:
        _take_step(files, index, extent, -1)
    _, position = index.before_time(timestamp_ms)
    while position < extent.end_position:
        size_bytes = min(STEP_BYTES, extent.end_position - position)
        content = _fetch(files, extent.path, size_bytes, position, nowait=False)
        advanced = position
        for at, size, base, _, max_ms in headers(content):
            if max_ms >= timestamp_ms:
                return base
            advanced = position + at + size
        if advanced == position:
            raise CorruptRecordError(extent.path, position, "no batch where one was written")
        position = advanced
    return None


def _take_step(files: FileCache, index: SegmentIndex, extent: Extent, steps: int) -> int:
    """Walk one step on. Returns how many more may be taken."""
    if steps == 0:
        raise WouldWaitError
    start = index.end
    if start.position >= extent.end_position:
        raise CorruptRecordError(
            extent.path, start.position, f"ends at offset {start.offset}, {extent.end_offset} was written"
        )
    size = min(STEP_BYTES, extent.end_position - start.position)
    content = _fetch(files, extent.path, size, start.position, nowait=steps > 0)
    files.indexes.adopt(extent.path, index, extend(index, start, content, extent.end_position, extent.path))
    return steps - 1


def _fetch(files: FileCache, path: str, size: int, position: int, *, nowait: bool) -> bytes:
    if not nowait:
        return files.read(path, size, position)
    if size > STEP_BYTES:
        raise WouldWaitError
    content = files.try_read(path, size, position)
    if content is None:
        raise WouldWaitError
    return content
