"""``spark.read.format("txmq").load(path)``: segment files and archived segments, without a broker.

Theory of operation. The driver plans which bytes of which files each task reads; a task reads its part of one file in
steps, through the same checks and decoder as what comes from a broker. Large segments are cut at batches, found by
following the headers. Executors read the files by the path the driver names: on a cluster they need the same file
system.

Layouts that are known, by the directory that is named::

    <data directory>      with log/<topic id>/<partition>/*.log and archive/ likewise
    <log or archive>      <topic id>/<partition>/*.log
    <topic id>            <partition>/*.log
    <partition>           *.log, in a directory whose parent is named by the topic id

Topic id and partition are needed: they are under every batch's placement CRC. A segment that is in both archive/ and
log/ is taken from the archive: a crash between moving it there and forgetting it may have left a part of it in log/.

What is known committed? A segment file holds only what the journal held before, forced: whole batches in it are
committed, whatever process died when. What readers may see of them, where the partition ends, and which topic it is,
only the journal says. So:

* below a data directory the journal is asked (``stopped_broker``). Nothing above the high watermark is given out. If a
  file ends before it, the rest is only in the journal; that is an error, or a warning (``failOnDataLoss=false``).
* in a copy of segments alone, all whole batches are given out, also of an XA decision whose rows are not all committed
  yet. A last segment that ends inside a batch ends before it; anything else that is not whole is damage.

Invariants: exactly the rows planned come out, or an error that names file and position; with ``failOnDataLoss=false``
a part that is damaged ends before the damage, with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import DataSourceReader, InputPartition

from txmq.errors import ConfigError, CorruptRecordError, DataLossError, StorageError
from txmq.log import records
from txmq.log.batch import HEADER, HEADER_SIZE, MAGIC, place_checksum
from txmq.log.partition import Partition
from txmq.log.verify import whole_batch_follows
from txmq.model import Storage
from txmq.runtime.logging import get_logger
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.ports import Disk, File
from txmq.runtime.threads import processor_count
from txmq.spark.decode import arrow_columns
from txmq.spark.decode.chunk import Chunk, Origin, check
from txmq.spark.source.batch_reader import within
from txmq.spark.source.catalog import Held, check_offsets, placed
from txmq.spark.source.options import SourceOptions, Where
from txmq.spark.source.ranges import Range
from txmq.spark.stopped_broker import Folded, fold, is_data_directory, locked

if TYPE_CHECKING:
    from pyarrow import RecordBatch


LOG: Final = "log"
ARCHIVE: Final = "archive"
_SEGMENT: Final = re.compile(r"([0-9]{20})\.log\Z", re.ASCII)
PartitionId = tuple[int, int]  # topic id, partition
_UNEVEN: Final = 1.25  # a segment that is larger than a task's share by less is not cut
STEP_SIZE_BYTES: Final = 8 << 20
_SCHEME: Final = "file:"


# --- the layout -------------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """A segment's file, relative to the root, and its size."""

    path: str
    base_offset: int
    size_bytes: int


def segments_below(disk: Disk, root: str) -> dict[PartitionId, list[Segment]]:
    """All segments, by partition, ascending.

    Args:
        root: the directory's absolute name.

    Raises:
        ConfigError: nothing below it is laid out as segments are.
    """
    found: dict[PartitionId, dict[int, Segment]] = {}
    for partition_id, directory in _directories(disk, root):
        for segment in _segments_in(disk, directory):
            found.setdefault(partition_id, {}).setdefault(segment.base_offset, segment)
    if not found and not (disk.exists(LOG) or disk.exists("journal")):
        raise ConfigError(
            f"option path: no segments below {root}; it must be a broker's data directory, or hold "
            "<topic id>/<partition>/<base offset>.log as its directories log/ and archive/ do"
        )
    return {partition_id: [known[base] for base in sorted(known)] for partition_id, known in sorted(found.items())}


def _directories(disk: Disk, root: str) -> Iterator[tuple[PartitionId, str]]:
    trees = [name for name in (ARCHIVE, LOG) if disk.exists(name)]
    if trees:
        for tree in trees:
            yield from _tree(disk, tree)
        return
    names = root.rstrip("/").split("/")
    own, parent = names[-1], names[-2] if len(names) > 1 else ""
    if own.isdecimal() and parent.isdecimal() and any(_SEGMENT.match(name) for name in disk.list_directory("")):
        yield (int(parent), int(own)), ""
    elif own.isdecimal() and any(list(_segments_in(disk, name)) for name in _numbers(disk, "")):
        for number in _numbers(disk, ""):
            yield (int(own), int(number)), number
    else:
        yield from _tree(disk, "")


