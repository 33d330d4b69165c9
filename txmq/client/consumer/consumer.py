"""Consumers: a group's partitions of some topics, in order per partition, each message until it is acknowledged.

Theory of operation. The group's coordinator says which partitions are ours (``group_member``, a thread). A second
thread keeps a ``get`` open at the broker for every partition that has room (``fetcher``, a connection of its own), and
checks the answers (``read_ahead``). ``poll``, iteration and ``run`` (``listener``) take from what was fetched,
partition by partition in turn (``assigned_partitions``). ``ack`` marks; marks are saved every ``offset_save_interval``,
and always before a partition is handed over, on ``close`` and on SIGTERM in ``run``. ``failures`` decides what becomes
of a message that fails.

Invariants:
    * at least once: a message that was not acknowledged is delivered again, to the next owner of the partition;
    * memory is bounded: ``buffer_size_bytes`` a consumer, shared by its partitions, plus one fetch each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from txmq.client.arguments import WAIT_S_MAX, require_number
from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.consumer_homes import ConsumerHomes
from txmq.client.consumer.failures import Failures
from txmq.client.consumer.listener import Handle, Listener
from txmq.client.consumer.offsets.offset_store import NoOffsetStore
from txmq.client.consumer.offsets.store_entry import StoreEntry
from txmq.client.consumer.options import DEFAULTS, ConsumerOptions, ConsumerSettings, MemberSettings
from txmq.client.consumer.retry.dead_letters import DeadLetters
from txmq.client.consumer.retry.deferred import DeferredMessages, open_store
from txmq.client.consumer.transactional_acks import PendingAcks
from txmq.client.consumer.ungrouped import UngroupedConsumer
from txmq.errors import ClosedError, ConfigError, FencedError, StorageError, TransactionStateError, anew
from txmq.model import Message, TopicPartition
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import start_threads, to_end, until_terminated

if TYPE_CHECKING:
    from txmq.client.client import Client

CLOSE_S = 5.0
RECORDS_MAX = 1_000_000_000
__all__ = ["DEFAULTS", "Consumer", "ConsumerOptions", "ConsumerSettings"]


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
