"""What both publishers have: parts into batches, by the reader's thread, and batches out, by a second one.

Theory of operation. The reader's thread makes steps of the parts (``change_messages``) and adds them to a batch. A
second thread takes the batch, commits it, and takes the next one, which has been gathered meanwhile. So a batch is as
large as a commit takes long: small and soon with few changes, large with many. While a commit has to wait, both threads
wait: the reader when the batch is full.

The messages of a batch are numbered by *epochs*, some hundred changes of the binlog's order each, in the header
``txmq.epoch``. A partition has them in order, and a transaction's messages appear all at once. So a reader that has
seen an epoch, and reads each partition as far as it then ends, has all of it and of those before
(``apply.partition_queues``). The position holds the last number, through all kills.

Invariants:
    * batches are committed one after another, in order, each once;
    * a batch holds whole steps, and is committed with what is then published;
    * an error of the second thread is raised in the first one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from txmq.binlog.config import BinlogSettings
from txmq.binlog.decoded_changes import Row, TableSchema, TransactionPart
from txmq.binlog.event_json import EventEncoder
from txmq.binlog.position import Position
from txmq.binlog.publish.broker_away import BrokerWait
from txmq.binlog.publish.change_messages import Batch, Gathering, Parked, Step
from txmq.binlog.publish.published import Published
from txmq.binlog.publish.selectors import placing_of
from txmq.binlog.publish.topics import Topics
from txmq.binlog.publish.unread import SnapshotState, Unread
from txmq.client import Client
from txmq.errors import RequestTimeoutError, TransactionStateError, TxmqError, anew
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.os_clock import OSRandom
from txmq.runtime.threads import Condition, Signal, start_daemon

IDLE_S = 1.0  # a position without messages waits so long for messages
CLOSE_S = 10.0


class BatchingPublisher(ABC):
    """See the module's docstring. Used by one thread.

    Args:
        is_stopped: the reader must end: its thread waits for nothing then, and the second one not for long.
        unread: says which changes are passed over while a snapshot is unfinished.
    """

    def __init__(
        self, client: Client, settings: BinlogSettings, is_stopped: Callable[[], bool], unread: Unread | None = None
    ) -> None:  # fmt: skip
        self._unread = unread
        self._client, self._settings = client, settings
        self._clock, self._publish = client.clock, settings.publish
        self._is_stopped, self._gives_up = is_stopped, False
        self._run, self._number = f"{OSRandom().bits(64):016x}", 0
        self._own_wait = BrokerWait(self._clock, is_stopped)  # of the reader's thread
        self._wait = BrokerWait(self._clock, self._ends_waits)
        self._placing = placing_of(settings.publish.by)
        self._published: Published | None = None
        self._gathering: Gathering | None = None
        self._changed, self._ended = Condition(), Signal()
        self._batch = Batch(0.0)
        self._in_flight: Batch | None = None
        self._is_closing = self._is_flushed = False
        self._failure: BaseException | None = None

    def _ends_waits(self) -> bool:
        return self._gives_up or (self._gathering is None and self._is_stopped())

    def _next_id(self) -> str:
        self._number += 1
        return f"{self._run}-{self._number}"

    # --- what the two differ in --------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> Published | None:
        """Wait until this is the one reader; what is published, None if nothing ever was, or if the reader is stopped.

        Raises:
            BinlogError: the positions are gone.
        """

    @abstractmethod
    def _commit(self, batch: Batch) -> None:
        """Publish a batch and set ``_published``, however long that takes."""

    @abstractmethod
    def _parked(self) -> tuple[Parked, int]:
        """Where the changes of prepared XA transactions are; and ``parked_end`` of ``Gathering``."""

    @abstractmethod
    def _made(self, topic: str) -> int:
        """Make a topic that is missing; how many partitions it has."""

    @abstractmethod
    def _leave(self) -> None:
        """End what ``open`` began; nothing is committed any more."""

    # --- the reader's thread -----------------------------------------------------------------------------------------

    def begin(self, position: Position, snapshot: SnapshotState | None = None) -> None:
        """Go on from a position; if nothing was published before, it is saved at once.

        Args:
            snapshot: what one has to read that begins here; None: go on with the saved one, if there is one.
        """
        self._tell_moved()
        parked, parked_end = self._parked()
        begin = self._published or Published("", position)
        if snapshot is not None:
            begin = replace(begin, snapshot=snapshot)
        self._gathering = Gathering(
            self._settings, Topics(self._publish, self._settings.name, self._make, self._topic_names),
            EventEncoder(self._settings.name, self._settings.statement_key), parked, begin, parked_end, self._unread,
        )  # fmt: skip
        if self._published is None:
            first = Batch(0.0)
            first.add(Step([], 0, 0, position, None, {}, 0, 0, snapshot))
            self._commit(first)
        start_daemon("txmq-binlog", self._work)

    def _tell_moved(self) -> None:
        published = self._published
        if published is not None and published.rows and published.placing != self._placing:
            get_logger().warning(
                "changes of a row may get another partition from here on: let consumers read what is published before "
                "they read on",
                was=published.placing or "of an older version", now=self._placing,
            )  # fmt: skip

    @property
    def position(self) -> Position:
        """After the last part that was taken."""
        return self._open_gathering.position

    @property
    def snapshot(self) -> SnapshotState | None:
        """What a snapshot has still to read after what was taken."""
        return self._open_gathering.snapshot

    def publish(self, part: TransactionPart) -> None:
        """Take the next part; waits while as much as fits a transaction must be published before it.

        Raises:
            BinlogError: it cannot be published; nothing of it is.
            TxmqError: publishing failed for good, or, with a retriable error, the reader is stopped.
        """
        for step in self._open_gathering.steps(part, self._clock.now_ms()):
            self._add(step)

    def publish_read(
        self, schema: TableSchema | None, rows: Sequence[Row], behind: Callable[[int], SnapshotState | None]
    ) -> None:
        """Take rows that a snapshot has read at this position; raises as ``publish``.

        Args:
            schema: of their table; None if there are no rows.
            behind: what the snapshot has still to read after so many of them.
        """
        gathering = self._open_gathering
        if schema is None or not rows:
            self._add(gathering.skip_step(behind(0)))
            return
        for step in gathering.read_steps(schema, rows, behind, self._clock.now_ms()):
            self._add(step)

    def _add(self, step: Step) -> None:
        limits = self._publish.transaction_rows_max, self._publish.transaction_bytes_max
        with self._changed:
            while self._failure is None and not self._batch.has_room(step, *limits):
                self._wait_for_change()
            self.refuse_failed()
            if self._batch.last is None:
                self._batch.begun_at = self._clock.monotonic()
            self._batch.add(step)
            self._changed.notify_all()

    def _wait_for_change(self) -> None:
        if self._is_stopped():
            raise RequestTimeoutError("the reader ends: what is not published is read again at the next start")
        self._changed.wait(IDLE_S)

    def flush(self) -> None:
        """Wait until all that was taken is published."""
        with self._changed:
            self._is_flushed = True
            self._changed.notify_all()
            while self._failure is None and (self._batch.last is not None or self._in_flight is not None):
                self._wait_for_change()
            self._is_flushed = False
            self.refuse_failed()

    def close(self) -> Published | None:
        """Publish what was taken, if the broker is there, and leave the group; what is published then."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._gathering is not None and not self._ended.wait(CLOSE_S):
            self._gives_up = True
            self._ended.wait(CLOSE_S)
        self._gives_up = True
        self._leave()
        return self._published

    @property
    def _open_gathering(self) -> Gathering:
        if self._gathering is None:
            raise TransactionStateError("the publisher has not begun")
        return self._gathering

    def refuse_failed(self) -> None:
        """Raise what stopped the publishing thread, if anything did."""
        failure = self._failure
        if isinstance(failure, TxmqError):
            raise anew(failure)
        if failure is not None:
            raise failure

    def _make(self, topic: str) -> int:
        partitions = self._made(topic)
        crash_point("binlog.topic.made")
        return partitions

    def _topic_names(self) -> list[str]:
        return self._own_wait.answer(lambda: [topic.name for topic in self._client.topics.list()])

    # --- the publishing thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._takes_batch():
                assert self._in_flight is not None
                self._commit(self._in_flight)
                with self._changed:
                    self._in_flight = None
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  raised in the reader's thread
            self._fail(error)
        finally:
            self._ended.set()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _takes_batch(self) -> bool:
        """Wait for a batch that is due; False at the end."""
        with self._changed:
            while True:
                wait_s = self._due_in()
                if wait_s <= 0.0:
                    break
                if self._is_closing and self._batch.last is None:
                    return False
                self._changed.wait(wait_s)
            self._in_flight, self._batch = self._batch, Batch(0.0)
            self._changed.notify_all()
            return True

    def _due_in(self) -> float:
        batch = self._batch
        if batch.last is None:
            return IDLE_S
        is_full = batch.rows >= self._publish.transaction_rows_max // 2
        if self._is_closing or self._is_flushed or is_full:
            return 0.0
        linger_s = self._publish.linger_ms / 1000 if batch.messages else IDLE_S
        return batch.begun_at + linger_s - self._clock.monotonic()
