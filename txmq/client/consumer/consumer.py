"""Consumers: a group's partitions of some topics, in order per partition, each message until it is acknowledged.

Theory of operation. The group's coordinator says which partitions are ours (``group_member``, a thread). A second
thread keeps a ``get`` open at the broker for every partition that has room (``fetcher``, a connection of its own), and
checks the answers (``ReadAhead``). ``poll``, iteration and ``run`` (``Listener``) take from what was fetched, partition
by partition in turn (``assigned_partitions``). ``ack`` marks; marks are saved every ``offset_save_interval``, and
always before a partition is handed over, on ``close`` and on SIGTERM in ``run``. ``failures`` decides what becomes of a
message that fails.

Invariants:
    * at least once: a message that was not acknowledged is delivered again, to the next owner of the partition;
    * memory is bounded: ``buffer_size_bytes`` a consumer, shared by its partitions, plus one fetch each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from txmq.client.arguments import WAIT_S_MAX, require_number
from txmq.client.consumer.assigned_partitions import IDLE_S_MAX, TURN_S, AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.consumer_homes import ConsumerHomes
from txmq.client.consumer.failures import Failures
from txmq.client.consumer.group_member import RETRY_S, Assigned
from txmq.client.consumer.offsets.offset_store import NoOffsetStore, OffsetStore
from txmq.client.consumer.options import DEFAULTS, ConsumerOptions, ConsumerSettings, MemberSettings
from txmq.client.consumer.retry.dead_letters import DeadLetters
from txmq.client.consumer.retry.deferred import DeferredMessages, open_store
from txmq.client.consumer.transactional_acks import PendingAcks
from txmq.client.topics import Topics
from txmq.errors import (
    ClosedError,
    ConfigError,
    FencedError,
    OffsetStoreAwayError,
    StorageError,
    TransactionStateError,
    TxmqError,
    UnknownTopicError,
    anew,
)
from txmq.model import Message, TopicPartition
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.runtime.logging import Logger, Sparingly, get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import (
    Lock,
    Signal,
    new_lock,
    off_loop,
    start_daemon,
    start_threads,
    thread_number,
    to_end,
    until_terminated,
)

if TYPE_CHECKING:
    from txmq.client.client import Client

Handle = Callable[[Message], object]
CLOSE_S = 5.0
RECORDS_MAX = 1_000_000_000
__all__ = ["DEFAULTS", "Consumer", "ConsumerOptions", "ConsumerSettings"]


class StoreEntry:
    """A consumer's way into its offset store: when it is made, or as soon as the store answers.

    A member joins its group only after that: it could load nothing of the partitions that it would hold.

    Thread safety: any thread.

    Args:
        store: None for the broker, which is entered by joining.
    """

    def __init__(self, store: OffsetStore | None, group: str, clock: Clock, log: Logger) -> None:
        self._store, self._group, self._log = store, group, log
        self._sparingly = Sparingly(log, clock)
        self._entering, self._lock = new_lock(), Lock()
        self._is_inside, self._is_over, self._has_waited = store is None, False, False

    def enter(self) -> bool:
        """Enter, if that is not done yet; False if the store does not answer now.

        Raises:
            TxmqError: the store cannot be used.
        """
        with self._entering:
            if self._is_inside or self._is_over or self._store is None:
                return self._is_inside
            try:
                off_loop(partial(self._store.enter, self._group))
            except OffsetStoreAwayError as error:
                self._has_waited = True
                self._sparingly.warning("the offset store does not answer: the consumer waits for it", error=str(error))
                return False
            with self._lock:
                self._is_inside = not self._is_over
        if not self._is_inside:  # closed meanwhile
            off_loop(partial(self._store.leave, self._group))
        elif self._has_waited:
            self._log.info("the offset store is there: the consumer goes on")
        return self._is_inside

    def leave(self) -> None:
        """Leave, once and for all; does not wait for a store that does not answer."""
        with self._lock:
            was_inside, self._is_inside, self._is_over = self._is_inside, False, True
        if was_inside and self._store is not None:
            off_loop(partial(self._store.leave, self._group))


class UngroupedConsumer:
    """A consumer without a group: it has every partition of its topics, and saves nothing. A thread of its own.

    A broadcast's member without a name has this in place of a ``GroupMember``. The thread asks the broker every
    ``heartbeat_interval`` which partitions the topics have, and gives all of them to the ``ConsumerHomes``. There is
    nothing to hand over or to save, and nothing is left when the consumer ends. Positions are in memory, so a restart
    of the broker changes nothing.

    Invariants:
        * every partition of every topic is consumed: from ``start`` if it existed at the beginning, from its first
          message if it came later;
        * a topic that was deleted and created under the same name is another one;
        * a broker that cannot be reached takes nothing away.

    Thread safety: any thread.
    """

    def __init__(self, topics: Topics, settings: MemberSettings, partitions: ConsumerHomes) -> None:
        self._topics, self._settings, self._partitions = topics, settings, partitions
        self._log = get_logger(group=settings.group, member=settings.name)
        self._held: dict[TopicPartition, int] = {}  # with the topic's id
        self._at_first: frozenset[tuple[TopicPartition, int]] | None = None  # what was there when it first looked
        self._is_closing = False
        self._wake, self._ended = Signal(), Signal()

    def start(self) -> None:
        """Start the thread."""
        start_daemon(f"txmq-alone-{self._settings.group}", self._run)

    def stop(self, timeout: float) -> None:
        """End the thread."""
        self._is_closing = True
        self._wake.set()
        self._ended.wait(timeout)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                wait_s = self._settings.heartbeat_interval_s
                try:
                    self._look()
                except ClosedError:
                    return
                except TxmqError as error:
                    self._log.debug("the broker cannot be reached", error=repr(error))
                    wait_s = RETRY_S
                except Exception as error:  # noqa: BLE001  as a GroupMember's: the thread goes on
                    self._log.error("the consumer's thread failed; it goes on", error=repr(error), exc_info=error)
                self._wake.wait(wait_s)
        finally:
            self._ended.set()

    def _look(self) -> None:
        there = self._there()
        for slot in [slot for slot, topic_id in self._held.items() if there.get(slot) != topic_id]:
            del self._held[slot]
            self._partitions.lost(slot)
        if self._at_first is None:
            self._at_first = frozenset(there.items())
        failure: TxmqError | None = None
        for slot, topic_id in there.items():
            if slot not in self._held:
                try:
                    is_later = (slot, topic_id) not in self._at_first
                    self._partitions.assigned(Assigned(slot, 1, None, None, is_later))
                    self._held[slot] = topic_id
                except TxmqError as error:  # the home of that partition is away
                    failure = error
        if failure is not None:
            raise failure

    def _there(self) -> dict[TopicPartition, int]:
        there: dict[TopicPartition, int] = {}
        for name in self._settings.topics:
            try:
                topic = self._topics.refresh(name)
            except UnknownTopicError:
                continue
            there |= {(name, number): topic.topic_id for number in range(topic.config.partitions)}
        return there


class Listener:
    """``Consumer.run``: a listener, called with each message by several threads.

    Partitions run in parallel, each in order: one thread at a time works for a partition, for some ms before it is the
    next one's turn, or for one message if that takes longer. If a message fails, its partition waits until the message
    is delivered again. What is no ``Exception`` (SystemExit, the end of a greenlet) is not the message's failure: all
    threads end, and ``run`` raises it. Otherwise its thread would end alone, and hold its partition.

    Thread safety: any thread; several threads may call ``work``.

    Attributes:
        error: why a thread has ended before the others.
    """

    def __init__(
        self, assignment: AssignedPartitions, failures: Failures, homes: ConsumerHomes, clock: Clock, handle: Handle
    ) -> None:
        self._assignment, self._failures, self._homes = assignment, failures, homes
        self._clock, self._handle = clock, handle
        self._working: set[int] = set()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Call the listener until nothing is delivered any more."""
        with self._assignment.changed:
            self._working.add(thread_number())
        try:
            self._work()
        except SimulatedCrash:
            raise
        except BaseException as error:  # noqa: BLE001  raised by ``run``
            self.error = self.error or error
            self._assignment.stop_delivery()
        finally:
            with self._assignment.changed:
                self._working.discard(thread_number())
                self._assignment.changed.notify_all()

    @property
    def is_called_here(self) -> bool:
        """Whether the caller is one of the threads that call the listener."""
        with self._assignment.changed:
            return thread_number() in self._working

    def wait(self, timeout: float) -> bool:
        """Wait until every thread has finished its message; False at once in a thread that has one itself."""
        deadline = self._clock.monotonic() + timeout
        with self._assignment.changed:
            if thread_number() in self._working:
                return False
            while self._working and (now := self._clock.monotonic()) < deadline:
                self._assignment.changed.wait(deadline - now)
        return True

    def _work(self) -> None:
        while (found := self._next()) is not None:
            message, consumed = found
            until = self._clock.monotonic() + TURN_S
            following: Message | None = message
            while following is not None:
                message = following
                failure: Exception | None = None
                try:
                    self._handle(message)
                except Exception as error:  # noqa: BLE001  whatever the application raises: the message is retried
                    failure = error
                if failure is None:
                    following = self._go_on(message, consumed, until)
                    continue
                self._failures.failed(message, failure, failure)
                failure = following = None  # and with it the listener's frames
            with self._assignment.changed:
                consumed.is_busy = False
                self._assignment.changed.notify_all()

    def _go_on(self, message: Message, consumed: ConsumedPartition, until: float) -> Message | None:
        """Acknowledge a message; the partition's next one, if there is one and it is not another partition's turn."""
        assignment, following = self._assignment, None
        with assignment.lock:
            self._failures.returned(message, consumed)
            now = self._clock.monotonic()
            if now < until and not assignment.is_closed:
                following = assignment.take_next(consumed, now)
        if assignment.has_room:
            self._fetch_more()
        return following

    def _fetch_more(self) -> None:
        self._assignment.has_room = False  # before it is looked for: another thread may find room meanwhile
        self._homes.more()

    def _next(self) -> tuple[Message, ConsumedPartition] | None:
        """Wait for a message of a partition that no other thread works for; None after the end."""
        found = None
        while found is None:
            self._failures.store_blocked()
            with self._assignment.changed:
                if self._assignment.is_closed:
                    return None
                now = self._clock.monotonic()
                found = self._assignment.take_in_order(now)
                if found is None:
                    self._assignment.changed.wait(min(self._assignment.next_retry_in(now), IDLE_S_MAX))
        self._failures.store_blocked()  # a transaction acknowledges in order, and only this thread can defer these
        if self._assignment.has_room:
            self._fetch_more()
        return found


