"""A consumer's share: the partitions its group gives it, delivery from them, and what of them is to be saved.

Theory of operation. The member's thread (``member``) says what is assigned, revoked and lost, and asks what to save;
the application's threads take messages. Both meet here, under one lock, ``changed``, which is notified whenever there
may be something to take, or nothing ever again.

Invariants:
    * an offset is saved only when every message below it is acknowledged, set aside or in the dead-letter topic;
    * nothing is delivered before where the group begins is saved, unless that is the log's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from txmq.client.aside import Aside, aside_text
from txmq.client.consumer_options import ConsumerSettings
from txmq.client.member import Assigned, Position
from txmq.client.tracker import Slot, Tracker
from txmq.model import Message
from txmq.runtime.threads import Condition

IDLE_S_MAX = 1.0
HAND_OVER_S = 1.0  # that messages under way get, before their partition goes to another member


class Share:
    """See the module's docstring; ``member.Partitions``. Thread safety: any thread.

    Attributes:
        changed: guards everything here.
        trackers: what is consumed now.
        paused: what the application wants no messages of.
        is_closed: nothing more is delivered.
        is_left: the group is being left.
    """

    aside: Aside
    save_start: Callable[[Position], bool]  # ``GroupMember.save_start``
    more: Callable[[], None]  # ``Fetching.more``

    def __init__(self, client: Any, consumer: Any, settings: ConsumerSettings, log: Any) -> None:
        self._client, self._consumer, self._settings, self._log = client, consumer, settings, log
        self._clock = client.clock
        self.changed = Condition()
        self.trackers: dict[Slot, Tracker] = {}
        self.paused: set[Slot] = set()
        self.is_closed = self.is_left = False
        self._revoked_until: dict[Slot, float] = {}
        self._turn = 0

    def stop_delivery(self) -> None:
        """Deliver nothing more."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def under_way(self, message: Message) -> Tracker | None:
        """The partition of a message that is delivered and not acknowledged; under ``changed``."""
        tracker = self.trackers.get((message.topic, message.partition))
        return tracker if tracker is not None and tracker.is_under_way(message.offset) else None

    # --- delivery, under ``changed`` ---------------------------------------------------------------------------------

    def take(self, limit: int, now: float) -> list[Message]:
        """Messages of any partition, at most so many."""
        taken: list[Message] = []
        trackers = list(self.trackers.values())
        for number in range(len(trackers)):
            tracker = trackers[(self._turn + number) % len(trackers)]
            if tracker.is_busy:
                continue
            taken += self._accepted(tracker, tracker.take(limit - len(taken), now))
            if len(taken) >= limit:
                self._turn += number + 1
                break
        return taken

    def take_in_order(self, now: float) -> tuple[Message, Tracker] | None:
        """A message of a partition that nobody has in hand, which has the partition now: ``is_busy``."""
        trackers = list(self.trackers.values())
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

    def _accepted(self, tracker: Tracker, messages: list[Message]) -> list[Message]:
        accept = self._settings.options.accept
        kept = []
        for message in messages:
            message.consumer = self._consumer
            if accept is None or accept(message):
                kept.append(message)
            else:
                tracker.ack(message.offset)
        return kept

    def next_retry_in(self, now: float) -> float:
        """Seconds until a message is due that failed."""
        due = [at for tracker in self.trackers.values() for at, _ in tracker.retries]
        for tracker in self.trackers.values():
            due += [item.due_at for item in tracker.aside.values() if item.message is not None and not item.is_out]
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
                if not self.save_start(Position(assigned.slot, assigned.generation, offset)):
                    return  # lost meanwhile; the next view says whose it is
                saved = offset
        tracker = Tracker(assigned.slot, assigned.generation, offset, saved)
        self.aside.take_over(tracker, assigned.aside, self._log)
        with self.changed:
            tracker.is_paused = assigned.slot in self.paused
            self.trackers[assigned.slot] = tracker
            self._revoked_until.pop(assigned.slot, None)
        self.aside.fetch_missing(tracker, self._log, lambda: self._has(tracker))
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

    def to_save(self, *, everything: bool) -> list[Position]:
        """See ``Partitions``."""
        with self.changed:
            return [
                Position(slot, tracker.generation, tracker.position, text)
                for slot, tracker in self.trackers.items()
                if ((text := aside_text(tracker)) != tracker.aside_saved or tracker.position != tracker.saved)
                and (everything or tracker.saved is not None or tracker.position)
            ]

    def were_saved(self, positions: Iterable[Position]) -> None:
        """See ``Partitions``."""
        with self.changed:
            for position in positions:
                tracker = self.trackers.get(position.slot)
                if tracker is not None and tracker.generation == position.generation:
                    tracker.saved, tracker.aside_saved = position.offset, position.aside

    def drained(self) -> list[Slot]:
        """See ``Partitions``."""
        now = self._clock.monotonic()
        with self.changed:
            return [
                slot
                for slot, until in self._revoked_until.items()
                if now >= until or (slot in self.trackers and not self.trackers[slot].under_way)
            ]
