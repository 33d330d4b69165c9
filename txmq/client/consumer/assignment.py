"""A consumer's share: the partitions its group gives it, delivery from them, and what of them is to be saved.

Theory of operation. The member's thread (``member``) says what is assigned, revoked and lost, and asks what to save;
the application's threads take messages. Both meet here, under one lock, ``changed``, which is notified whenever there
may be something to take, or nothing ever again.

Invariants:
    * an offset is saved only when every message below it is acknowledged, set aside or in the dead-letter topic;
    * nothing is delivered before where the group begins is saved, unless that is the log's start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from txmq.client.consumer.membership import Assigned
from txmq.client.consumer.offsets.store import OffsetPosition, next_order
from txmq.client.consumer.options import ConsumerSettings
from txmq.client.consumer.partition import Slot, Tracker
from txmq.client.consumer.retry.deferred import Aside, aside_text, parsed
from txmq.client.consumer.retry.file_store import SIZE_BYTES_MAX
from txmq.errors import TxmqError
from txmq.model import Message
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Sparingly
from txmq.runtime.threads import Condition

IDLE_S_MAX = 1.0
REFUSED_MAX = 500  # by the filter, before others get the lock
HAND_OVER_S = 1.0  # that messages under way get, before their partition goes to another member


class Share:
    """See the module's docstring; ``member.Partitions``. Thread safety: any thread.

    Attributes:
        changed: guards everything here.
        trackers: what is consumed now.
        paused: what the application wants no messages of.
        is_closed: nothing more is delivered.
        is_left: the group is being left.
        has_behind: something is to be stored behind other messages of its key.
        failure: why it is over, where it was not the application that ended it.
    """

    aside: Aside
    save_start: Callable[[OffsetPosition], bool]  # ``GroupMember.save_start``
    wait_saved: Callable[[], None]  # ``GroupMember.wait_saved``
    settle: Callable[[], None]  # ``Claims.settle``
    rejected: Callable[[Message], bool]  # ``Claims.rejected``
    may_give_up: Callable[[Message], bool]  # ``Claims.may_give_up``
    more: Callable[[], None]  # ``Fetching.more``

    def __init__(self, client: Any, consumer: Any, settings: ConsumerSettings, log: Any) -> None:
        self._client, self._consumer, self._settings, self._log = client, consumer, settings, log
        self._sparingly = Sparingly(log, client.clock)
        self._clock = client.clock
        self.changed = Condition()
        self.trackers: dict[Slot, Tracker] = {}
        self.paused: set[Slot] = set()
        self.is_closed = self.is_left = self.has_behind = False
        self.failure: TxmqError | None = None
        self._revoked_until: dict[Slot, float] = {}
        self._turn = 0
        self._has_refused = False

    def stop_delivery(self) -> None:
        """Deliver nothing more."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def refused(self, error: TxmqError) -> None:
        """See ``Partitions``."""
        self.failure = error
        self.stop_delivery()

    @property
    def aside_bytes(self) -> int:
        """How much of what is aside is in memory."""
        return sum(tracker.aside_bytes for tracker in list(self.trackers.values()))

    def stop(self, tracker: Tracker, problem: str) -> None:
        """Say why a partition delivers nothing new; under ``changed``."""
        tracker.stopped = problem
        self._tell(tracker)

    def _tell(self, tracker: Tracker) -> None:
        if tracker.stopped != tracker.told:
            tracker.told = tracker.stopped
            if tracker.stopped is not None:
                self._log.error(
                    "partition stopped: nothing new is delivered until this is over", topic=tracker.slot[0],
                    partition=tracker.slot[1], problem=tracker.stopped,
                )  # fmt: skip

    # --- delivery, under ``changed`` ---------------------------------------------------------------------------------

    def take(self, limit: int, now: float) -> list[Message]:
        """Messages of any partition, at most so many."""
        self._has_refused = False
        taken: list[Message] = []
        trackers = list(self.trackers.values())
        for number in range(len(trackers)):
            tracker = trackers[(self._turn + number) % len(trackers)]
            if tracker.is_busy:
                continue
            taken += self._accepted(tracker, self._take(tracker, limit - len(taken), now))
            if len(taken) >= limit:
                self._turn += number + 1
                break
        return taken

    def take_in_order(self, now: float) -> tuple[Message, Tracker] | None:
        """A message of a partition that nobody has in hand, which has the partition now: ``is_busy``."""
        self._has_refused = False
        trackers = list(self.trackers.values())
        refused = 0
        for number in range(len(trackers)):
            tracker = trackers[(self._turn + number) % len(trackers)]
            if tracker.is_busy or (tracker.retries and min(at for at, _ in tracker.retries) > now):
                continue
            while refused < REFUSED_MAX and (taken := self._take(tracker, 1, now)):
                refused += 1
                if accepted := self._accepted(tracker, taken):
                    tracker.is_busy = True
                    self._turn += number + 1
                    return accepted[0], tracker
        return None

    def _take(self, tracker: Tracker, limit: int, now: float) -> list[Message]:
        taken = tracker.take(limit, now)
        if tracker.keeps_key_order:
            self.has_behind = self.has_behind or bool(tracker.behind)
            self._tell(tracker)
        return taken

    def take_behind(self, now: float) -> list[tuple[Tracker, list[Message]]]:
        """What is to be stored behind others of its key, and by nobody else meanwhile."""
        with self.changed:
            waiting = [tracker for tracker in self.trackers.values() if tracker.behind]
            self.has_behind = bool(waiting)
            found = [tracker for tracker in waiting if tracker.behind_at <= now]
            for tracker in found:
                tracker.behind_at = float("inf")
            return [(tracker, list(tracker.behind.values())) for tracker in found]

    def _accepted(self, tracker: Tracker, messages: list[Message]) -> list[Message]:
        kept = []
        for message in messages:
            message.consumer = self._consumer
            if self._is_accepted(message):
                kept.append(message)
            else:
                self._has_refused = True
                tracker.ack(message.offset)
                tracker.forget_aside(message.offset)
        return kept

    def _is_accepted(self, message: Message) -> bool:
        accept = self._settings.options.accept
        try:
            return accept is None or accept(message)
        except Exception as error:  # noqa: BLE001  the application's own code
            self._sparingly.error(
                "the filter failed: the message is delivered", topic=message.topic, partition=message.partition,
                offset=message.offset, error=repr(error), exc_info=error,
            )  # fmt: skip
            return True

    def next_retry_in(self, now: float) -> float:
        """Seconds until a message is due that failed; none where the filter refused some, and more may be there."""
        if self._has_refused:
            return 0.0
        due = [at for tracker in self.trackers.values() if (at := tracker.next_due()) is not None]
        due += [tracker.behind_at for tracker in self.trackers.values() if tracker.behind]
        return max(min(due) - now, 0.0) if due else IDLE_S_MAX

    # --- the group says (``member.Partitions``) ----------------------------------------------------------------------

    def assigned(self, assigned: Assigned) -> None:
        """See ``Partitions``."""
        offset, saved = assigned.offset, assigned.offset
        if offset is None:
            # What came while a broadcast's member was there (or had its name) was sent to it from the first message on.
            is_new = self._settings.broadcast and assigned.is_later
            offset = self._starting_offset(assigned.slot, "earliest" if is_new else self._settings.start)
            if self._settings.start != "earliest":
                # Whoever has it next, should we die, would find another "latest" and skip what came between.
                if not self.save_start(OffsetPosition(assigned.slot, assigned.generation, offset)):
                    return  # lost meanwhile; the next view says whose it is
                saved = offset
        tracker = Tracker(assigned.slot, assigned.generation, offset, saved)
        tracker.keeps_key_order = self._settings.options.keep_key_order
        self.aside.take_over(tracker, assigned.aside)
        with self.changed:
            tracker.is_paused = assigned.slot in self.paused
            self.trackers[assigned.slot] = tracker
            self._revoked_until.pop(assigned.slot, None)
        self.aside.go_on(tracker, lambda: self._has(tracker), lambda: self.aside_bytes < SIZE_BYTES_MAX)
        self._log.info("partition assigned", topic=assigned.slot[0], partition=assigned.slot[1], offset=offset)
        self.more()

    def _has(self, tracker: Tracker) -> bool:
        return not self.is_left and self.trackers.get(tracker.slot) is tracker

    def _starting_offset(self, slot: Slot, start: str | int) -> int:
        if isinstance(start, int):
            return int(self._client.offset_for(*slot, start))
        held = self._client.offsets(*slot)
        return int(held.start if start == "earliest" else held.end)

    def revoked(self, slot: Slot) -> None:
        """See ``Partitions``."""
        with self.changed:
            tracker = self.trackers.get(slot)
            if tracker is not None and not tracker.is_revoked:
                tracker.is_revoked = True
                self._revoked_until[slot] = self._clock.monotonic() + HAND_OVER_S

    def kept(self, slot: Slot) -> None:
        """See ``Partitions``."""
        with self.changed:
            tracker = self.trackers.get(slot)
            if tracker is None or not tracker.is_revoked:
                return
            tracker.is_revoked = False
            self._revoked_until.pop(slot, None)
            self.changed.notify_all()
        self.more()

    def lost(self, slot: Slot) -> None:
        """See ``Partitions``."""
        with self.changed:
            if self.trackers.pop(slot, None) is not None:
                self._log.info("partition given up", topic=slot[0], partition=slot[1])
            self._revoked_until.pop(slot, None)

    def held(self) -> list[tuple[Slot, int]]:
        """See ``Partitions``."""
        with self.changed:
            return [(slot, tracker.generation) for slot, tracker in self.trackers.items()]

    def to_save(self, *, everything: bool) -> list[OffsetPosition]:
        """See ``Partitions``."""
        with self.changed:
            order = next_order()
            return [
                OffsetPosition(slot, tracker.generation, tracker.position, text, order)
                for slot, tracker in self.trackers.items()
                if ((text := aside_text(tracker)) != tracker.aside_saved or tracker.position != tracker.saved)
                and (everything or tracker.saved is not None or tracker.position)
                and tracker.is_ready
                and tracker.saving is None
                and not (self._settings.offset_store is not None and (tracker.claims or tracker.unsure))
            ]

    def were_saved(self, positions: Iterable[OffsetPosition]) -> None:
        """See ``Partitions``."""
        for position in positions:
            with self.changed:
                tracker = self.trackers.get(position.slot)
                if tracker is None or tracker.generation != position.generation:
                    continue
                is_other = tracker.aside_saved != position.aside
                tracker.saved, tracker.aside_saved = position.offset, position.aside
            if is_other:
                self._aside_saved(tracker, parsed(position.aside).keys())

    def _aside_saved(self, tracker: Tracker, named: Collection[int]) -> None:
        crash_point("client.aside.saved")
        with self.changed:
            done = [offset for offset in tracker.dealt if offset not in named]
            tracker.dealt = [offset for offset in tracker.dealt if offset in named]
        if done:
            self.aside.remove(tracker.slot, done)
            crash_point("client.aside.removed")

    def drained(self) -> list[Slot]:
        """See ``Partitions``."""
        now = self._clock.monotonic()
        with self.changed:
            return [
                slot
                for slot, until in self._revoked_until.items()
                if now >= until or (slot in self.trackers and not self.trackers[slot].under_way)
            ]
