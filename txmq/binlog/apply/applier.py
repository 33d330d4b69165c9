"""The applier: the topics of a sync into the tables of a second database, exactly once, in order per key.

Theory of operation. One process of the group has all partitions; others stand by. Its consumer's messages go into
queues, one for each partition, and threads with connections of their own write them: the changes of a batch and the
partition's offset are one transaction of the target (``target.py``). So a kill anywhere repeats nothing and skips
nothing, and partitions are written at the same time. Statements wait until every partition has reached them
(``partition_queues.py``), and are run once (``ddl.py``). The markers ``begin`` and ``end`` of large transactions are
passed over: each partition commits for itself.

The consumer's offset store is the target itself (``TargetOffsets``). A partition is loaded from it, which fences
earlier owners. From then on the offset is saved in the transactions that hold the rows, one for a batch, and by nothing
else: what the consumer would save by itself stands in the target already, or is newer there. Only where the partition's
log is another one than the target's offset counts in (``txmq.log.history``), the consumer goes back before that offset:
then it is saved.

If a batch does not fit the target, its changes are applied one by one. A value that must be unique may be in use only
because another partition is behind, or further: the change waits for a while, and the other partitions go on. No
partition passes another one by more than what is in memory, so all that leads the topic's partitions to one moment of
the source can then be written in one transaction. If it still does not fit, it is a conflict.

The process begins anew with a new ``Session`` (a consumer, its queues, and the threads that write) if topics were made
or a partition was another process's meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from txmq.binlog.apply.accepted_events import Accepted, applied_topics
from txmq.binlog.apply.ddl import TargetStatements
from txmq.binlog.apply.partition_queues import PartitionQueue, PartitionQueues, is_statement
from txmq.binlog.apply.target import (
    AppliedError,
    DuplicateError,
    OutOfStepError,
    RowEvent,
    Target,
    TargetTables,
    Written,
    connector,
)
from txmq.binlog.config import BinlogSettings
from txmq.binlog.decoded_changes import Op, TableName
from txmq.binlog.errors import ConflictError, TargetAwayError, TargetError
from txmq.binlog.event_json import ChangeEvent, read_event
from txmq.binlog.publish.position_log import newest_position
from txmq.client import Client, Consumer, ConsumerOptions, DatabaseOffsetStore, OffsetPosition, StoredOffset
from txmq.errors import (
    ClosedError,
    ConfigError,
    FencedError,
    PartialResultError,
    StorageError,
    TxmqError,
    UnknownTopicError,
)
from txmq.model import Message, TopicPartition
from txmq.runtime.backoff import Backoff
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.threads import Lock, Signal, start_daemon, until_terminated

Loaded = Callable[[TopicPartition, int, int | None], None]  # slot, generation, offset
GoesBack = Callable[[TopicPartition, int], None]  # slot, offset
POLL_S = 0.2
POLL_MAX = 2000
TOPICS_S = 1.0  # between two looks for new topics, or for any
STOP_S = 60.0
PAUSE_S, REFUSED_PAUSE_S = 0.1, 0.01
TOGETHER_S = 0.2  # of refusals, before a topic's partitions are written together
EVENT_SHOWN_MAX = 2000
WAITING_S, MISSING_SHOWN_MAX = 10.0, 10  # of a statement, before it is told
_ROW_OPS = frozenset(map(str, Op))
ANEW_PAUSE_S = Backoff(0.1, 5.0)


# --- offsets ----------------------------------------------------------------------------------------------------------


class TargetOffsets:
    """The offset store of the applier's consumer: the target itself. Implements ``OffsetStore``.

    Args:
        store: in the target.
        on_load: called before the first message of a partition is delivered; the offset is None if none is saved.
        on_going_back: called after that, and before the first message, if the partition begins at a lower offset.
    """

    is_shared = True

    def __init__(self, store: DatabaseOffsetStore, on_load: Loaded, on_going_back: GoesBack) -> None:
        self._store, self._on_load, self._on_going_back = store, on_load, on_going_back
        self._loaded: dict[tuple[TopicPartition, int], int] = {}  # by generation, too

    def enter(self, group: str) -> None:
        """See ``OffsetStore``."""
        self._store.enter(group)

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """See ``OffsetStore``."""
        found = self._store.load(group, slot, generation)
        self._on_load(slot, generation, None if found is None else found.offset)
        self._loaded[slot, generation] = 0 if found is None else found.offset
        return found

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """Save what goes back before the offset that was loaded; all else is saved with the rows."""
        back = [one for one in positions if one.offset < self._loaded.get((one.slot, one.generation), 0)]
        refused = self._store.save(group, back) if back else ()
        for position in back:
            if position.slot not in refused:
                self._on_going_back(position.slot, position.offset)
                self._loaded[position.slot, position.generation] = position.offset
        return refused

    def leave(self, group: str) -> None:
        """See ``OffsetStore``."""
        self._store.leave(group)


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Applied:
    """What was written since the applier's start.

    Args:
        rows: changes of rows.
        statements: that were run, or found to be.
        overwritten: changes that did not fit the target, and were made to.
    """

    rows: int = 0
    statements: int = 0
    overwritten: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, rows: int = 0, statements: int = 0, overwritten: int = 0) -> None:
        """Count. Thread safety: any thread."""
        with self._lock:
            self.rows += rows
            self.statements += statements
            self.overwritten += overwritten


@dataclass(frozen=True, slots=True)
class Replica:
    """The target, as all threads use it."""

    connect: Callable[[], Any]
    tables: TargetTables
    store: DatabaseOffsetStore
    statements: TargetStatements
    accepted: Accepted
    skipped: Collection[str]


class Session:
    """One run of the applier: a consumer, its queues, and the threads that write. ``run`` once.

    Args:
        applied: counts on.
        topics: that are consumed.
    """

    def __init__(
        self, client: Client, settings: BinlogSettings, replica: Replica, applied: Applied, topics: list[str]
    ) -> None:
        self._client, self._replica, self._applied, self._topics = client, replica, applied, topics
        self._group, self._apply, self._settings = settings.apply_group, settings.apply, settings
        self._queues = PartitionQueues(self._apply.batch_rows_max, client.clock)
        self._log = get_logger(group=self._group)
        self._sparingly = Sparingly(self._log, client.clock)
        self._consumer: Consumer | None = None
        self._held_up: dict[tuple[str, int], float] = {}  # whose changes wait for older ones, since when
        self._stands = 0, client.clock.monotonic()  # the newest epoch that was sent, and since when it is the same
        self._looked_at: float | None = None  # while a statement runs: when the target has answered last
        self._list_topics: Callable[[], list[str]] = lambda: topics

    # --- the thread of the applier -----------------------------------------------------------------------------------

    def run(
        self, ends: dict[TopicPartition, int] | None, is_stopped: Callable[[], bool], topics: Callable[[], list[str]]
    ) -> bool:
        """Apply; True at the end, False if there are other topics now.

        Args:
            ends: apply as far as this, or without end.
            topics: lists those that there are.

        Raises:
            BinlogError, StorageError, FencedError: what stopped it.
        """
        self._list_topics = topics
        offsets = TargetOffsets(self._replica.store, self._queues.granted, self._queues.goes_back)
        timeout_s = self._apply.session_timeout_ms / 1000
        options = ConsumerOptions(
            strategy="exclusive", session_timeout=timeout_s, heartbeat_interval=min(1.0, timeout_s / 4)
        )
        with self._client.consumer(self._group, self._topics, offset_store=offsets, options=options) as consumer:
            self._consumer = consumer
            self._queues.began(self._apply.threads)
            for _ in range(self._apply.threads):
                start_daemon("txmq-apply", self._work)
            try:
                is_end = self._deliver(consumer, ends, is_stopped, topics)
            finally:
                has_ended = self._queues.stop(STOP_S)
            self._queues.refuse_failed()
            if not has_ended:
                raise TargetAwayError(f"a transaction in the target did not end within {STOP_S:.0f} seconds")
            return is_end

    def _deliver(
        self, consumer: Consumer, ends: dict[TopicPartition, int] | None, is_stopped: Callable[[], bool],
        topics: Callable[[], list[str]],
    ) -> bool:  # fmt: skip
        clock = self._client.clock
        look_at = clock.monotonic() + TOPICS_S
        starts: dict[TopicPartition, int] = {}
        while not is_stopped():
            self._queues.refuse_failed()
            messages = consumer.poll(POLL_MAX, POLL_S)
            full = self._queues.add(messages)
            if full:
                consumer.pause(full)
            room = self._queues.with_room()
            if room:
                consumer.resume(room)
            self._ask_ends()
            if ends is not None and not messages:
                self._queues.begin_at(starts)
            if ends is not None and not self._queues.not_passed(ends):
                return True
            if clock.monotonic() >= look_at:
                look_at = clock.monotonic() + TOPICS_S
                with suppress(TxmqError):  # the broker is away: the consumer waits for it, too
                    if topics() != self._topics:
                        return False
                    missing = self._queues.not_passed(ends or {})
                    starts = {slot: self._client.offsets(*slot).start for slot in missing}
                self._tell_waiting()
                self._look_at_statement()
        return True

    def _ask_ends(self) -> None:
        """Where partitions end of which epochs wait, after the reader has said which epochs are in them."""
        waiting = self._queues.unasked()
        if not waiting:
            return
        try:
            sent = self._sent(max(waiting.values()))
            for topic in waiting:
                told = self._client.topics.watermarks(topic)
                self._queues.seen(topic, sent, {one["partition"]: (one["start"], one["end"]) for one in told})
        except (UnknownTopicError, PartialResultError):
            pass  # the topic was deleted, or a home is away: asked again
        except TxmqError as error:
            if not error.retriable:
                raise

    def _sent(self, epoch: int) -> int:
        """The newest epoch that the topics have, with all before.

        Args:
            epoch: was seen: if that one's reader says nothing for long, it counts as such.
        """
        newest, now = newest_position(self._client, self._settings), self._client.clock.monotonic()
        sent = epoch if newest is None else newest.sent
        if sent >= epoch or sent != self._stands[0]:
            self._stands = sent, now
            return sent
        if now < self._stands[1] + self._apply.conflict_wait_ms / 1000:
            return sent
        self._sparingly.warning("changes are applied though older ones may come: the reader has not sent all")
        return epoch

    def _tell_waiting(self) -> None:
        for gtid, missing in self._queues.waiting(WAITING_S).items():
            shown = [f"{topic}-{number}" for topic, number in missing[:MISSING_SHOWN_MAX]]
            self._sparingly.warning("a statement waits for other partitions to reach it", gtid=gtid, partitions=shown)
        now, held_up = self._client.clock.monotonic(), self._queues.held_up()
        self._held_up = {one: self._held_up.get(one, now) for one in held_up}
        for (topic, epoch), since in self._held_up.items():
            if now >= since + WAITING_S:
                behind = [f"{topic}-{number}" for _, number in sorted(held_up[topic, epoch])[:MISSING_SHOWN_MAX]]
                self._sparingly.warning(
                    "changes wait for older ones in other partitions", topic=topic, partitions=behind
                )

    def _look_at_statement(self) -> None:
        """A statement may run for hours, and its answer is awaited as long: whether the target answers others."""
        statements, clock = self._replica.statements, self._client.clock
        running = sorted(statements.running)
        if not running or self._looked_at is None:
            self._looked_at = clock.monotonic() if running else None
            return
        if clock.monotonic() < self._looked_at + self._apply.silence_ms_max / 1000:
            return
        try:
            statements.look()
        except TargetAwayError as error:
            self._log.warning("the target is silent, and was running a statement", gtid=running[0], error=str(error))
            raise
        self._looked_at = clock.monotonic()
        self._sparingly.warning("a statement of the source still runs in the target", gtid=running[0])

    # --- the threads that write --------------------------------------------------------------------------------------

    def _work(self) -> None:
        replica = self._replica
        target = Target(replica.connect, replica.tables, replica.store, self._group)
        failure: BaseException | None = None
        try:
            while (taken := self._queues.take()) is not None:
                queue, messages = taken
                if is_statement(messages[0]):
                    self._reach(queue, _event(messages[0]))
                else:
                    self._apply_batch(target, queue, messages)
        except BaseException as error:  # noqa: BLE001  raised in the applier's thread
            failure = error
        finally:
            target.close()
            self._queues.ended(failure)

    def _apply_batch(self, target: Target, queue: PartitionQueue, messages: list[Message]) -> None:
        try:
            self._write(target, queue, messages)
        except AppliedError as error:
            self._acknowledge(self._queues.done(queue, error.offset))
        except TargetAwayError as error:
            self._sparingly.warning("waiting for the target", error=str(error))
            self._queues.again(queue, PAUSE_S)
        except OutOfStepError as error:
            if len(messages) > 1:
                self._queues.refused(queue, len(messages), REFUSED_PAUSE_S)
            else:
                self._refused(target, queue, messages[0], error)

    def _write(
        self, target: Target, queue: PartitionQueue, messages: list[Message], *, overwrites: bool = False
    ) -> None:
        changes = self._changes(messages)
        target.write([self._written(queue, messages)], changes, overwrites=overwrites)
        self._applied.add(rows=sum(map(len, changes.values())))
        self._acknowledge(self._queues.done(queue, messages[-1].offset + 1))

    def _changes(self, messages: Iterable[Message]) -> dict[TableName, list[RowEvent]]:
        changes: dict[TableName, list[RowEvent]] = {}
        for message in messages:
            event = _event(message)
            if event.op in _ROW_OPS:
                self._replica.accepted.require_change(message.topic, event.table)
                changes.setdefault(event.table, []).append(RowEvent(event.op, event.before, event.after))
        return changes

    def _written(self, queue: PartitionQueue, messages: Sequence[Message]) -> Written:
        return Written(self._position(queue, messages[-1].offset + 1), messages[0].offset)

    def _write_together(self, target: Target, queue: PartitionQueue) -> bool:
        """Write all whole epochs of a queue's topic in one transaction; False if they do not fit, too.

        After it the partitions are where the source was: no value is in two rows, in whatever order it went from row
        to row. All of these rows are deleted before any is inserted (``target.py``).
        """
        together = self._queues.take_together(queue)
        if not together:
            return False
        changes = self._changes(message for _, messages in together for message in messages)
        try:
            target.write([self._written(one, messages) for one, messages in together], changes)
        except (OutOfStepError, AppliedError, TargetAwayError):
            for one, _ in together:
                if one is not queue:
                    self._queues.again(one, 0.0)
            return False
        self._applied.add(rows=sum(map(len, changes.values())))
        for one, messages in together:
            self._acknowledge(self._queues.done(one, messages[-1].offset + 1))
        return True

    def _position(self, queue: PartitionQueue, end: int) -> OffsetPosition:
        consumer = self._consumer
        assert consumer is not None
        return OffsetPosition(queue.slot, queue.generation, end, log=consumer.log_of(*queue.slot))

    def _refused(self, target: Target, queue: PartitionQueue, message: Message, error: OutOfStepError) -> None:
        """One change does not fit the target: wait for other partitions, or overwrite, or stop."""
        wait_s = self._apply.conflict_wait_ms / 1000
        if isinstance(error, DuplicateError):
            refused_s = self._queues.refused_for(queue)
            if refused_s >= min(TOGETHER_S, wait_s) and self._write_together(target, queue):
                return
            if refused_s < wait_s:
                self._queues.refused(queue, 1, REFUSED_PAUSE_S)
                return
        event = _event(message)
        shown = str(dict(event.fields))[:EVENT_SHOWN_MAX]
        if self._apply.on_conflict != "overwrite":
            raise ConflictError(str(event.table), f"message {message.offset} of {queue} does not fit: {error}", shown)
        self._log.warning("conflict: the target's row is overwritten", partition=str(queue), offset=message.offset)
        self._write(target, queue, [message], overwrites=True)
        self._applied.add(overwritten=1)

    def _acknowledge(self, messages: Iterable[Message]) -> None:
        consumer = self._consumer
        assert consumer is not None
        with suppress(ClosedError):
            for message in messages:
                consumer.ack(message)

    # --- statements --------------------------------------------------------------------------------------------------

    def _reach(self, queue: PartitionQueue, event: ChangeEvent) -> None:
        said = self._replica.accepted.require_statement(queue.slot[0], event)
        gtid = str(event.source["gtid"])
        topics: dict[str, int] = event.fields["topics"]
        if gtid in self._replica.skipped:
            topics = {topic: count for topic, count in topics.items() if topic in self._topics}
        elif (unread := topics.keys() - set(self._topics)) and (unread := unread - set(self._list_topics())):
            raise TargetError(
                f"the statement of transaction {gtid} in topic {queue.slot[0]} is of the topic {min(unread)} as well, "
                f"which is not applied, or is gone: {event.fields['ddl'][:200]}. Add it to apply.topics, or give the "
                f"target's tables the form that the source's have, and start again with --skip-ddl {gtid}"
            )
        wanted = {(topic, number) for topic, count in topics.items() for number in range(count)}
        arrived = self._queues.arrive(queue, gtid, wanted, said)
        if arrived is None:
            return
        positions = [self._position(one, (one.next or 0) + 1) for one in arrived]
        self._replica.statements.run_once(event, positions)
        self._applied.add(statements=1)
        self._acknowledge(self._queues.passed(arrived, gtid))


def _event(message: Message) -> ChangeEvent:
    try:
        return read_event(message.value or b"")
    except ValueError as error:
        where = f"message {message.offset} of {message.topic}-{message.partition}"
        raise TargetError(f"{where}: {error}: set apply.topics to the topics of this sync") from None


# --- the applier ------------------------------------------------------------------------------------------------------


class Applier:
    """See the module's docstring. ``stop`` from any thread; the rest by one.

    Args:
        skipped: ids of transactions whose statements are not run.
    """

    def __init__(self, client: Client, settings: BinlogSettings, *, skipped: Collection[str] = ()) -> None:
        if settings.publish.by == "transaction":
            raise ConfigError('publish.by = "transaction": the changes of a row are in no order then, and not applied')
        self._client, self._settings = client, settings
        self._sparingly = Sparingly(get_logger(group=settings.apply_group), client.clock)
        connect, tables = connector(settings.apply), TargetTables(settings.apply.database)
        store = DatabaseOffsetStore(connect, table=settings.offset_table)
        accepted = Accepted(settings, skipped)
        statements = TargetStatements(
            connect, connector(settings.apply, is_patient=True), tables, store, settings.apply_group,
            settings.apply.state_database, skipped, accepted,
        )  # fmt: skip
        self._replica = Replica(connect, tables, store, statements, accepted, skipped)
        self._woken, self._is_stopped = Signal(), False
        self.applied = Applied()

    def stop(self) -> None:
        """End when what is being written is written."""
        self._is_stopped = True
        self._woken.set()

    def run(self, *, until_end: bool = False) -> Applied:
        """Apply until ``stop``.

        Args:
            until_end: end when all is applied that the topics hold now.

        Raises:
            BinlogError: what stopped it; nothing after it was applied in that partition.
        """
        pause_s = ANEW_PAUSE_S.first
        ends: dict[TopicPartition, int] | None = None
        while not self._is_stopped:
            try:
                if until_end and ends is None:
                    ends = self._ends(self._topics())
                self._replica.statements.install()
                if self._run_session(ends):
                    break
                pause_s = ANEW_PAUSE_S.first
            except TxmqError as error:
                if not (error.retriable or isinstance(error, (FencedError, StorageError))):
                    raise
                self._sparingly.warning("beginning anew", error=str(error))
                self._woken.wait(pause_s)
                pause_s = ANEW_PAUSE_S.following(pause_s)
        return self.applied

    def _run_session(self, ends: dict[TopicPartition, int] | None) -> bool:
        """Apply with one consumer; True at the end."""
        if ends is not None and not ends:
            return True
        topics = self._topics()
        if not topics:
            self._woken.wait(TOPICS_S)
            return False
        session = Session(self._client, self._settings, self._replica, self.applied, topics)
        return session.run(ends, lambda: self._is_stopped, self._topics)

    def _topics(self) -> list[str]:
        return applied_topics(self._client, self._settings)

    def _ends(self, topics: Iterable[str]) -> dict[TopicPartition, int]:
        ends = {}
        for topic in topics:
            for partition in range(self._client.topics.known(topic).config.partitions):
                end = self._client.offsets(topic, partition).end
                if end:  # perhaps deleted by now, and not applied
                    ends[topic, partition] = end
        return ends


def apply_binlog(settings: BinlogSettings, client: Client, *, skipped: Collection[str], until_end: bool) -> Applied:
    """Apply until SIGTERM or Ctrl-C, or until the end of what is there.

    Raises:
        BinlogError: what stopped it.
        ConfigError: a setting cannot be used.
    """
    applier = Applier(client, settings, skipped=skipped)
    with until_terminated(applier.stop):
        return applier.run(until_end=until_end)
