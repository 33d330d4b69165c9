"""``spark.read.format("txmq").load(path)``: segment files and archived segments, without a broker.

Theory of operation. The driver plans (``plan``); each task reads its part of one file in steps, through the same
checks and decoder as what comes from a broker. Executors read the files by the path the driver names: on a cluster
they need the same file system.

Invariants: exactly the rows planned come out, or an error that names file and position; with ``failOnDataLoss=false``
a part that is damaged ends before the damage, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from txmq.errors import ConfigError, CorruptRecordError, DataLossError
from txmq.runtime.logging import get_logger
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.ports import File
from txmq.runtime.threads import processor_count
from txmq.spark.decode import arrow_columns
from txmq.spark.decode.chunk import Chunk, Origin, check
from txmq.spark.segment_files.plan import FileTask, plan
from txmq.spark.source.options import SourceOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch

STEP_SIZE_BYTES: Final = 8 << 20
_SCHEME: Final = "file:"


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
