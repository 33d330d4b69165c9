"""Consumers: a group's share of some topics, in order per partition, each message until it is acknowledged.

Theory of operation. The group's coordinator says which partitions are ours (``member``, a thread). A second thread
keeps a ``get`` open at the broker for every partition that has room (a connection of its own), and decodes what comes
into the partition's buffer (``tracker``). Whoever calls ``poll``, iterates, or works in ``run`` takes from the
buffers, partition by partition in turn. ``ack`` marks; marks are saved every ``offset_save_interval``, and always
before a partition is handed over, on ``close`` and on SIGTERM in ``run``.

A message that fails (``reject``, or a listener that raises) is delivered again after a growing pause; in ``run`` its
partition waits for it. After ``max_retries`` it is set aside (``aside``) where there is a ``retry_store``, or goes to
the topic ``<group>.dead-letter``, with headers that say why, from where and how often; and the partition moves on. What
can be stored nowhere is tried again: nothing is dropped.

Invariants:
    * an offset is saved only when every message below it is acknowledged, set aside or in the dead-letter topic;
    * nothing is delivered before where the group begins is saved, unless that is the log's start;
    * at least once: what was delivered and not acknowledged is delivered again to whoever has the partition next;
    * memory is bounded: ``buffer_size_bytes`` a consumer, shared by its partitions, plus one fetch each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from txmq.client.aside import ASIDE_MESSAGES_MAX, ASIDE_S_MAX, Aside, aside_text, key_crc
from txmq.client.connection import Connection
from txmq.client.consumer_options import DEFAULTS, ConsumerOptions, ConsumerSettings
from txmq.client.fetching import Fetching
from txmq.client.member import Assigned, GroupMember, MemberSettings, Position
from txmq.client.retry_store import RetryStore
from txmq.client.tracker import Slot, Tracker, Waiting
from txmq.errors import (
    ClosedError,
    ConfigError,
    StorageError,
    TransactionStateError,
    TxmqError,
)
from txmq.model import Message
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import Condition, start_threads, until_terminated

IDLE_S_MAX = 1.0
HAND_OVER_S = 1.0  # that messages under way get, before their partition goes to another member
RETRY_S_MAX = 60.0
CLOSE_S = 5.0
Listener = Callable[[Message], object]
__all__ = ["DEFAULTS", "Consumer", "ConsumerOptions", "ConsumerSettings"]


class Consumer:
    """See the module's docstring; made by ``Client.consumer``. Usable as a block, and as an iterator.

    Thread safety: any thread. Not to be used after ``fork``.
    """

    def __init__(
        self, client: Any, connections: tuple[Connection, Connection], settings: ConsumerSettings,
        membership: MemberSettings,
    ) -> None:  # fmt: skip
        self._client, self.settings, self.name = client, settings, membership.name
        self._clock = client.clock
        self._changed = Condition()  # guards everything below; told of messages, retries, the end
        self._trackers: dict[Slot, Tracker] = {}
        self._revoked_until: dict[Slot, float] = {}
        self._turn = 0
        self._numbers = 0
        self._is_closed = self._is_left = False
        self._paused: set[Slot] = set()
        self._log = get_logger(group=settings.group, member=membership.name)
        store = RetryStore(settings.retry_store) if settings.retry_store is not None else None
        self._aside = Aside(client, settings.group, self.name, store, self._changed)
        fetching, beating = connections
        self._fetching = Fetching(client, fetching, self._changed, self._trackers, settings.options.buffer_size_bytes)
        self._member = GroupMember(beating, self._clock, membership, self)
        self._member.start()
        self._fetching.start(self._log)

    # --- taking messages ---------------------------------------------------------------------------------------------

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Message]:
        """Messages of the partitions this consumer has; ``ack`` or ``reject`` each.

        Args:
            max_records: at most so many.
            timeout: seconds to wait where there is nothing.

        Raises:
            ClosedError: the consumer is closed.
        """
        deadline = self._clock.monotonic() + timeout
        with self._changed:
            while True:
                self._refuse_closed()
                now = self._clock.monotonic()
                taken = self._take(max_records, now)
                if taken or now >= deadline:
                    break
                self._changed.wait(min(deadline - now, self._next_retry_in(now)))
        if taken:
            self._fetching.more()
        return taken

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, until ``close``. One that was not acknowledged is not delivered again meanwhile."""
        while True:
            try:
                yield from self.poll(1)
            except ClosedError:
                return

    def _take(self, limit: int, now: float) -> list[Message]:
        taken: list[Message] = []
        trackers = list(self._trackers.values())
        for number in range(len(trackers)):
            tracker = trackers[(self._turn + number) % len(trackers)]
            if tracker.is_busy:
                continue
            taken += self._accepted(tracker, tracker.take(limit - len(taken), now))
            if len(taken) >= limit:
                self._turn += number + 1
                break
        return taken

    def _accepted(self, tracker: Tracker, messages: list[Message]) -> list[Message]:
        accept = self.settings.options.accept
        kept = []
        for message in messages:
            message.consumer = self
            if accept is None or accept(message):
                kept.append(message)
            else:
                tracker.ack(message.offset)
        return kept

    def _next_retry_in(self, now: float) -> float:
        due = [at for tracker in self._trackers.values() for at, _ in tracker.retries]
        for tracker in self._trackers.values():
            due += [item.due_at for item in tracker.aside.values() if item.message is not None and not item.is_out]
        return max(min(due) - now, 0.0) if due else IDLE_S_MAX

    # --- acknowledging -----------------------------------------------------------------------------------------------

    def ack(self, message: Message, *, sync: bool = False) -> None:
        """The message is dealt with. As ``message.ack``.

        Durability: with ``sync`` the group's offset is saved, and forced in the broker, when this returns.
        """
        with self._changed:
            tracker = self._trackers.get((message.topic, message.partition))
            waiting = None
            if tracker is not None:
                tracker.ack(message.offset)
                waiting = tracker.aside.pop(message.offset, None)
        if waiting is not None:
            self._aside.forget(message, self._log)
        if sync:
            self._member.save()

    def reject(self, message: Message, reason: str = "rejected") -> None:
        """The message could not be dealt with: it is delivered again, set aside, or becomes a dead letter."""
        with self._changed:
            tracker = self._trackers.get((message.topic, message.partition))
            waiting = tracker.aside_in_hand(message.offset) if tracker is not None else None
        if waiting is not None:
            self._failed_aside(message, waiting, reason)
        elif (count := self._failed(message, reason)) > self.settings.max_retries:
            self._give_up(message, count, reason)

    def _failed_aside(self, message: Message, waiting: Waiting, reason: str) -> None:
        options, failures = self.settings.options, waiting.failures + 1
        times = failures - self.settings.max_retries - 1
        if times >= options.aside_retries and self._is_buried(message, failures, reason):
            with self._changed:
                tracker = self._trackers.get((message.topic, message.partition))
                if tracker is not None and tracker.aside.get(message.offset) is waiting:
                    del tracker.aside[message.offset]
            self._aside.forget(message, self._log)
            return
        try:
            self._aside.store(message, failures, reason)
        except StorageError as error:
            self._log.warning("retry store: the newest failure is not in it", error=repr(error))
        with self._changed:
            waiting.failures, waiting.is_out = failures, False
            waiting.due_at = self._clock.monotonic() + self._aside_s(times)
            self._changed.notify_all()

    def _aside_s(self, times: int) -> float:
        return float(min(self.settings.options.aside_delay * 2 ** min(max(times, 0), 20), ASIDE_S_MAX))

    def _failed(self, message: Message, reason: str) -> int:
        with self._changed:
            tracker = self._tracker_of(message)
            if tracker is None:
                return 0  # somebody else has the partition, and will get the message
            count = tracker.attempts.get(message.offset, 0)
            count = tracker.fail(message, self._clock.monotonic() + self._delay_s(count))
            self._changed.notify_all()
        self._log.info(
            "message failed", topic=message.topic, partition=message.partition, offset=message.offset, times=count,
            reason=reason[:200],
        )  # fmt: skip
        return count

    def _delay_s(self, failures: int) -> float:
        return float(min(self.settings.options.retry_delay * 2 ** min(failures, 20), RETRY_S_MAX))

    def _tracker_of(self, message: Message) -> Tracker | None:
        tracker = self._trackers.get((message.topic, message.partition))
        return tracker if tracker is not None and tracker.is_under_way(message.offset) else None

    def _give_up(self, message: Message, count: int, reason: str) -> None:
        """Set a message aside or bury it, then acknowledge it; where both fail it stays to be retried in place."""
        waiting = None
        try:
            if self._has_room_aside(message) and self._aside.store(message, count, reason):
                waiting = Waiting(message, count, key_crc(message), self._clock.monotonic() + self._aside_s(0))
        except StorageError as error:
            self._log.warning("message could not be set aside; it is tried again", error=repr(error))
            return
        if waiting is None and not self._is_buried(message, count, reason):
            return
        with self._changed:
            tracker = self._tracker_of(message)
            if tracker is not None and waiting is not None:
                tracker.set_aside(message, waiting)
            elif tracker is not None:
                tracker.give_up_retry(message)
                tracker.ack(message.offset)
            self._changed.notify_all()

    def _has_room_aside(self, message: Message) -> bool:
        with self._changed:
            tracker = self._tracker_of(message)
            return tracker is not None and len(tracker.aside) < ASIDE_MESSAGES_MAX

    def _is_buried(self, message: Message, failures: int, reason: str) -> bool:
        try:
            self._aside.bury(message, failures, reason)
        except TxmqError as error:
            self._log.warning("dead letter could not be stored; it is tried again", error=repr(error))
            return False
        return True

    # --- listeners ---------------------------------------------------------------------------------------------------

    def run(self, handle: Listener, *, threads: int = 1) -> None:
        """Call ``handle`` with each message until ``close``, SIGTERM or Ctrl-C: return acknowledges, raise retries.

        Partitions in parallel, each in order: no message of a partition before the one that failed. On SIGTERM (where
        this is the main thread) what is in hand is finished, offsets are saved, the group is left.

        Args:
            threads: how many messages are in hand at a time.
        """
        if not 1 <= threads <= 1000:
            raise ConfigError(f"threads = {threads}: expected 1 to 1000")
        with until_terminated(self._stop_delivery):
            start_threads(f"txmq-{self.settings.group}", threads, lambda: self._work(handle))
        self.close()

    def _work(self, handle: Listener) -> None:
        while True:
            message, tracker = self._next_for_listener()
            if message is None or tracker is None:
                return
            reason: str | None = None
            try:
                handle(message)
            except Exception as error:  # noqa: BLE001  whatever the application raises: the message is retried
                reason = repr(error)
            if reason is None:
                self.ack(message)
            else:
                self.reject(message, reason)
            with self._changed:
                tracker.is_busy = False
                self._changed.notify_all()

    def _next_for_listener(self) -> tuple[Message | None, Tracker | None]:
        """A message of a partition that nobody has in hand; None when it is over."""
        while True:
            with self._changed:
                while not self._is_closed:
                    now = self._clock.monotonic()
                    found = self._take_in_order(now)
                    if found is not None:
                        break
                    self._changed.wait(min(self._next_retry_in(now), IDLE_S_MAX))
                else:
                    return None, None
            self._fetching.more()
            return found

    def _take_in_order(self, now: float) -> tuple[Message, Tracker] | None:
        trackers = list(self._trackers.values())
        for number in range(len(trackers)):
            tracker = trackers[(self._turn + number) % len(trackers)]
            if tracker.is_busy or (tracker.retries and min(at for at, _ in tracker.retries) > now):
                continue
            while taken := tracker.take(1, now):
                if accepted := self._accepted(tracker, taken):
                    tracker.is_busy = True
                    self._turn += number + 1
                    return accepted[0], tracker
        return None

    def _stop_delivery(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # --- control -----------------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[Slot]:
        """The partitions this consumer has now, as (topic, partition)."""
        with self._changed:
            return sorted(slot for slot, tracker in self._trackers.items() if not tracker.is_revoked)

    def pause(self, slots: Iterable[Slot] | None = None) -> None:
        """Deliver nothing of these partitions (default: all) until ``resume``; they stay ours."""
        with self._changed:
            for slot in self._trackers if slots is None else slots:
                self._paused.add(slot)
                if slot in self._trackers:
                    self._trackers[slot].is_paused = True

    def resume(self, slots: Iterable[Slot] | None = None) -> None:
        """The reverse of ``pause``."""
        with self._changed:
            for slot in list(self._paused) if slots is None else slots:
                self._paused.discard(slot)
                if slot in self._trackers:
                    self._trackers[slot].is_paused = False
            self._changed.notify_all()
        self._fetching.more()

    def seek(self, topic: str, partition: int, offset: int | None = None, *, timestamp_ms: int | None = None) -> None:
        """Go on at an offset, or at the first message of a time.

        Raises:
            TransactionStateError: the partition is not this consumer's.
        """
        if (offset is None) == (timestamp_ms is None):
            raise ConfigError("seek takes an offset or timestamp_ms")
        if timestamp_ms is not None:
            offset = self._client.offset_for(topic, partition, timestamp_ms)
        with self._changed:
            tracker = self._trackers.get((topic, partition))
            if tracker is None:
                raise TransactionStateError(f"partition {partition} of {topic!r} is not assigned to this consumer")
            tracker.seek(offset or 0)
        self._fetching.more()

    def close(self) -> None:
        """Save the offsets and leave the group: others take over at once. What is not acknowledged comes again."""
        self._stop_delivery()
        with self._changed:
            if self._is_left:
                return
            self._is_left = True
        self._member.stop(CLOSE_S)
        self._fetching.close()
        self._aside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ClosedError("the consumer is closed")

    # --- the group says (``member.Partitions``) ----------------------------------------------------------------------

    def assigned(self, assigned: Assigned) -> None:
        """See ``Partitions``."""
        offset, saved = assigned.offset, assigned.offset
        if offset is None:
            offset = self._starting_offset(assigned.slot)
            if self.settings.start != "earliest":
                # Whoever has it next, should we die, would find another "latest" and skip what came between.
                if not self._member.save_start(Position(assigned.slot, assigned.generation, offset)):
                    return  # lost meanwhile; the next view says whose it is
                saved = offset
        tracker = Tracker(assigned.slot, assigned.generation, offset, saved)
        self._aside.take_over(tracker, assigned.aside, self._log)
        with self._changed:
            tracker.is_paused = assigned.slot in self._paused
            self._trackers[assigned.slot] = tracker
            self._revoked_until.pop(assigned.slot, None)
        self._aside.fetch_missing(tracker, self._log, lambda: self._has(tracker))
        self._log.info("partition assigned", topic=assigned.slot[0], partition=assigned.slot[1], offset=offset)
        self._fetching.more()

    def _has(self, tracker: Tracker) -> bool:
        return not self._is_left and self._trackers.get(tracker.slot) is tracker

    def _starting_offset(self, slot: Slot) -> int:
        start = self.settings.start
        if isinstance(start, int):
            return int(self._client.offset_for(*slot, start))
        held = self._client.offsets(*slot)
        return int(held.start if start == "earliest" else held.end)

    def revoked(self, slot: Slot) -> None:
        """See ``Partitions``."""
        with self._changed:
            tracker = self._trackers.get(slot)
            if tracker is not None and not tracker.is_revoked:
                tracker.is_revoked = True
                self._revoked_until[slot] = self._clock.monotonic() + HAND_OVER_S

    def kept(self, slot: Slot) -> None:
        """See ``Partitions``."""
        with self._changed:
            tracker = self._trackers.get(slot)
            if tracker is None or not tracker.is_revoked:
                return
            tracker.is_revoked = False
            self._revoked_until.pop(slot, None)
            self._changed.notify_all()
        self._fetching.more()

    def lost(self, slot: Slot) -> None:
        """See ``Partitions``."""
        with self._changed:
            if self._trackers.pop(slot, None) is not None:
                self._log.info("partition given up", topic=slot[0], partition=slot[1])
            self._revoked_until.pop(slot, None)

    def held(self) -> list[tuple[Slot, int]]:
        """See ``Partitions``."""
        with self._changed:
            return [(slot, tracker.generation) for slot, tracker in self._trackers.items()]

    def to_save(self, *, everything: bool) -> list[Position]:
        """See ``Partitions``."""
        with self._changed:
            return [
                Position(slot, tracker.generation, tracker.position, text)
                for slot, tracker in self._trackers.items()
                if ((text := aside_text(tracker)) != tracker.aside_saved or tracker.position != tracker.saved)
                and (everything or tracker.saved is not None or tracker.position)
            ]

    def were_saved(self, positions: Iterable[Position]) -> None:
        """See ``Partitions``."""
        with self._changed:
            for position in positions:
                tracker = self._trackers.get(position.slot)
                if tracker is not None and tracker.generation == position.generation:
                    tracker.saved, tracker.aside_saved = position.offset, position.aside

    def drained(self) -> list[Slot]:
        """See ``Partitions``."""
        now = self._clock.monotonic()
        with self._changed:
            return [
                slot
                for slot, until in self._revoked_until.items()
                if now >= until or (slot in self._trackers and not self._trackers[slot].under_way)
            ]