def _tree(disk: Disk, directory: str) -> Iterator[tuple[PartitionId, str]]:
    for topic in _numbers(disk, directory):
        below = f"{directory}/{topic}" if directory else topic
        for number in _numbers(disk, below):
            yield (int(topic), int(number)), f"{below}/{number}"


def _numbers(disk: Disk, directory: str) -> list[str]:
    return [name for name in disk.list_directory(directory) if name.isascii() and name.isdecimal()]


def _segments_in(disk: Disk, directory: str) -> Iterator[Segment]:
    for name in disk.list_directory(directory):
        match = _SEGMENT.match(name)
        if match is not None:
            path = f"{directory}/{name}" if directory else name
            file = disk.open(path, writable=False)
            try:
                yield Segment(path, int(match[1]), file.size())
            finally:
                file.close()


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileTask:
    """A part of one segment file, whole batches.

    Attributes:
        offset: of the batch at ``position``; ``start`` and ``end``: which rows of what is there.
    """

    root: str
    path: str
    topic: str
    partition_id: PartitionId
    position: int
    end_position: int
    offset: int
    start: int
    end: int


class Batch(NamedTuple):
    """A batch by its header."""

    position: int
    size_bytes: int
    base_offset: int
    row_count: int
    max_timestamp_ms: int


def plan(options: SourceOptions, root: str, tasks_min: int) -> list[tuple[FileTask, ...]]:
    """Divide the files below ``root`` among tasks.

    Raises:
        ConfigError: no segments there, an unknown topic, offsets that are not there.
        DirectoryInUseError: a broker runs on the directory.
        CorruptRecordError, StorageError: the journal, or a header on the way, is damaged.
        DataLossError: messages that should be read are not in the files.
    """
    disk = OSDisk(root)
    try:
        is_whole = is_data_directory(disk)
        with locked(disk) if is_whole else nullcontext():
            folded = _folded(disk, options) if is_whole else None
            return _Planner(disk, root, options, folded).run(tasks_min)
    finally:
        disk.close()


def _folded(disk: OSDisk, options: SourceOptions) -> Folded | None:
    try:
        return fold(disk)
    except StorageError as error:
        text = f"the journal cannot be read: {error}"
        if options.fails_on_loss:
            advice = "option failOnDataLoss=false reads the segments alone, topics then have their ids for names"
            raise StorageError(f"{text}; {advice}") from error
        get_logger().warning("segments are read without their journal", text=text)
        return None


