"""One partition: its assigned side (where the next batch goes) and its durable side (what readers may see).

```
   log_start        high_watermark        next_offset
       |  readable        |   assigned, not yet   |
-------+------------------+-----------------------+--->  offsets, no holes
 segment  segment ... active segment
```

``place`` moves the assigned side when a batch is taken into a journal group; ``publish`` moves the durable side once
that group is forced and applied. ``redo`` is the same move as ``place``, read back from the journal. No I/O but in
``read`` and ``offset_for``. Segments are ``log/<topic id>/<partition>/<base offset, 20 digits>.log``.

*Reading.* The segment's index says where to begin and where to stop, both at batch boundaries, so that a full chunk is
one ``pread`` without parsing. Only bytes that the index does not know yet are walked (headers, 1 MiB a step), and what
it knows too coarsely is trimmed (at most 32 KiB of headers, or one batch).

Invariants:
    * segments follow each other without holes; all but the last (active) are complete; where retention took the active
      one too, there is none until the next batch;
    * ``log_start <= high_watermark <= next_offset`` once a broker serves; offsets have no holes;
    * assigned state is never undone;
    * an idle partition has no file open, no index, and takes under 1 KB;
    * nothing beyond ``Extent.end_position`` of the caller, or of a later caller, is read: bytes above the high
      watermark may be half written;
    * with ``nowait`` no call waits for a disk, walks more than ``STEPS_NOWAIT`` MiB, or reads more than 1 MiB.

Thread safety: one thread changes it. ``read`` and ``offset_for`` may run in others: they take the durable side as one
tuple (``_durable``), and ``segments`` is replaced, or appended to, never changed in the middle.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

from txmq.errors import CorruptRecordError, OffsetOutOfRangeError, StorageError, UnknownTopicError
from txmq.log.batch import headers
from txmq.log.file_cache import FileCache
from txmq.log.history import Lives, LogHistory, log_name, with_life
from txmq.log.segment_index import SegmentIndex, extend
from txmq.model import TopicConfig

STEP_BYTES = 1 << 20
STEPS_NOWAIT = 2
_SEGMENT_NAME: Final = re.compile(r"([0-9]{20})\.log\Z")
LogPosition = tuple[int, int, int]  # offset, base offset of the segment it is in, position there


class Segment:
    """One file of a partition, assigned side."""

    __slots__ = ("base_offset", "created_ms", "max_timestamp_ms", "size_bytes")

    def __init__(self, base_offset: int, size_bytes: int = 0, max_timestamp_ms: int = -1, created_ms: int = 0) -> None:
        self.base_offset, self.size_bytes = base_offset, size_bytes
        self.max_timestamp_ms, self.created_ms = max_timestamp_ms, created_ms


# Log start, next offset, lives, the segments and how many of them; size, newest timestamp and beginning of the last.
Frozen = tuple[int, int, Lives, list[Segment], int, int, int, int]
FROZEN_FIELDS: Final = 8


class Partition:
    """See the module's docstring.

    Attributes:
        lives: see ``LogHistory``; ``log``: its log's name in the broker's present life.
        is_deleted: its topic is; a read that is under way finds no files, which is no damage.
        producers: by producer id; kept by the broker.
        waiters: polls that wait at the end; kept by the broker.
    """

    __slots__ = (
        "_ahead", "_durable", "_hint", "_pending", "config", "high_watermark", "is_deleted", "lives", "log",
        "log_start", "next_offset", "number", "producers", "segments", "topic", "topic_id", "waiters",
    )  # fmt: skip

    def __init__(self, topic_id: int, topic: str, number: int, config: TopicConfig) -> None:
        self.topic_id, self.topic, self.number, self.config = topic_id, topic, number, config
        self.log_start = self.high_watermark = self.next_offset = 0
        self.is_deleted = False
        self.segments: list[Segment] = []
        self._durable: LogPosition = (0, 0, 0)  # the high watermark
        self._pending: list[LogPosition] = []  # what ``_durable`` will be, one for each place since
        self._hint: tuple[int, int, int] = (-1, -1, -1)  # where the last read ended: offset, segment base, position
        self._ahead: dict[int, int] | None = None  # segments that retention saw to be from the future: since when
        self.producers: dict[int, Any] = {}
        self.waiters: list[Any] | None = None
        self.lives: Lives = ()
        self.log = b""

    # --- assigned side -----------------------------------------------------------------------------------------------

    def place(self, count: int, size: int, max_timestamp_ms: int, now_ms: int) -> tuple[int, int, int]:
        """Assign the next place. Hot (once a put).

        Returns:
            (base offset of the segment, position in it, base offset of the batch).
        """
        segments = self.segments
        segment = segments[-1] if segments else self._roll(now_ms)
        position = segment.size_bytes
        config = self.config
        age_ms = config.segment_age_ms
        if position and (
            position + size > config.segment_size_bytes
            # One from the future was begun by a clock that was ahead: its age is not known.
            or (age_ms is not None and not 0 <= now_ms - segment.created_ms < age_ms)
        ):
            segment, position = self._roll(now_ms), 0
        base_offset = self.next_offset
        self.next_offset = next_offset = base_offset + count
        segment.size_bytes = end = position + size
        if max_timestamp_ms > segment.max_timestamp_ms:
            segment.max_timestamp_ms = max_timestamp_ms
        segment_base = segment.base_offset
        self._pending.append((next_offset, segment_base, end))
        return segment_base, position, base_offset

    def has_room(self, size: int) -> bool:
        """Whether the active segment takes ``size`` more bytes; several batches may then be placed as one."""
        segments = self.segments
        return (segments[-1].size_bytes if segments else 0) + size <= self.config.segment_size_bytes

    def _roll(self, now_ms: int) -> Segment:
        segment = Segment(self.next_offset, created_ms=now_ms)
        self.segments.append(segment)
        return segment

    def redo(
        self, segment_base: int, position: int, base_offset: int, next_offset: int, max_timestamp_ms: int, size: int,
        clock_ms: int,
    ) -> None:  # fmt: skip
        """The same move from a journal entry; then ``publish``.

        Args:
            clock_ms: when a segment begins that it begins.

        Raises:
            StorageError: the entry does not follow what came before: journal and checkpoint do not belong together.
        """
        if not self.segments or self.segments[-1].base_offset < segment_base:
            self.segments.append(Segment(segment_base, created_ms=clock_ms))
        segment = self.segments[-1]
        if (segment.base_offset, segment.size_bytes, self.next_offset) != (segment_base, position, base_offset):
            raise StorageError(
                f"{self.segment_path(segment_base)}: the journal places offset {base_offset} at byte {position}, where "
                f"offset {self.next_offset} follows at byte {segment.size_bytes} of segment {segment.base_offset}"
            )
        segment.size_bytes += size
        segment.max_timestamp_ms = max(segment.max_timestamp_ms, max_timestamp_ms)
        self.next_offset = next_offset

    def await_publish(self) -> None:
        """After ``redo``, if the end is published later, perhaps after others."""
        segment = self.segments[-1]
        self._pending.append((self.next_offset, segment.base_offset, segment.size_bytes))

    @property
    def history(self) -> LogHistory:
        """Which log its offsets count in."""
        return LogHistory(self.topic_id, self.lives)

    def live(self, life: str) -> None:
        """What is appended from now on is of this life."""
        self.lives = with_life(self.lives, life, self.next_offset)
        self.log = log_name(self.topic_id, life).encode()

    def began(self, epoch: int) -> None:
        """The broker started: what is on disk is as it was."""

    def segment_path(self, segment_base: int) -> str:
        """The file of a segment, relative to the data directory."""
        return f"log/{self.topic_id}/{self.number}/{segment_base:020d}.log"

    @property
    def size_bytes(self) -> int:
        """Of all segments."""
        return sum(segment.size_bytes for segment in self.segments)

    # --- durable side ------------------------------------------------------------------------------------------------

    def publish(self, next_offset: int) -> None:
        """Everything below ``next_offset`` is forced and in the files: readers may see it."""
        if next_offset > self.high_watermark:
            self.show(self.end_at(next_offset))

    def end_at(self, next_offset: int) -> LogPosition:
        """Where the log ends that is forced and in the files up to ``next_offset``; once, and never backwards."""
        pending = self._pending
        if next_offset == self.next_offset:
            segment = self.segments[-1] if self.segments else Segment(next_offset)
            pending.clear()
            return next_offset, segment.base_offset, segment.size_bytes
        number = bisect_left(pending, (next_offset,))
        if number == len(pending) or pending[number][0] != next_offset:
            raise StorageError(f"{self.topic}-{self.number}: offset {next_offset} is not the end of a placed batch")
        end = pending[number]
        del pending[: number + 1]
        return end

    def show(self, place: LogPosition) -> None:
        """Readers may see what is below ``place``, which ``end_at`` or ``place`` told."""
        if place[0] > self.high_watermark:
            self._durable = place
            self.high_watermark = place[0]

    def read(self, files: FileCache, offset: int, size_bytes_max: int, *, nowait: bool = False) -> bytes | None:
        """Whole batches, the first of which holds ``offset``, none beyond the high watermark.

        At most ``size_bytes_max`` bytes, but at least one batch; ``b""`` at the high watermark.

        Returns:
            None where ``nowait`` and the bytes are not cached: call again, without, from a thread.

        Raises:
            OffsetOutOfRangeError: with start and end in its text.
            UnknownTopicError: the topic was deleted meanwhile.
            CorruptRecordError: the segment is damaged, cut off or missing.
        """
        durable = self._durable
        if not self.log_start <= offset <= durable[0]:
            raise self._out_of_range(offset)
        if offset == durable[0]:
            return b""
        extent = self._extent_of(offset, durable)
        hint = self._hint
        known = hint[2] if hint[0] == offset and hint[1] == extent.base_offset else None
        try:
            chunk = _read_chunk(files, extent, offset, size_bytes_max, hint=known, nowait=nowait)
        except WouldWaitError:
            return None
        except FileNotFoundError:
            raise self._missing(offset, extent.path) from None
        self._hint = (chunk.end_offset, extent.base_offset, chunk.end_position)
        return chunk.batches

    def offset_for(self, files: FileCache, timestamp_ms: int) -> int:
        """Base offset of the first batch whose max timestamp is not below ``timestamp_ms``, or the end.

        May walk a whole segment, so call it from a thread. Raises as ``read``.
        """
        durable = self._durable
        for segment in self.segments:
            if segment.base_offset >= durable[0]:
                break
            if segment.max_timestamp_ms < timestamp_ms:
                continue
            extent = self._extent_of(segment.base_offset, durable)
            try:
                found = _find_time(files, extent, timestamp_ms)
            except FileNotFoundError:
                if segment.base_offset >= self.log_start:
                    raise self._missing(segment.base_offset, extent.path) from None
                continue  # retention was faster
            if found is not None:
                return max(found, self.log_start)
        return durable[0]

    def _extent_of(self, offset: int, durable: LogPosition) -> Extent:
        segments = self.segments
        number = bisect_right(segments, offset, key=_base_offset) - 1
        if number < 0:
            raise self._out_of_range(offset)
        base = segments[number].base_offset
        if base == durable[1]:
            return Extent(self.segment_path(base), base, durable[0], durable[2])
        return Extent(self.segment_path(base), base, segments[number + 1].base_offset, segments[number].size_bytes)

    def _out_of_range(self, offset: int) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            f"offset {offset} of {self.topic}-{self.number} is outside [{self.log_start}, {self.high_watermark}]"
        )

    def _missing(self, offset: int, path: str) -> Exception:
        if offset < self.log_start:
            return self._out_of_range(offset)  # retention was faster
        if self.is_deleted:
            return UnknownTopicError(f"topic {self.topic!r} was deleted")
        return CorruptRecordError(path, 0, "the segment's file is missing")

    # --- retention ---------------------------------------------------------------------------------------------------

    def expired_segments(self, now_ms: int) -> tuple[int, list[str]]:
        """The files that retention removes: (new log start, files below it). Never a segment with messages not yet
        published.

        A segment is as old as its newest message; as the next segment's creation where that message is from the
        future (it must not keep the segment for ever) or where none has a time. A creation in the future is by a clock
        that was ahead: it counts from now. By age the active segment goes too: the next batch begins another. By size,
        the oldest go while the others hold at least ``retention_size_bytes``.
        """
        for segment in self.segments:
            if segment.created_ms > now_ms:
                ahead = self._ahead = self._ahead or {}
                ahead[segment.base_offset] = min(ahead.get(segment.base_offset, now_ms), now_ms)
        left, start, paths = self.size_bytes, self.log_start, []
        for segment, following in pairwise([*self.segments, Segment(self.next_offset, created_ms=now_ms)]):
            left -= segment.size_bytes
            if following.base_offset > self.high_watermark or not self._is_expired(segment, following, left, now_ms):
                break
            start = following.base_offset
            paths.append(self.segment_path(segment.base_offset))
        return start, paths

    def _is_expired(self, segment: Segment, following: Segment, left: int, now_ms: int) -> bool:
        config = self.config
        if config.retention_size_bytes is not None and left >= config.retention_size_bytes:
            return True
        if config.retention_ms is None:
            return False
        newest_ms = segment.max_timestamp_ms
        if not 0 <= newest_ms <= now_ms:
            newest_ms = following.created_ms
            if newest_ms > now_ms and self._ahead is not None:
                newest_ms = self._ahead[following.base_offset]
        if newest_ms < 0:
            return False
        return now_ms - newest_ms > config.retention_ms

    def set_log_start(self, offset: int) -> None:
        """Forget everything below ``offset``; journal it before, unlink the files after."""
        if offset <= self.log_start:
            return
        self.log_start = offset
        ends = [*(segment.base_offset for segment in self.segments[1:]), self.next_offset]
        self.segments = [segment for segment, end in zip(self.segments, ends, strict=False) if end > offset]
        if self._ahead:
            self._ahead = {base: now_ms for base, now_ms in self._ahead.items() if base >= offset} or None

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def freeze(self) -> Frozen:
        """A copy of the assigned side; ``row`` makes it JSON-able, in any thread.

        The list of segments is replaced, or appended to, and all but the last are complete: its length is as good as a
        copy.
        """
        segments = self.segments
        if not segments:
            return self.log_start, self.next_offset, self.lives, segments, 0, 0, 0, 0
        active = segments[-1]
        return (
            self.log_start, self.next_offset, self.lives, segments, len(segments), active.size_bytes,
            active.max_timestamp_ms, active.created_ms,
        )  # fmt: skip

    def snapshot(self) -> list[Any]:
        """JSON-able assigned side."""
        return row(self.freeze())

    def restore(self, snapshot: Sequence[Any]) -> None:
        """The reverse of ``snapshot``; then ``redo`` what came after, then ``publish``."""
        self.log_start, self.next_offset, lives, listed = snapshot
        self.lives = tuple((life, offset) for life, offset in lives)
        self.segments = [Segment(*fields) for fields in listed]


def segment_base(name: str) -> int | None:
    """The base offset in the name of a segment's file; None if it is no such name."""
    match = _SEGMENT_NAME.match(name)
    return None if match is None else int(match[1])


def row(frozen: tuple[Any, ...]) -> list[Any]:
    """What ``Partition.restore`` takes, of what ``freeze`` returned."""
    log_start, next_offset, lives, segments, count, *active = frozen
    listed = [[s.base_offset, s.size_bytes, s.max_timestamp_ms, s.created_ms] for s in islice(segments, count)]
    if listed:
        listed[-1][1:] = active
    return [log_start, next_offset, lives, listed]


def _base_offset(segment: Segment) -> int:
    return segment.base_offset


# --- reading one segment ---------------------------------------------------------------------------------------------


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


def _read_chunk(
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


def _find_time(files: FileCache, extent: Extent, timestamp_ms: int) -> int | None:
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
