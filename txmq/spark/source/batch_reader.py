"""``spark.read.format("txmq")`` through the broker: what is read is fixed when the query is planned.

Theory of operation. The driver asks each topic for its id and its ends, makes of the options a range for every
partition, and cuts the ranges into tasks, so that all cores work. What arrives after the pinned ends is not read; what
retention takes before it was read is an error, or a warning.

An executor reads the ranges of its task by itself. An answer to ``get`` is 1 MiB at most, and the decoder works best on
100,000 records at once, so answers are gathered into chunks. The next request is on its way while the last answer is
decoded. Where it begins is read from the headers of the answer before that was checked; a header that lies is found by
the check, which follows before anything of it is given out.

Invariants:
    * exactly the rows ``start <= offset < end`` come out, in order, or an error; nothing is given out twice, whatever
      is asked again;
    * every batch is held against the topic's id as it was when the query was planned: a topic of the same name that
      was made anew is an error;
    * a broker that is away is asked again for ``timeout`` seconds since the last answer, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql.datasource import DataSourceReader, InputPartition

from txmq.client import Client
from txmq.client.read_place import ReadPlace
from txmq.errors import (
    ConfigError,
    CorruptRecordError,
    DataLossError,
    InvalidBatchError,
    NotOwnerError,
    OffsetOutOfRangeError,
    StaleLogError,
    TxmqError,
    UnknownTopicError,
)
from txmq.log.batch import headers
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import processor_count
from txmq.spark.decode import arrow_columns
from txmq.spark.decode.chunk import Origin, check
from txmq.spark.source.catalog import PASSING, Catalog, check_offsets, connect, made_anew, patiently, placed
from txmq.spark.source.options import SourceOptions
from txmq.spark.source.ranges import Range, pack, split
from txmq.xa.resolver_ports import Answer

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from txmq.client.home_link import HomeLink
    from txmq.client.transport.reconnecting import ReconnectingConnection
    from txmq.protocol.requests import Word

ANSWER_SIZE_BYTES: Final = 1 << 20
REPLICA_WAIT_MS: Final = 5000  # for what the leader has had when the query was planned
CHUNK_SIZE_BYTES: Final = 12 << 20
ROWS_GATHERED: Final = 80_000  # and what the last answer brings: under the decoder's ROWS_MAX mostly

T = TypeVar("T")
_TASKS_A_PROCESSOR: Final = 4  # smaller ones are put together
_TASK_ROWS_MIN: Final = 10_000  # a task costs Spark as much as reading these


@dataclass(frozen=True, slots=True)
class Reading:
    """How a range is read: the parts of the options that a task needs."""

    bootstrap: str
    columns: tuple[str, ...]
    fails_on_loss: bool
    timeout: float
    reads_replicas: bool = False

    @classmethod
    def of(cls, options: SourceOptions, columns: tuple[str, ...]) -> Reading:
        """As the options say."""
        assert options.bootstrap is not None
        return cls(options.bootstrap, columns, options.fails_on_loss, options.timeout, options.reads_replicas)


def read_ranges(ranges: Sequence[Range], reading: Reading) -> Iterator[RecordBatch]:
    """The rows of ranges, one after the other.

    Raises:
        DataLossError: retention passed them, or the topic is gone, or another one has its name.
        InvalidBatchError: what came is damaged; names partition and offset.
        ConnectionLostError, RequestTimeoutError, UnavailableError: the broker stayed away.
    """
    with connect(reading.bootstrap, reading.timeout) as client, ExitStack() as stack:
        replicas = stack.enter_context(closing(_Replicas(client))) if reading.reads_replicas else None
        for each in ranges:
            yield from _RangeReader(client, each, reading, replicas).rows()


class _Replicas:
    """Asks replicas of the homes of partitions, on a connection a home; see ``client.read_place``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._homes: dict[HomeLink, tuple[ReadPlace, ReconnectingConnection]] = {}

    def submit(self, question: tuple[str, int, int, int], log: str) -> Answer:
        """Send a get, which waits for what the replica has yet to receive. Raises as ``ReconnectingConnection``.

        Args:
            log: in which the offset counts: a copy of another one refuses.
        """
        extensions: dict[str, Word | None] = {"wait": REPLICA_WAIT_MS, **({"log": log} if log else {})}
        timeout = REPLICA_WAIT_MS / 1000 + self._client.timeout
        return self._home(question)[1].submit("get", *question, extensions=extensions, timeout=timeout)

    def failed(self, question: tuple[str, int, int, int]) -> None:
        """It serves no readers, or does not answer: another process is asked for a while."""
        place, connection = self._home(question)
        place.refused()
        connection.rest()

    def _home(self, question: tuple[str, int, int, int]) -> tuple[ReadPlace, ReconnectingConnection]:
        if not self._homes:
            self._client.routes.all_links()  # so that replicas are known
        link = self._client.routes.link_for(*question[:2])
        if link not in self._homes:
            place = ReadPlace(link, self._client.routes, self._client.clock, prefers_replicas=True)
            self._homes[link] = place, link.connection_to(place)
        return self._homes[link]

    def close(self) -> None:
        for _, connection in self._homes.values():
            connection.close()


