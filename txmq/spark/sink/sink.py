"""The writers of ``df.write.format("txmq")`` and ``df.writeStream.format("txmq")``: every batch exactly once.

Theory of operation. One transaction per (query, batch): each task attempt prepares its rows (``task``), the
driver's one request names the winners (``queries``), and the broker keeps each query's newest batch, so that a
batch which Spark repeats after a crash is found to be committed. Spark makes a writer when it plans a batch and
pickles it to the tasks; for a stream it makes *another one* when it commits. So what the commit needs to know comes
with the tasks' messages.

An incarnation of the driver is known by its *epoch*, drawn when a batch is planned. The first task of a later epoch
fences the former ones and rolls back what they left: tasks of a driver that died, and of an
attempt at the batch that failed.

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

from txmq.errors import ConfigError, ConnectionLostError, RequestTimeoutError, TxmqError
from txmq.spark.sink.options import SinkOptions, check_columns, parse_options
from txmq.spark.sink.queries import Attempt, Queries
from txmq.spark.sink.task import Written, client_of, home_of, write

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
    """The writer of ``df.write``. Errors: ConfigError, UnknownTopicError, ConnectionLostError, FencedError."""
    _refuse_overwrite(overwrite)
    parsed = parse_options(options, is_streaming=False)
    check_columns(schema, parsed)
    client = client_of(parsed)
    if parsed.topic is not None:
        client.topics.refresh(parsed.topic)  # a missing topic is told before the first row is computed
    queries = Queries(home_of(client, parsed))
    epoch = queries.new_epoch()
    query = parsed.query or f"write-{epoch}"
    committed = queries.open(query, epoch)
    batch = parsed.batch or 0
    return BatchWriter(parsed, Attempt(query, epoch, batch, 0, 0), is_over=committed is not None and committed >= batch)


def make_stream_writer(options: dict[str, str], schema: Any, *, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of ``df.writeStream``. Errors as of ``make_writer``."""
    _refuse_overwrite(overwrite)
    parsed = parse_options(options, is_streaming=True)
    check_columns(schema, parsed)
    client = client_of(parsed)
    if parsed.topic is not None:
        client.topics.refresh(parsed.topic)
    return StreamWriter(parsed, Queries(home_of(client, parsed)).new_epoch())


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise ConfigError('a topic is not overwritten: use mode("append"), or outputMode("append")')


class BatchWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """``df.write``: the same instance plans, writes and commits, pickled in between."""

    def __init__(self, options: SinkOptions, planned: Attempt, *, is_over: bool) -> None:
        self._options, self._planned, self._is_over = options, planned, is_over

    def write(self, iterator: Iterator[Any]) -> TaskMessage:
        """On an executor: prepare the rows of one partition. Errors as ``task.write``."""
        context = TaskContext.get()
        attempt = self._planned._replace(task=context.partitionId(), attempt=context.taskAttemptId())
        return TaskMessage(_written(self._options, attempt, iterator, is_over=self._is_over))

    def commit(self, messages: Sequence[TaskMessage | None]) -> None:
        """On the driver: decide.

        Raises:
            ConnectionLostError, RequestTimeoutError: it may be written, or not; says what to do.
            FencedError: a later driver writes.

        Durability: the rows are visible and in the broker's journal when this returns.
        """
        query, epoch, batch = self._planned[:3]
        queries = _queries(self._options)
        if not self._is_over:
            with _with_advice(_AGAIN_NAMELESS if self._options.query is None else _AGAIN_AS_NAMED):
                queries.commit(query, epoch, batch, _winners(messages))
        if self._options.query is None:
            with suppress(TxmqError):  # committed all the same; what is left is an entry in a list
                queries.delete(query, epoch=epoch)

    def abort(self, _messages: Sequence[TaskMessage | None]) -> None:
        """On the driver: roll back what the tasks have prepared, as far as the broker can be reached."""
        query, epoch, batch = self._planned[:3]
        with suppress(TxmqError):
            queries = _queries(self._options)
            if self._options.query is None:
                queries.delete(query, epoch=epoch)
            else:
                queries.abort(query, epoch=epoch, batch=batch)


class StreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """``df.writeStream``: one instance for the tasks of a batch, another one for its commit."""

    def __init__(self, options: SinkOptions, epoch: int) -> None:
        self._options, self._epoch = options, epoch

    def write(self, iterator: Iterator[Any]) -> TaskMessage:
        """On an executor: prepare the rows of one partition of one batch. Errors as ``task.write``."""
        context = TaskContext.get()
        query, batch = context.getLocalProperty(_QUERY_ID), int(context.getLocalProperty(_BATCH_ID))
        attempt = Attempt(query, self._epoch, batch, context.partitionId(), context.taskAttemptId())
        committed = _queries(self._options).open(query, self._epoch)
        is_over = committed is not None and committed >= batch
        return TaskMessage(_written(self._options, attempt, iterator, is_over=is_over))

    def commit(self, messages: Sequence[TaskMessage | None], batchId: int) -> None:
        """On the driver: decide the batch. Errors and durability: as of ``BatchWriter``."""
        written = [message.written for message in messages if message is not None]
        if not written or any(one.is_over for one in written):
            return  # a batch without tasks has no rows; one that was over before a task began is committed
        attempt = written[0].attempt
        queries = _queries(self._options)
        with _with_advice(_AGAIN):
            queries.commit(attempt.query, attempt.epoch, batchId, _winners(messages))

    def abort(self, messages: Sequence[TaskMessage | None], batchId: int) -> None:
        """On the driver: roll back what is known of; the rest goes with the next incarnation of the driver."""
        written = [message.written for message in messages if message is not None]
        if written:
            attempt = written[0].attempt
            with suppress(TxmqError):
                _queries(self._options).abort(attempt.query, epoch=attempt.epoch, batch=batchId)


def _queries(options: SinkOptions) -> Queries:
    return Queries(home_of(client_of(options), options))


@contextmanager
def _with_advice(advice: str) -> Iterator[None]:
    """Around the request that decides: without an answer, the outcome is unknown."""
    try:
        yield
    except (ConnectionLostError, RequestTimeoutError) as error:
        text = f"the request to commit had no answer, so the batch may be written, or not: {advice} ({error})"
        raise type(error)(text) from error


def _written(options: SinkOptions, attempt: Attempt, iterator: Iterator[Any], *, is_over: bool) -> Written:
    if is_over:
        for _ in iterator:  # Spark's worker wants its input read
            pass
        return Written(attempt, (), 0, is_over=True)
    return write(client_of(options), options, attempt, iterator)


def _winners(messages: Sequence[TaskMessage | None]) -> list[str]:
    written = [message.written for message in messages if message is not None]
    return [txid for one in sorted(written, key=lambda one: one.attempt.task) for txid in one.txids]
