"""``spark.readStream.format("txmq")``: micro-batches of pinned ranges, resumed exactly from Spark's checkpoint.

Theory of operation. One instance lives in the driver's process and plans: how far to read next (``latestOffset``), and
into which tasks that is cut (``partitions``); each task has a pickled copy of its own. Spark writes the end of a
micro-batch to its checkpoint before it runs, and after a crash runs the same micro-batch again: same start, same end,
so the same rows. ``commit`` is no sign of anything (Spark calls it late, or never), so nothing depends on it.

New partitions, and new topics that a pattern matches, are read from their first message. Admission divides what may be
read in proportion to what waits; bytes are what the broker says a partition takes, evenly spread.

Invariants:
    * the rows of a micro-batch are a function of its two offsets and the log alone;
    * a topic is known by its id: one that was made anew under the same name stops the query; so does an older copy of a
      broker's data directory, by the history of the log;
    * with ``Trigger.AvailableNow`` nothing is read that came after the query began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from txmq.client import Client
from txmq.errors import DataLossError, UnknownTopicError
from txmq.log.history import LogHistory
from txmq.runtime.logging import get_logger
from txmq.spark.source.batch_reader import RangePartition, Reading, read_ranges, tasks, within
from txmq.spark.source.catalog import Catalog, Held, check_offsets, connect, made_anew, placed
from txmq.spark.source.offsets import Ends, Position
from txmq.spark.source.options import SourceOptions
from txmq.spark.source.ranges import Range, admit

if TYPE_CHECKING:
    from pyarrow import RecordBatch

Json = dict[str, Any]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options, self._reading = options, Reading.of(options, columns)
        self._client: Client | None = None  # made when it is needed: what is pickled has none
        self._target: Ends | None = None  # with AvailableNow
        self._seen: Position | None = None  # what there was when last asked
        self._logs: dict[tuple[str, int], LogHistory] = {}

    # --- how far -----------------------------------------------------------------------------------------------------

    def initialOffset(self) -> Json:
        """The start of a query without a checkpoint."""
        catalog, options = self._catalog(), self._options
        found = [catalog.logged(topic) for topic in catalog.topics()]
        check_offsets(options.start, found, "startingOffsets")
        ends = {
            held.name: {number: self._start(catalog, each) for number, each in held.partitions.items()}
            for held in found
        }
        return replace(Position.before(found, ends), is_initial=True).to_json()

    def _start(self, catalog: Catalog, held: Range) -> int:
        start = placed(held, self._options.start, catalog.offset_at, is_end=False)
        return within(held, start, held.end, fails_on_loss=self._options.fails_on_loss).start

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit that Spark is given; ``latestOffset`` keeps both, whichever it is."""
        if self._options.trigger_rows_max is not None:
            return ReadMaxRows(self._options.trigger_rows_max)
        if self._options.trigger_size_bytes_max is not None:
            return ReadMaxBytes(self._options.trigger_size_bytes_max)
        return ReadAllAvailable()

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """The end of the next micro-batch; ``start`` itself if nothing is new."""
        position = Position.from_json(start)
        catalog = self._catalog()
        read_before = [name for name in position.ids if self._options.takes(name)]
        found = self._held(dict.fromkeys([*catalog.topics(), *read_before]), position)
        self._seen = _ends_of(found.values())
        waiting = {
            (held.name, number): self._waiting(each, position.ends.get(held.name, {}).get(number, 0))
            for held in found.values()
            for number, each in held.partitions.items()
            if self._target is None or number in self._target.get(held.name, {})
        }
        if not any(each.count for each in waiting.values()):
            return start
        is_limited = not isinstance(limit, ReadAllAvailable)
        rows_max, size_bytes_max = self._options.trigger_rows_max, self._options.trigger_size_bytes_max
        ends = admit(waiting, rows_max if is_limited else None, size_bytes_max if is_limited else None)
        by_topic: Ends = {name: {} for name in found}
        for (topic, number), end in ends.items():
            by_topic[topic][number] = end
        following = Position.before(found.values(), by_topic)
        if position.is_initial:
            following.begins = position.ends
        return following.to_json()

    def _waiting(self, held: Range, start: int) -> Range:
        """The offsets of a partition that were not read yet."""
        if held.end < start:
            self._lost(
                f"{held.topic}-{held.partition}: read up to {start}, the broker holds {held.start} to {held.end}"
            )
        end = held.end
        if self._target is not None:
            end = min(end, self._target[held.topic][held.partition])
        counted = held.cut(max(start, held.start), max(start, held.start, end))
        return Range(held.topic, held.topic_id, held.partition, start, max(start, end), counted.size_bytes, held.log)

    def reportLatestOffset(self) -> Json:
        """All there is, for the lag (``txmq.spark.source.offsets.lag``)."""
        if self._seen is None:
            catalog = self._catalog()
            self._seen = _ends_of([catalog.logged(topic) for topic in catalog.topics()])
        return self._seen.to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Pin the ends of the log as they are now."""
        catalog = self._catalog()
        self._target = _ends_of([catalog.logged(topic) for topic in catalog.topics()]).ends

    # --- which rows --------------------------------------------------------------------------------------------------

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        """The tasks of the micro-batch between two offsets; the same whenever it is asked."""
        last = Position.from_json(end)
        begins = Position.from_json(start).start_of(last)
        found = self._held(last.ids, last)
        ranges = []
        for topic, ends in last.ends.items():
            if topic in found:
                for number, to in ends.items():
                    begin = begins.get(topic, {}).get(number, 0)
                    ranges.append(self._range(found[topic], number, (begin, to)))
        return tasks([each for each in ranges if each.count > 0], self._options)

    def _range(self, held: Held, number: int, bounds: tuple[int, int]) -> Range:
        each = held.partitions.get(number)
        if each is None or bounds[1] > each.end:
            there = "is not there" if each is None else f"holds {each.start} to {each.end}"
            self._lost(f"{held.name}-{number}: offsets up to {bounds[1]} are to be read; it {there}")
            return Range(held.name, held.topic_id, number, *bounds, 0).cut(bounds[0], bounds[0])
        return within(each, *bounds, fails_on_loss=self._options.fails_on_loss)

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """In a task: the rows of one part."""
        if isinstance(partition, RangePartition):
            yield from read_ranges(partition.ranges, self._reading)

    def stop(self) -> None:
        """The query ended."""
        if self._client is not None:
            self._client.close()

    # --- the broker --------------------------------------------------------------------------------------------------

    def _catalog(self) -> Catalog:
        if self._client is None:
            self._client = connect(self._reading.bootstrap, self._reading.timeout)
        return Catalog(self._client, self._options, self._logs)

    def _held(self, names: Iterable[str], position: Position) -> dict[str, Held]:
        """Topics as they are now; those of ``position`` are still the same ones."""
        catalog = self._catalog()
        found = {}
        for name in names:
            known_id = position.ids.get(name)
            try:
                held = catalog.logged(name)
            except UnknownTopicError:
                if known_id is None:
                    raise
                self._lost(f"topic {name!r} was deleted while it was read")
                continue
            if known_id not in (None, held.topic_id):
                raise made_anew(name, known_id, held.topic_id)
            position.check(held)
            found[name] = held
        return found

    def _lost(self, text: str) -> None:
        if self._options.fails_on_loss:
            raise DataLossError(f"{text}. Set the option failOnDataLoss=false to go on without it")
        get_logger().warning("messages are gone before they were read", text=text)


def _ends_of(held: Iterable[Held]) -> Position:
    found = list(held)
    ends = {one.name: {number: each.end for number, each in one.partitions.items()} for one in found}
    return Position.before(found, ends)