class _RangeReader:
    """One range; ``_offset`` is the first one that was not given out."""

    def __init__(self, client: Client, task: Range, reading: Reading, replicas: _Replicas | None = None) -> None:
        self._client, self._task, self._reading, self._replicas = client, task, reading, replicas
        self._offset = task.start
        self._ahead: tuple[int, Answer] | None = None  # the offset that was asked for, and the answer to come
        self._name = f"{task.topic}-{task.partition}"
        self._origin = Origin(self._name, task.topic, task.topic_id, task.partition)

    def rows(self) -> Iterator[RecordBatch]:
        while self._offset < self._task.end:
            try:
                content = self._gather()
            except OffsetOutOfRangeError:
                self._pass_over_lost()
                continue
            except UnknownTopicError as error:
                raise DataLossError(f"{self._name}: the topic was deleted before it was read ({error})") from error
            yield from self._decoded(content)

    def _decoded(self, content: bytes) -> Iterator[RecordBatch]:
        chunk = check(content, self._origin, None)
        if chunk.damage is not None or chunk.size_bytes < len(content) or chunk.next_offset is None:
            raise self._damaged(chunk.damage)
        if not int(chunk.bases[0]) <= self._offset < chunk.next_offset:
            raise self._damaged(f"offsets from {int(chunk.bases[0])} to {chunk.next_offset - 1} were answered")
        try:
            yield from arrow_columns.decode(chunk, self._reading.columns, self._offset, self._task.end)
        except CorruptRecordError as error:
            raise self._damaged(error.reason) from error
        self._offset = chunk.next_offset

    # --- asking ------------------------------------------------------------------------------------------------------

    def _gather(self) -> bytes:
        """Answers, one after the other, for about one chunk of rows. Raises what the first of them raises."""
        answers: list[bytes] = []
        offset, size = self._offset, 0
        while offset < self._task.end and offset - self._offset < ROWS_GATHERED and size < CHUNK_SIZE_BYTES:
            try:
                answer = self._answer(offset)
            except TxmqError:
                if answers:
                    break  # what came is given out first; then the same question meets the same error
                raise
            answers.append(answer)
            size += len(answer)
            offset = _end_of(answer, offset)
            if offset < self._task.end:
                self._ask_ahead(offset)
        return answers[0] if len(answers) == 1 else b"".join(answers)

    def _ask_ahead(self, offset: int) -> None:
        question = self._question(offset)
        try:
            if self._replicas is not None:
                self._ahead = offset, self._replicas.submit(question, self._task.log)
                return
            link = self._client.routes.link_for(self._task.topic, self._task.partition)
            self._ahead = offset, link.control.submit("get", *question, timeout=self._client.timeout)
        except PASSING:
            self._ahead = None

    def _answer(self, offset: int) -> bytes:
        ahead = self._ahead[1] if self._ahead is not None and self._ahead[0] == offset else None
        self._ahead = None
        if self._replicas is not None:
            answer = self._replica_answer(self._replicas, offset, ahead)
            if answer:
                return answer
        elif ahead is not None:
            try:
                return _filled(ahead.result(), offset)
            except (*PASSING, NotOwnerError):
                pass  # asked anew, with patience
        return _filled(self._patiently(lambda: self._get(offset)), offset)

    def _replica_answer(self, replicas: _Replicas, offset: int, ahead: Answer | None) -> bytes:
        """What a replica has there; empty: ask the leader."""
        question = self._question(offset)
        try:
            return (replicas.submit(question, self._task.log) if ahead is None else ahead).result()
        except (*PASSING, NotOwnerError):
            with suppress(*PASSING):
                replicas.failed(question)
        except (OffsetOutOfRangeError, StaleLogError):
            self._replicas = None  # the leader knows what became of it
        return b""

    def _get(self, offset: int) -> bytes:
        asked, timeout = self._question(offset), self._client.timeout
        return self._client.routes.ask_owner(
            self._task.topic, self._task.partition, lambda link: link.control.call("get", *asked, timeout=timeout)
        )

    def _question(self, offset: int) -> tuple[str, int, int, int]:
        return self._task.topic, self._task.partition, offset, ANSWER_SIZE_BYTES

    def _patiently(self, ask: Callable[[], T]) -> T:
        return patiently(self._client, self._reading.timeout, ask)

    # --- what is not there -------------------------------------------------------------------------------------------

    def _pass_over_lost(self) -> None:
        """The broker does not hold the offset (any more): say so, as an error or as a warning."""
        self._refuse_another_topic()
        held = self._patiently(lambda: self._client.offsets(self._task.topic, self._task.partition))
        following = held.start if held.start > self._offset else self._task.end
        lost_to = min(following, self._task.end)
        text = (
            f"{self._name}: offsets {self._offset} to {lost_to - 1} are gone before they were read; "
            f"the partition holds {held.start} to {held.end - 1}"
        )
        if self._reading.fails_on_loss:
            raise DataLossError(f"{text}. Set the option failOnDataLoss=false to read on without them")
        get_logger().warning("messages are gone before they were read", text=text)
        self._offset = lost_to

    def _refuse_another_topic(self) -> None:
        current = self._patiently(lambda: self._client.topics.refresh(self._task.topic))
        if current.topic_id != self._task.topic_id:
            raise made_anew(self._task.topic, self._task.topic_id, current.topic_id)

    def _damaged(self, reason: object) -> TxmqError:
        try:
            self._refuse_another_topic()
        except UnknownTopicError as error:
            return DataLossError(f"{self._name}: the topic was deleted before it was read ({error})")
        except DataLossError as error:
            return error
        return InvalidBatchError(
            f"{self._name}, from offset {self._offset} on: {reason}; damaged where it was stored or made, "
            "or on the way: look with txmq log verify at the broker"
        )


def _end_of(answer: bytes, offset: int) -> int:
    """Offset after an answer by its headers, which are not checked yet; at least one further."""
    end = offset
    for _, _, base, count, _ in headers(answer):
        end = base + count
    return max(end, offset + 1)


def _filled(answer: bytes, offset: int) -> bytes:
    if not answer:
        raise OffsetOutOfRangeError(f"nothing is at {offset}, where something was")
    return answer


# --- the plan ---------------------------------------------------------------------------------------------------------


class RangePartition(InputPartition):  # type: ignore[misc]
    """The part of one task."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options, self._reading = options, Reading.of(options, columns)

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