class _Planner:
    def __init__(self, disk: OSDisk, root: str, options: SourceOptions, folded: Folded | None) -> None:
        self._disk, self._root, self._options = disk, root, options
        self._state = None if folded is None else folded.state
        self._durable = {} if folded is None else folded.durable
        self._chains: dict[PartitionId, list[Segment]] = {}

    def run(self, tasks_min: int) -> list[tuple[FileTask, ...]]:
        held = self._held()
        options = self._options
        check_offsets(options.start, held, "startingOffsets")
        check_offsets(options.end, held, "endingOffsets")
        chosen = [
            within(each, *self._bounds(each, options.start, options.end), fails_on_loss=options.fails_on_loss)
            for topic in held
            for each in topic.partitions.values()
        ]
        parts = [part for each in chosen for part in self._files(each)]
        total = sum(part.end_position - part.position for part in parts)
        share = max(min(options.task_size_bytes, -(-total // tasks_min)), 1)
        return list(_packed([task for part in parts for task in self._cut(part, share)], share))

    # --- what there is -----------------------------------------------------------------------------------------------

    def _held(self) -> list[Held]:
        """The topics that are wanted, with what their files hold."""
        topics: dict[str, Held] = {}
        names: dict[str, None] = {}
        found = segments_below(self._disk, self._root)
        for partition_id in sorted({*found, *self._known_partition_ids()}):
            name = self._name(partition_id[0])
            if name is not None:
                names[name] = None
            if name is None or not self._options.takes(name):
                continue
            chain, end = self._chain(partition_id, found.get(partition_id, []))
            self._chains[partition_id] = chain
            start = chain[0].base_offset if chain else end
            size_bytes = sum(segment.size_bytes for segment in chain)
            held = topics.setdefault(name, Held(name, partition_id[0], {}))
            held.partitions[partition_id[1]] = Range(name, partition_id[0], partition_id[1], start, end, size_bytes)
        for held in topics.values():
            self._refuse_part(held)
        for name in self._options.topics or ():
            if name not in topics:
                raise ConfigError(f"no topic {name!r} below {self._root}; there are {', '.join(names) or 'none'}")
        return list(topics.values())

    def _refuse_part(self, held: Held) -> None:
        """A directory has the partitions of one home; those of others are not there to be read."""
        placed = None if self._state is None else self._state.placed.get(held.topic_id)
        if self._state is None or placed is None:
            return
        elsewhere = [number for number, home in enumerate(placed.homes) if home != self._state.home]
        if not elsewhere:
            return
        text = (
            f"{self._root} has the partitions of home {self._state.home:016x} only: {held.name} has partitions "
            f"{', '.join(map(str, elsewhere))} at other homes"
        )
        if self._options.fails_on_loss:
            raise DataLossError(
                f"{text}. Read through a broker (option bootstrap); failOnDataLoss=false reads this home's partitions"
            )
        get_logger().warning("the partitions of one home are read", text=text)

    def _known_partition_ids(self) -> Iterator[PartitionId]:
        if self._state is not None:
            for partition in self._state.all_partitions():
                if partition.config.storage is Storage.DISK:
                    yield partition.topic_id, partition.number

    def _name(self, topic_id: int) -> str | None:
        """The topic's name, its id if no journal holds its name; None if it was deleted and is not asked for."""
        if self._state is None:
            return str(topic_id)
        topic = self._state.topics.with_id(topic_id)
        if topic is not None:
            return topic.config.name
        return str(topic_id) if str(topic_id) in (self._options.topics or ()) else None

    def _chain(self, partition_id: PartitionId, segments: list[Segment]) -> tuple[list[Segment], int]:
        """The segments that follow each other, and the offset after the last message that may be read."""
        partition = None if self._state is None else self._state.partition(*partition_id)
        if partition is not None:
            return self._known_chain(partition, segments)
        if not segments:
            return [], 0
        return segments, self._end_of_copy(partition_id, segments[-1])

    def _known_chain(self, partition: Partition, segments: list[Segment]) -> tuple[list[Segment], int]:
        """Segments as the journal knows them, after those that were archived."""
        files = {segment.base_offset: segment for segment in segments}
        known = {each.base_offset: each.size_bytes for each in partition.segments}
        first = min(known, default=partition.next_offset)
        chain = [s for s in segments if s.base_offset < first and s.path.startswith(ARCHIVE)]
        for base, size_bytes in known.items():
            file = files.get(base)
            if file is None or file.size_bytes < size_bytes:
                return self._short(partition, chain, file, base)
            chain.append(file._replace(size_bytes=size_bytes))
        return chain, partition.high_watermark

    def _short(
        self, partition: Partition, chain: list[Segment], file: Segment | None, base: int
    ) -> tuple[list[Segment], int]:
        """A file that is not as long as the journal says."""
        partition_id, end = (partition.topic_id, partition.number), base
        if file is not None:
            for batch in self._batches(partition_id, file):
                end = batch.base_offset + batch.row_count
                file = file._replace(size_bytes=batch.position + batch.size_bytes)
            chain.append(file)
        if end >= partition.high_watermark:
            return chain, partition.high_watermark
        if end < self._durable.get(partition_id, 0) and self._options.fails_on_loss:
            path, size = (partition.segment_path(base), 0) if file is None else (file.path, file.size_bytes)
            raise CorruptRecordError(f"{self._root}/{path}", size, f"ends at offset {end}; more was forced into it")
        text = (
            f"{partition.topic}-{partition.number}: offsets {end} to {partition.high_watermark - 1} are not in the "
            "segment files; start the broker on the directory once: it writes them again from its journal"
        )
        if self._options.fails_on_loss:
            raise DataLossError(f"{text}. Set the option failOnDataLoss=false to read without them")
        get_logger().warning("messages are not in the segment files", text=text)
        return chain, end

    def _end_of_copy(self, partition_id: PartitionId, segment: Segment) -> int:
        """The end of the whole batches in the last segment; damage if more of them follow."""
        end, position = segment.base_offset, 0
        for batch in self._batches(partition_id, segment):
            end, position = batch.base_offset + batch.row_count, batch.position + batch.size_bytes
        if position < segment.size_bytes:
            file = self._disk.open(segment.path, writable=False)
            try:
                if whole_batch_follows(file, partition_id, position + 1) and self._options.fails_on_loss:
                    raise CorruptRecordError(f"{self._root}/{segment.path}", position, "no batch; whole batches follow")
            finally:
                file.close()
        return end

    # --- where -------------------------------------------------------------------------------------------------------

    def _bounds(self, held: Range, start: Where, end: Where) -> tuple[int, int]:
        return (
            placed(held, start, self._offset_at, is_end=False),
            placed(held, end, self._offset_at, is_end=True),
        )

    def _offset_at(self, held: Range, timestamp_ms: int) -> int:
        partition_id = (held.topic_id, held.partition)
        for segment in self._chains[partition_id]:
            for batch in self._batches(partition_id, segment):
                if batch.max_timestamp_ms >= timestamp_ms:
                    return min(self._first_at(held, segment, batch, timestamp_ms), held.end)
        return held.end

    def _first_at(self, held: Range, segment: Segment, batch: Batch, timestamp_ms: int) -> int:
        file = self._disk.open(segment.path, writable=False)
        try:
            content = file.pread(batch.size_bytes, batch.position)
        finally:
            file.close()
        messages = records.decode(content, held.topic, held.partition, topic_id=held.topic_id)
        found = (message.offset for message in messages if message.timestamp_ms >= timestamp_ms)
        return next(
            found, batch.base_offset + batch.row_count
        )  # the header may name a later time than its messages have

    def _batches(self, partition_id: PartitionId, segment: Segment) -> Iterator[Batch]:
        file = self._disk.open(segment.path, writable=False)
        try:
            yield from batches_of(file, partition_id, segment.size_bytes)
        finally:
            file.close()

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _files(self, chosen: Range) -> Iterator[FileTask]:
        """One task for each segment that holds something of the range."""
        partition_id = (chosen.topic_id, chosen.partition)
        chain = self._chains[partition_id]
        for number, segment in enumerate(chain):
            following = chain[number + 1].base_offset if number + 1 < len(chain) else chosen.end
            start, end = max(chosen.start, segment.base_offset), min(chosen.end, following)
            if start < end:
                yield FileTask(
                    self._root,
                    segment.path,
                    chosen.topic,
                    partition_id,
                    0,
                    segment.size_bytes,
                    segment.base_offset,
                    start,
                    end,
                )

    def _cut(self, task: FileTask, share: int) -> Iterator[FileTask]:
        """Cut a task at batches into parts of about ``share`` bytes; what is before its first row is left out."""
        size = task.end_position
        if size <= share * _UNEVEN and task.start == task.offset:
            yield task
            return
        pieces = -(-size // share)
        marks = [(task.position, task.offset)]
        for batch in self._batches(task.partition_id, Segment(task.path, task.offset, task.end_position)):
            if batch.position == 0 and batch.base_offset != task.offset:
                yield task  # misnamed: its reader says so
                return
            if batch.base_offset <= task.start:
                marks = [(batch.position, batch.base_offset)]
            elif batch.position >= marks[-1][0] + size // pieces:
                marks.append((batch.position, batch.base_offset))
        for number, (position, offset) in enumerate(marks):
            is_last = number + 1 == len(marks)
            end_position = task.end_position if is_last else marks[number + 1][0]
            end = task.end if is_last else min(task.end, marks[number + 1][1])
            start = max(task.start, offset)
            if start < end:
                yield FileTask(
                    task.root, task.path, task.topic, task.partition_id, position, end_position, offset, start, end
                )


def _packed(tasks: list[FileTask], share: int) -> Iterator[tuple[FileTask, ...]]:
    """Small ones together, so that thousands of small segments are not thousands of Spark tasks."""
    gathered: list[FileTask] = []
    size = 0
    for task in tasks:
        added = task.end_position - task.position
        if gathered and size + added > share * _UNEVEN:
            yield tuple(gathered)
            gathered, size = [], 0
        gathered.append(task)
        size += added
    if gathered:
        yield tuple(gathered)


def batches_of(file: File, partition_id: PartitionId, end_position: int) -> Iterator[Batch]:
    """Follow the headers from the beginning, as long as they are sound; their batches are not looked into."""
    position = 0
    while position + HEADER_SIZE <= end_position:
        header = file.pread(HEADER_SIZE, position)
        if len(header) < HEADER_SIZE:
            return
        base, length, stamp, magic, crc, _, _, _, max_ms, _, _, _, count = HEADER.unpack(header)
        size = length + 12
        if magic != MAGIC or size < HEADER_SIZE or position + size > end_position or count < 1:
            return
        if stamp & 0xFFFFFFFF != place_checksum(*partition_id, base, length, crc):
            return
        yield Batch(position, size, base, count, max_ms)
        position += size


# --- a task reads -----------------------------------------------------------------------------------------------------


class FilePartition(InputPartition):  # type: ignore[misc]
    """The part of one Spark task."""

    def __init__(self, tasks: tuple[FileTask, ...]) -> None:
        super().__init__(tasks)
        self.tasks = tasks


class PathReader(DataSourceReader):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns

    def partitions(self) -> list[InputPartition]:
        """Plan."""
        root = _root(self._options.path or "")
        planned = plan(self._options, root, self._options.tasks_min or processor_count())
        return [FilePartition(tasks) for tasks in planned]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """In a task: the rows of one part. Spark asks for one part without a value if there is nothing to read."""
        for task in partition.tasks if isinstance(partition, FilePartition) else ():
            try:
                yield from FileReader(task, self._columns).rows()
            except (CorruptRecordError, DataLossError) as error:
                if self._options.fails_on_loss:
                    raise
                get_logger().warning("what follows in this part of a segment is passed over", text=str(error))


def _root(path: str) -> str:
    if path.startswith(_SCHEME):
        path = "/" + path.removeprefix(_SCHEME).lstrip("/")
    elif "://" in path:
        raise ConfigError(f"option path = {path!r}: a directory of a file system that all executors have")
    root = Path(path).absolute()
    if not root.is_dir():  # look for it before it is opened: a Disk makes its directory
        raise ConfigError(f"option path = {path!r}: no such directory")
    return str(root)


class FileReader:
    """One part of a file; rows below ``_given`` were given out."""

    def __init__(self, task: FileTask, names: tuple[str, ...]) -> None:
        self._task, self._names, self._given = task, names, task.start
        self._origin = Origin(f"{task.root}/{task.path}", task.topic, *task.partition_id)

    def rows(self) -> Iterator[RecordBatch]:
        """The rows.

        Raises:
            CorruptRecordError: names file and position; what is before it was given out.
            DataLossError: the file is gone.
        """
        disk = OSDisk(self._task.root)
        try:
            file = disk.open(self._task.path, writable=False)
        except FileNotFoundError as error:
            raise DataLossError(f"{self._origin.path} is gone since the query was planned") from error
        finally:
            disk.close()
        try:
            yield from self._steps(file)
        finally:
            file.close()

    def _steps(self, file: File) -> Iterator[RecordBatch]:
        task = self._task
        position, offset, size = task.position, task.offset, STEP_SIZE_BYTES
        while offset < task.end:
            content = file.pread(min(size, task.end_position - position), position)
            chunk = check(content, self._origin, offset, position=position)
            try:
                yield from self._given_out(chunk, task.end)
            except CorruptRecordError as error:
                sound = check(content[: error.position - position], self._origin, offset, position=position)
                yield from self._given_out(sound, task.end)
                raise
            if chunk.damage is not None:
                raise chunk.damage
            position, offset = position + chunk.size_bytes, chunk.next_offset or offset
            size = STEP_SIZE_BYTES
            if not chunk.size_bytes:
                if not len(content) < chunk.wanted_bytes <= task.end_position - position:
                    text = f"ends at offset {offset}, {task.end} was to follow"
                    raise CorruptRecordError(self._origin.path, position, text)
                size = chunk.wanted_bytes

    def _given_out(self, chunk: Chunk, end: int) -> Iterator[RecordBatch]:
        for rows in arrow_columns.decode(chunk, self._names, self._given, end):
            self._given += rows.num_rows
            yield rows
