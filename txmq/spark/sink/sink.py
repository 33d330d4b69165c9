"""The writers of ``df.write.format("txmq")`` and ``df.writeStream.format("txmq")``: every batch exactly once.

Theory of operation. One transaction per (query, batch): each task attempt prepares its rows (``task``), the
driver's one request names the winners (``queries``), and the broker keeps which batches are committed, so that a
batch which Spark repeats after a crash is recognised. Its rows are computed again all the same, and held against the
``digest`` of what was written: rows that are not there are never passed over in silence. Spark makes a writer when it
plans a batch and pickles it to the tasks; for a stream it makes *another one* when it commits. So what the commit needs
to know comes with the tasks' messages.

An incarnation of the driver is known by its *epoch*, drawn when a batch is planned. The first task of a later epoch
fences the former ones and rolls back what they left: tasks of a driver that died, and of an
attempt at the batch that failed.

A stream's batches come in order. One below the newest comes from an older copy of its checkpoint, and is refused;
``df.write`` may write its numbers in any order.

A batch write without ``queryId`` has a name of its own, which is forgotten once it is committed.

Source: PySpark 4.3, modules pyspark.sql.datasource, pyspark.sql.worker.write_into_data_source and
pyspark.sql.worker.python_streaming_sink_runner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from txmq.client.client import Client
from txmq.errors import (
    ConfigError,
    ConnectionLostError,
    RequestTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.spark.sink import queries
from txmq.spark.sink.digest import OTHER_ROWS, OTHER_STREAM, Attempt, Digest, check_repeat, refuse_older
from txmq.spark.sink.options import SinkOptions, check_columns, parse_options
from txmq.spark.sink.queries import Opened, Queries
from txmq.spark.sink.task import Written, client_of, pass_over, write

_AGAIN = "a stream finds out when it goes on from its checkpoint"
_AGAIN_AS_NAMED = "write it again with the same queryId and batchId, and it is there once"
_AGAIN_NAMELESS = (
    "look into the topic before you write it again; with the options queryId and batchId it may simply be written again"
)
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"  # Spark's own, of a task of a stream


@dataclass(frozen=True, slots=True)
class TaskMessage(WriterCommitMessage):  # type: ignore[misc]
    """The message of a task to the driver."""

    written: Written


def make_writer(options: dict[str, str], schema: Any, *, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of ``df.write``.

    Errors: ConfigError, UnknownTopicError, ConnectionLostError, FencedError, and TransactionConflictError if nobody
    knows any more whether the batch is committed.
    """
    _refuse_overwrite(overwrite)
    parsed = parse_options(options, is_streaming=False)
    check_columns(schema, parsed)
    client = client_of(parsed)
    if parsed.topic is not None:
        client.topics.refresh(parsed.topic)  # a missing topic is told before the first row is computed
    epoch = queries.new_epoch(client)
    planned = Attempt(parsed.query or f"write-{epoch}", epoch, parsed.batch or 0, 0, 0)
    return BatchWriter(parsed, planned, queries.open_query(client, parsed.topic, planned.query, epoch, planned.batch))


