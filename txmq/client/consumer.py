"""Consumers: a group's share of some topics, in order per partition, each message until it is acknowledged.

Theory of operation. The group's coordinator says which partitions are ours (``member``, a thread). A second thread
keeps a ``get`` open at the broker for every partition that has room (a connection of its own), and decodes what comes
into the partition's buffer (``tracker``). Whoever calls ``poll``, iterates, or works in ``run`` takes from the
buffers, partition by partition in turn. ``ack`` marks; marks are saved every ``offset_save_interval``, and always
before a partition is handed over, on ``close`` and on SIGTERM in ``run``.

A message that fails (``reject``, or a listener that raises) is delivered again after a growing pause; in ``run`` its
partition waits for it. After ``max_retries`` it goes to the topic ``<group>.dead-letter``, with headers that say why,
from where and how often, and the partition moves on. What cannot be stored there is tried again: nothing is dropped.

Invariants:
    * an offset is saved only when every message below it is acknowledged or in the dead-letter topic;
    * nothing is delivered before where the group begins is saved, unless that is the log's start;
    * at least once: what was delivered and not acknowledged is delivered again to whoever has the partition next;
    * memory is bounded: ``buffer_size_bytes`` a consumer, shared by its partitions, plus one fetch each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from txmq.client.connection import Connection
from txmq.client.fetching import FETCH_SIZE_BYTES_MIN, Fetching
from txmq.client.member import Assigned, GroupMember, MemberSettings, Position
from txmq.client.tracker import Slot, Tracker
from txmq.errors import (
    ClosedError,
    ConfigError,
    TransactionStateError,
    TxmqError,
)
from txmq.model import Message, is_valid_name
from txmq.registry.assignment import STRATEGIES
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import Condition, start_threads, until_terminated

IDLE_S_MAX = 1.0
HAND_OVER_S = 1.0  # that messages under way get, before their partition goes to another member
RETRY_S_MAX = 60.0
CLOSE_S = 5.0
DEAD_LETTER_SUFFIX = ".dead-letter"
Listener = Callable[[Message], object]
Filter = Callable[[Message], bool]


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """What few consumers change; times in seconds.

    Args:
        name: this member's name in the group; by default made up. Two members must not share one.
        accept: which messages are delivered; the others count as acknowledged.
        strategy: "sticky", "range", "round-robin" or "consistent-hash"; the same for all members.
        retry_delay: before the first retry; doubled each time, up to a minute.
        buffer_size_bytes: how much is fetched ahead, all partitions together.
        session_timeout: who is not heard of for so long loses its partitions.
        heartbeat_interval: how often it is heard of.
        offset_save_interval: between two times of saving what was acknowledged.
    """

    name: str | None = None
    accept: Filter | None = None
    strategy: str = "sticky"
    retry_delay: float = 1.0
    buffer_size_bytes: int = 32 << 20
    session_timeout: float = 6.0
    heartbeat_interval: float = 1.0
    offset_save_interval: float = 1.0


DEFAULTS = ConsumerOptions()


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """See ``Client.consumer``."""

    group: str
    topics: tuple[str, ...]
    start: str | int
    max_retries: int
    options: ConsumerOptions

    def member(self, made_up: str) -> MemberSettings:
        """How it takes part in its group."""
        options = self.options
        return MemberSettings(
            self.group, options.name or made_up, self.topics, options.strategy, options.heartbeat_interval,
            options.session_timeout, options.offset_save_interval,
        )  # fmt: skip

    def check(self) -> None:
        """Raise ConfigError for what is out of range."""
        if not is_valid_name(self.group) or not self.topics or not all(map(is_valid_name, self.topics)):
            raise ConfigError(
                f"group = {self.group!r}, topics = {self.topics!r}: names of A-Z a-z 0-9 . _ -, one topic"
            )
        if self.start not in ("earliest", "latest") and not (isinstance(self.start, int) and self.start >= 0):
            raise ConfigError(f"start = {self.start!r}: expected 'earliest', 'latest' or a time in ms since 1970")
        options = self.options
        if options.strategy not in STRATEGIES:
            raise ConfigError(f"strategy = {options.strategy!r}: expected one of {', '.join(STRATEGIES)}")
        if options.name is not None and not is_valid_name(options.name):
            raise ConfigError(f"name = {options.name!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
        if self.max_retries < 0 or options.retry_delay < 0 or options.buffer_size_bytes < FETCH_SIZE_BYTES_MIN:
            raise ConfigError(f"max_retries and retry_delay from 0, buffer_size_bytes from {FETCH_SIZE_BYTES_MIN}")
        if min(options.session_timeout, options.heartbeat_interval, options.offset_save_interval) <= 0:
            raise ConfigError("session_timeout, heartbeat_interval and offset_save_interval are above 0 seconds")


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
        self._producer: Any = None
        self._log = get_logger(group=settings.group, member=membership.name)
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
        return max(min(due) - now, 0.0) if due else IDLE_S_MAX

    # --- acknowledging -----------------------------------------------------------------------------------------------

    def ack(self, message: Message, *, sync: bool = False) -> None:
        """The message is dealt with. As ``message.ack``.

        Durability: with ``sync`` the group's offset is saved, and forced in the broker, when this returns.
        """
        with self._changed:
            tracker = self._trackers.get((message.topic, message.partition))
            if tracker is not None:
                tracker.ack(message.offset)
        if sync:
            self._member.save()

    def reject(self, message: Message, reason: str = "rejected") -> None:
        """The message could not be dealt with: it is delivered again, or becomes a dead letter."""
        if self._failed(message, reason) > self.settings.max_retries:
            self._bury(message, reason)

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

    def _bury(self, message: Message, reason: str) -> None:
        """Send a message to the dead-letter topic, then acknowledge it; where that fails it stays to be retried."""
        topic = self.settings.group + DEAD_LETTER_SUFFIX
        with self._changed:
            tracker = self._tracker_of(message)
            times = tracker.attempts.get(message.offset, 0) if tracker is not None else 0
        headers = {
            **message.headers, "txmq.dead.reason": reason.encode()[:1000], "txmq.dead.topic": message.topic.encode(),
            "txmq.dead.partition": b"%d" % message.partition, "txmq.dead.offset": b"%d" % message.offset,
            "txmq.dead.attempts": b"%d" % times, "txmq.dead.member": self.name.encode(),
        }  # fmt: skip
        try:
            send = partial(self._dead_letters(topic).send, key=message.key, headers=headers, tag=message.tag)
            # In a context of its own: a transaction's block that rolls back later must not take it along.
            Context().run(send, topic, message.value or b"")
        except TxmqError as error:
            self._log.warning("dead letter could not be stored; it is tried again", topic=topic, error=repr(error))
            return
        with self._changed:
            tracker = self._trackers.get((message.topic, message.partition))
            if tracker is not None:
                tracker.give_up_retry(message)
                tracker.ack(message.offset)
            self._changed.notify_all()

    def _dead_letters(self, topic: str) -> Any:
        if self._producer is None:
            self._client.topics.ensure(topic)
            self._producer = self._client.producer()
        return self._producer

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
        if self._producer is not None:
            self._producer.close()

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
        with self._changed:
            tracker.is_paused = assigned.slot in self._paused
            self._trackers[assigned.slot] = tracker
            self._revoked_until.pop(assigned.slot, None)
        self._log.info("partition assigned", topic=assigned.slot[0], partition=assigned.slot[1], offset=offset)
        self._fetching.more()

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
                Position(slot, tracker.generation, tracker.position)
                for slot, tracker in self._trackers.items()
                if tracker.position != tracker.saved and (everything or tracker.saved is not None or tracker.position)
            ]

    def were_saved(self, positions: Iterable[Position]) -> None:
        """See ``Partitions``."""
        with self._changed:
            for position in positions:
                tracker = self._trackers.get(position.slot)
                if tracker is not None and tracker.generation == position.generation:
                    tracker.saved = position.offset

    def drained(self) -> list[Slot]:
        """See ``Partitions``."""
        now = self._clock.monotonic()
        with self._changed:
            return [
                slot
                for slot, until in self._revoked_until.items()
                if now >= until or (slot in self._trackers and not self._trackers[slot].under_way)
            ]