class Consumer:
    """See the module's docstring; made by ``Client.consumer``. Usable as a block, and as an iterator.

    Thread safety: any thread. In a forked child it is the parent's: its use raises a ``ClosedError``, and a child that
    leaves its block does nothing.
    """

    def __init__(
        self, client: Client, settings: ConsumerSettings, membership: MemberSettings
    ) -> None:  # fmt: skip
        self._client, self.settings, self.name = client, settings, settings.options.name or membership.name
        self._clock = client.clock
        log = get_logger(group=settings.group, member=self.name)
        is_ungrouped = settings.broadcast and settings.options.name is None
        store = NoOffsetStore() if is_ungrouped else settings.offset_store
        self._entry = StoreEntry(store, settings.saved_as, self._clock, log)
        self._entry.enter()
        try:
            contents = open_store(client, settings.saved_as, self.name, settings.retry_store)
        except BaseException:
            self._entry.leave()
            raise
        # In the order that ``assigned_partitions`` says.
        self._assignment = AssignedPartitions(self, settings, self._clock, log)
        self._dead_letters = DeadLetters(client, settings.group, self.name, log, self._assignment.log_at)
        self._deferred = DeferredMessages(
            client, settings.saved_as, contents, self._dead_letters, self._assignment.changed, log,
            self._assignment.log_at,
        )  # fmt: skip
        self._homes = ConsumerHomes(
            client, self._assignment, self._deferred, settings, membership, store, log, self._entry.enter
        )
        self.pending_acks = PendingAcks(client, self._assignment, self._homes, settings.saved_as, store)
        self._failures = Failures(
            self._assignment, self._deferred, self._dead_letters, self.pending_acks, settings, self._clock, log
        )
        self._listener: Listener | None = None
        self._ungrouped = UngroupedConsumer(client.topics, membership, self._homes) if is_ungrouped else None
        if self._ungrouped is not None:
            self._ungrouped.start()
        else:
            self._homes.start(self.pending_acks)

    def deliver_for(self, facade: object) -> None:
        """From now on messages are delivered as those of ``facade``: of a consumer on an event loop."""
        self._assignment.consumer = facade

    # --- taking messages ---------------------------------------------------------------------------------------------

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Message]:
        """Messages of the partitions this consumer has; ``ack`` or ``reject`` each.

        Args:
            max_records: at most so many.
            timeout: seconds to wait if there is nothing.

        Raises:
            ConfigError: an argument out of range.
            ClosedError: the consumer is closed.
            FencedError: another process has joined under this member's name, and has its partitions.
            StorageError: the offset store, which did not answer at first, refuses.
            GroupActiveError: the group has a member, and one of the two must be alone (``FileOffsetStore``).
        """
        require_number("max_records", max_records, 1, RECORDS_MAX)
        require_number("timeout", timeout, 0.0, WAIT_S_MAX)
        return self.take(max_records, timeout)

    def take(self, max_records: int, timeout: float) -> list[Message]:
        """As ``poll``, for arguments that were checked."""
        deadline = self._clock.monotonic() + timeout
        while True:
            with self._assignment.changed:
                self._refuse_closed()
                now = self._clock.monotonic()
                taken = self._assignment.take(max_records, now)
                if max_records == 1 and taken:
                    self._assignment.begin_turn(taken[0], now)
                if not taken and now < deadline:
                    self._assignment.changed.wait(min(deadline - now, self._assignment.next_retry_in(now)))
            try:
                self._failures.store_blocked()
            except BaseException:
                self._give_back(taken)
                raise
            if taken or now >= deadline:
                break
        if self._assignment.has_room:
            self._assignment.has_room = False  # before it is looked for: another thread may find room meanwhile
            self._homes.more()
        return taken

    def _give_back(self, taken: Iterable[Message]) -> None:
        """Deliver messages again that the caller will never see."""
        with self._assignment.changed:
            now = self._clock.monotonic()
            for message in taken:
                consumed = self._assignment.partitions.get((message.topic, message.partition))
                if consumed is not None:
                    consumed.deliver_again(message, now)
            self._assignment.changed.notify_all()

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, until ``close``. One that was not acknowledged is not delivered again meanwhile."""
        while True:
            message = self.take_next()
            if message is not None:
                yield message
                continue
            try:
                yield from self.take(1, 1.0)
            except ClosedError:
                return

    def take_next(self) -> Message | None:
        """As ``take(1, 0)``, of the partition that the last one came from; None if there is more to do than that."""
        assignment = self._assignment
        with assignment.changed:
            if assignment.is_closed or assignment.has_blocked or assignment.has_room:
                return None
            return assignment.take_again(self._clock.monotonic())

    # --- acknowledging -----------------------------------------------------------------------------------------------

    def ack(self, message: Message, connection: Any = None, *, sync: bool = False) -> None:
        """Acknowledge a message. As ``message.ack``.

        Args:
            connection: save the group's offset in the transaction that this connection is in, or this session of
                SQLAlchemy, or Django's connection with this alias; the consumer's ``offset_store`` must be in that
                database. Commit soon: the next owner of the partition waits for it.
            sync: save the group's offset now.

        Raises:
            FencedError: another member has the partition: nothing was saved, and a transaction cannot commit.
            StorageError: with ``sync``: acknowledged, and not saved yet, because a transaction that acknowledges some
                of the partition is not over, or the store is away. It is saved by itself later.
            TransactionStateError, ConfigError: see ``Transaction.ack``; a transaction cannot commit.

        Durability: with ``sync`` the group's offset is saved, and forced in the broker, when this returns.
        """
        if connection is not None:
            self.pending_acks.pending_ack_in(message, connection)
            return
        if not sync:
            self._failures.acked(message)
            return
        with self._assignment.changed:
            consumed = self._assignment.partitions.get((message.topic, message.partition))
        self._failures.acked(message)
        self._save_now(message, consumed)

    def _save_now(self, message: Message, consumed: ConsumedPartition | None) -> None:
        with self._assignment.changed:
            wanted = 0 if consumed is None else consumed.position
            # Else the partition was lost and handed over again since: the message will be delivered again.
            is_ours = consumed is not None and consumed.was_delivered(message.offset)
        if consumed is not None:
            self._homes.save(consumed)
        name = f"{message.topic}-{message.partition}"
        with self._assignment.changed:
            if consumed is None or not is_ours or self._assignment.partitions.get(consumed.slot) is not consumed:
                raise FencedError(f"{name} is not this consumer's any more: not saved")
            if (consumed.saved or 0) < wanted <= consumed.position:  # else a seek went back
                raise StorageError(f"{name}: a transaction is to save its offset first: acknowledged, and saved later")

    def reject(self, message: Message, reason: str = "rejected") -> None:
        """Report that a message failed: it is delivered again, deferred, or becomes a dead letter."""
        self._failures.failed(message, reason)

    # --- listeners ---------------------------------------------------------------------------------------------------

    def run(self, handle: Handle, *, threads: int = 1) -> None:
        """Call ``handle`` with each message until ``close``, SIGTERM or Ctrl-C: return acknowledges, raise retries.

        Partitions run in parallel, each in order: a partition waits for a message that failed. On SIGTERM (if this is
        the main thread) listeners finish their messages, offsets are saved, and the consumer leaves the group.

        Args:
            threads: how many listeners run at a time.

        Raises:
            FencedError, GroupActiveError, StorageError: as ``poll``.
            SystemExit, ...: ``handle`` raised what is no ``Exception``; the message is not acknowledged.
        """
        require_number("threads", threads, 1, 1000)
        listener = self._listener = Listener(self._assignment, self._failures, self._homes, self._clock, handle)
        with until_terminated(self._assignment.stop_delivery):
            start_threads(f"txmq-{self.settings.group}", threads, listener.work)
        to_end(self._leave)
        if listener.error is not None:
            raise listener.error
        self._refuse_failed()

    # --- control -----------------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions this consumer has now, as (topic, partition)."""
        with self._assignment.changed:
            return sorted(
                slot for slot, consumed in self._assignment.partitions.items() if consumed.revoked_until is None
            )

    @property
    def stopped(self) -> dict[TopicPartition, str]:
        """Partitions that deliver nothing new because something is wrong, each with the reason; all are tried again."""
        with self._assignment.changed:
            held = self._assignment.partitions.items()
            return {
                slot: why for slot, consumed in held if (why := consumed.stopped or consumed.fetch_error) is not None
            }

    def log_of(self, topic: str, partition: int) -> str | None:
        """What to save with an offset of a partition in a store of your own: ``OffsetPosition.log``."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get((topic, partition))
            return None if consumed is None else consumed.log_text

    def pause(self, slots: Iterable[TopicPartition] | None = None) -> None:
        """Deliver nothing of these partitions (default: all) until ``resume``; the consumer keeps them."""
        with self._assignment.changed:
            for slot in self._assignment.partitions if slots is None else slots:
                self._assignment.paused.add(slot)
                if slot in self._assignment.partitions:
                    self._assignment.partitions[slot].is_paused = True

    def resume(self, slots: Iterable[TopicPartition] | None = None) -> None:
        """The reverse of ``pause``."""
        with self._assignment.changed:
            for slot in list(self._assignment.paused) if slots is None else slots:
                self._assignment.paused.discard(slot)
                if slot in self._assignment.partitions:
                    self._assignment.partitions[slot].is_paused = False
            self._assignment.changed.notify_all()
        self._homes.more()

    def seek(self, topic: str, partition: int, offset: int | None = None, *, timestamp_ms: int | None = None) -> None:
        """Go on at an offset, or at the first message of a time.

        Raises:
            TransactionStateError: the partition is not this consumer's.
            ConnectionLostError, ...: the broker is asked, for a time or about deferred messages after the offset.
        """
        if (offset is None) == (timestamp_ms is None):
            raise ConfigError("seek takes an offset or timestamp_ms")
        if timestamp_ms is not None:
            offset = self._client.offset_for(topic, partition, timestamp_ms)
        with self._assignment.changed:
            goes_back = max(self._seeking(topic, partition).deferred, default=-1) >= (offset or 0)
        if goes_back:  # deferred messages there come again from the log, if the log still has them
            offset = max(offset or 0, self._client.offsets(topic, partition).start)
        with self._assignment.changed:
            self._seeking(topic, partition).seek(offset or 0)
        self._homes.more()

    def _seeking(self, topic: str, partition: int) -> ConsumedPartition:
        consumed = self._assignment.partitions.get((topic, partition))
        if consumed is None:
            raise TransactionStateError(f"partition {partition} of {topic!r} is not assigned to this consumer")
        return consumed

    def close(self) -> None:
        """Save the offsets and leave the group: others take over at once. What is not acknowledged comes again.

        Listeners finish their messages first, if that takes no longer than 5 seconds. A listener may call this: ``run``
        ends when it returns.
        """
        if self._assignment.is_parents:
            return
        self._assignment.stop_delivery()
        if self._listener is None or self._listener.wait(CLOSE_S):
            self._leave()

    @property
    def is_called_by_listener(self) -> bool:
        """Whether the caller is a listener of this consumer: ``close`` does not wait then."""
        return self._listener is not None and self._listener.is_called_here

    def _leave(self) -> None:
        with self._assignment.changed:
            if self._assignment.is_left:
                return
            self._assignment.is_left = True
        if self._ungrouped is not None:
            self._ungrouped.stop(CLOSE_S)
        self._homes.stop(CLOSE_S)
        self._entry.leave()
        self._homes.close()
        self._deferred.close()
        self._dead_letters.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        self._refuse_failed()
        if self._assignment.is_closed:
            raise ClosedError("the consumer is closed")

    def _refuse_failed(self) -> None:
        if self._assignment.failure is not None:
            raise anew(self._assignment.failure)
