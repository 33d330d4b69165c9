"""``spark.read.format("txmq")`` through the broker: what is read is fixed when the query is planned.

Theory of operation. The driver asks each topic for its id and its ends, makes of the options a range for every
partition, and cuts the ranges into tasks, so that all cores work; executors read them by themselves (``source_fetch``).
What arrives after the pinned ends is not read; what retention takes before it was read is an error, or a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from txmq.errors import ConfigError, DataLossError
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import processor_count
from txmq.spark.source.catalog import Catalog, check_offsets, connect, placed
from txmq.spark.source.fetch import Reading, read_ranges
from txmq.spark.source.options import SourceOptions
from txmq.spark.source.ranges import Range, pack, split

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_TASKS_A_PROCESSOR: Final = 4  # smaller ones are put together
_TASK_ROWS_MIN: Final = 10_000  # a task costs Spark as much as reading these


class RangePartition(InputPartition):  # type: ignore[misc]
    """The part of one task."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        assert options.bootstrap is not None
        self._options = options
        self._reading = Reading(options.bootstrap, columns, options.fails_on_loss, options.timeout)

    def partitions(self) -> list[InputPartition]:
        """Plan: pin the ranges and cut them."""
        return tasks(plan(self._options), self._options)

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """In a task: the rows of one part. Spark asks for one part without a value if there is nothing to read."""
        if isinstance(partition, RangePartition):
            yield from read_ranges(partition.ranges, self._reading)


def tasks(ranges: list[Range], options: SourceOptions) -> list[InputPartition]:
    """The ranges, cut into what one task reads each."""
    tasks_min = options.tasks_min or processor_count()
    parts = split(ranges, tasks_min, options.task_size_bytes)
    rows = sum(each.count for each in ranges) // (_TASKS_A_PROCESSOR * tasks_min)
    return [
        RangePartition(together)
        for together in pack(parts, max(rows, _TASK_ROWS_MIN if options.tasks_min is None else 0))
    ]


def plan(options: SourceOptions) -> list[Range]:
    """A range for each partition that must be read, pinned now.

    Raises:
        ConfigError: an offset that the partition has not reached, or a partition that does not exist.
        DataLossError: the start is before what is left.
        UnknownTopicError, ConnectionLostError: as their names say.
    """
    assert options.bootstrap is not None
    with connect(options.bootstrap, options.timeout) as client:
        catalog = Catalog(client, options)
        topics = catalog.topics()
        found = [catalog.held(topic) for topic in topics]
        check_offsets(options.start, found, "startingOffsets")
        check_offsets(options.end, found, "endingOffsets")
        return [_range(catalog, each, options) for held in found for each in held.partitions.values()]


def _range(catalog: Catalog, held: Range, options: SourceOptions) -> Range:
    start = placed(held, options.start, catalog.offset_at, is_end=False)
    end = placed(held, options.end, catalog.offset_at, is_end=True)
    return within(held, start, end, fails_on_loss=options.fails_on_loss)


def within(held: Range, start: int, end: int, *, fails_on_loss: bool) -> Range:
    """The part of what is held from ``start`` to ``end``.

    Raises:
        DataLossError: ``start`` is before what is held.
        ConfigError: ``start`` or ``end`` is beyond it, or they are the wrong way round.
    """
    name = f"{held.topic}-{held.partition}"
    if not start <= end <= held.end:
        raise ConfigError(f"{name}: offsets from {start} to {end} are asked for; it holds {held.start} to {held.end}")
    if start < held.start and start < end:
        text = f"{name}: offsets {start} to {min(held.start, end) - 1} are gone; the partition holds {held.start} on"
        if fails_on_loss:
            raise DataLossError(f"{text}. Set the option failOnDataLoss=false to read without them")
        get_logger().warning("messages are gone before they were read", text=text)
        start = min(held.start, end)
    return held.cut(start, end)