def make_stream_writer(options: dict[str, str], schema: Any, *, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of ``df.writeStream``. Errors as of ``make_writer``."""
    _refuse_overwrite(overwrite)
    parsed = parse_options(options, is_streaming=True)
    check_columns(schema, parsed)
    client = client_of(parsed)
    if parsed.topic is not None:
        client.topics.refresh(parsed.topic)
    return StreamWriter(parsed, queries.new_epoch(client))


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise ConfigError('a topic is not overwritten: use mode("append"), or outputMode("append")')


class BatchWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """``df.write``: the same instance plans, writes and commits, pickled in between."""

    def __init__(self, options: SinkOptions, planned: Attempt, opened: Opened) -> None:
        self._options, self._planned, self._opened = options, planned, opened

    def write(self, iterator: Iterator[Any]) -> TaskMessage:
        """On an executor: prepare the rows of one partition. Errors as ``task.write``."""
        context = TaskContext.get()
        attempt = self._planned._replace(task=context.partitionId(), attempt=context.taskAttemptId())
        return TaskMessage(_written(self._options, attempt, self._opened, iterator))

    def commit(self, messages: Sequence[TaskMessage | None]) -> None:
        """On the driver: decide.

        Raises:
            ConnectionLostError, RequestTimeoutError: it may be written, or not; says what to do.
            FencedError: a later driver writes.
            TransactionConflictError: the batch is committed with other rows; these were not written.

        Durability: the rows are visible and in the broker's journal when this returns.
        """
        client, planned, is_nameless = client_of(self._options), self._planned, self._options.query is None
        with _with_advice(_AGAIN_NAMELESS if is_nameless else _AGAIN_AS_NAMED):
            _decide(client, planned, self._opened.home, messages, OTHER_ROWS)
        if is_nameless:
            with suppress(TxmqError):  # committed all the same; what is left is an entry in a list
                self._queries(client).delete(planned.query, epoch=planned.epoch)

    def abort(self, _messages: Sequence[TaskMessage | None]) -> None:
        """On the driver: roll back what the tasks have prepared, as far as the broker can be reached."""
        query, epoch, batch = self._planned[:3]
        with suppress(TxmqError):
            anchor = self._queries(client_of(self._options))
            if self._options.query is None:
                anchor.delete(query, epoch=epoch)
            else:
                anchor.abort(query, epoch=epoch, batch=batch)

    def _queries(self, client: Client) -> Queries:
        return Queries(queries.anchor_of(client, self._opened.home))


class StreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """``df.writeStream``: one instance for the tasks of a batch, another one for its commit."""

    def __init__(self, options: SinkOptions, epoch: int) -> None:
        self._options, self._epoch = options, epoch

    def write(self, iterator: Iterator[Any]) -> TaskMessage:
        """On an executor: prepare the rows of one partition of one batch. Errors as ``task.write``."""
        context = TaskContext.get()
        query, batch = context.getLocalProperty(_QUERY_ID), int(context.getLocalProperty(_BATCH_ID))
        attempt = Attempt(query, self._epoch, batch, context.partitionId(), context.taskAttemptId())
        opened = queries.open_query(client_of(self._options), self._options.topic, query, self._epoch, batch)
        refuse_older(attempt, opened.standing.newest)
        return TaskMessage(_written(self._options, attempt, opened, iterator))

    def commit(self, messages: Sequence[TaskMessage | None], batchId: int) -> None:
        """On the driver: decide the batch. Errors and durability: as of ``BatchWriter``."""
        first = next((message.written for message in messages if message is not None), None)
        if first is None:
            return  # a batch without tasks has no rows
        with _with_advice(_AGAIN):
            _decide(client_of(self._options), first.attempt._replace(batch=batchId), first.home, messages, OTHER_STREAM)

    def abort(self, messages: Sequence[TaskMessage | None], batchId: int) -> None:
        """On the driver: roll back what is known of; the rest goes with the next incarnation of the driver."""
        written = [message.written for message in messages if message is not None]
        if written:
            attempt = written[0].attempt
            with suppress(TxmqError):
                anchor = queries.anchor_of(client_of(self._options), written[0].home)
                Queries(anchor).abort(attempt.query, epoch=attempt.epoch, batch=batchId)


@contextmanager
def _with_advice(advice: str) -> Iterator[None]:
    """Around the request that decides: without an answer, the outcome is unknown."""
    try:
        yield
    except (ConnectionLostError, RequestTimeoutError, UnavailableError) as error:
        text = f"the request to commit had no answer, so the batch may be written, or not: {advice} ({error})"
        raise type(error)(text) from error


def _written(options: SinkOptions, attempt: Attempt, opened: Opened, iterator: Iterator[Any]) -> Written:
    if opened.standing.is_committed:
        return pass_over(options, attempt, iterator, opened)
    return write(client_of(options), options, attempt, iterator, opened.home)


def _decide(
    client: Client, planned: Attempt, home: int, messages: Sequence[TaskMessage | None], other_rows: str
) -> None:
    """Commit a batch, or find that it was committed before with these rows."""
    written = sorted((one.written for one in messages if one is not None), key=lambda one: one.attempt.task)
    digest = Digest(is_of_content=bool(written) and written[0].digest.is_of_content).merged(
        one.digest for one in written
    )
    known = [one.committed for one in written if one.committed is not None]
    if known:
        check_repeat(planned, known[0].digest, digest.text, other_rows)
    else:
        winners = [winner for one in written for winner in one.transactions]
        queries.commit(client, home, planned, winners, digest.text)
