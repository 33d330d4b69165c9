"""A consumer's share: the partitions its group gives it, delivery from them, and what of them is to be saved.

Theory of operation. The member's thread (``member``) says what is assigned, revoked and lost, and asks what to save;
the application's threads take messages. Both meet here, under one lock, ``changed``, which is notified whenever there
may be something to take, or nothing ever again.

Invariants:
    * an offset is saved only when every message below it is acknowledged, deferred or in the dead-letter topic;
    * nothing is delivered before where the group begins is saved, unless that is the log's start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from txmq.client.consumer.membership import Assigned
from txmq.client.consumer.offsets.store import OffsetPosition, next_order
from txmq.client.consumer.options import ConsumerSettings
from txmq.client.consumer.partition import ConsumedPartition
from txmq.client.consumer.retry.deferred import DeferredMessages, deferred_text, parsed
from txmq.client.consumer.retry.file_store import SIZE_BYTES_MAX
from txmq.errors import TxmqError
from txmq.model import Message, TopicPartition
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Sparingly
from txmq.runtime.threads import Condition

IDLE_S_MAX = 1.0
REFUSED_MAX = 500  # by the filter, before others get the lock
HAND_OVER_S = 1.0  # that messages under way get, before their partition goes to another member


class Assignment:
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

    deferred: DeferredMessages
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
        self.partitions: dict[TopicPartition, ConsumedPartition] = {}
        self.paused: set[TopicPartition] = set()
        self.is_closed = self.is_left = self.has_behind = False
        self.failure: TxmqError | None = None
        self._revoked_until: dict[TopicPartition, float] = {}
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
    def deferred_bytes(self) -> int:
        """How much of what is deferred is in memory."""
        return sum(consumed.deferred_bytes for consumed in list(self.partitions.values()))

    def stop(self, consumed: ConsumedPartition, problem: str) -> None:
        """Say why a partition delivers nothing new; under ``changed``."""
        consumed.stopped = problem
        self._tell(consumed)

    def _tell(self, consumed: ConsumedPartition) -> None:
        if consumed.stopped != consumed.told:
            consumed.told = consumed.stopped
            if consumed.stopped is not None:
                self._log.error(
                    "partition stopped: nothing new is delivered until this is over", topic=consumed.slot[0],
                    partition=consumed.slot[1], problem=consumed.stopped,
                )  # fmt: skip

    # --- delivery, under ``changed`` ---------------------------------------------------------------------------------

    def take(self, limit: int, now: float) -> list[Message]:
        """Messages of any partition, at most so many."""
        self._has_refused = False
        taken: list[Message] = []
        partitions = list(self.partitions.values())
        for number in range(len(partitions)):
            consumed = partitions[(self._turn + number) % len(partitions)]
            if consumed.is_busy:
                continue
            taken += self._accepted(consumed, self._take(consumed, limit - len(taken), now))
            if len(taken) >= limit:
                self._turn += number + 1
                break
        return taken

    def take_in_order(self, now: float) -> tuple[Message, ConsumedPartition] | None:
        """A message of a partition that nobody has in hand, which has the partition now: ``is_busy``."""
        self._has_refused = False
        partitions = list(self.partitions.values())
        refused = 0
        for number in range(len(partitions)):
            consumed = partitions[(self._turn + number) % len(partitions)]
            if consumed.is_busy or (consumed.retries and min(at for at, _ in consumed.retries) > now):
                continue
            while refused < REFUSED_MAX and (taken := self._take(consumed, 1, now)):
                refused += 1
                if accepted := self._accepted(consumed, taken):
                    consumed.is_busy = True
                    self._turn += number + 1
                    return accepted[0], consumed
        return None

    def _take(self, consumed: ConsumedPartition, limit: int, now: float) -> list[Message]:
        taken = consumed.take(limit, now)
        if consumed.keeps_key_order:
            self.has_behind = self.has_behind or bool(consumed.behind)
            self._tell(consumed)
        return taken

    def take_behind(self, now: float) -> list[tuple[ConsumedPartition, list[Message]]]:
        """What is to be stored behind others of its key, and by nobody else meanwhile."""
        with self.changed:
            waiting = [consumed for consumed in self.partitions.values() if consumed.behind]
            self.has_behind = bool(waiting)
            found = [consumed for consumed in waiting if consumed.behind_at <= now]
            for consumed in found:
                consumed.behind_at = float("inf")
            return [(consumed, list(consumed.behind.values())) for consumed in found]

    def _accepted(self, consumed: ConsumedPartition, messages: list[Message]) -> list[Message]:
        kept = []
        for message in messages:
            message.consumer = self._consumer
            if self._is_accepted(message):
                kept.append(message)
            else:
                self._has_refused = True
                consumed.ack(message.offset)
                consumed.forget_deferred(message.offset)
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
        due = [at for consumed in self.partitions.values() if (at := consumed.next_due()) is not None]
        due += [consumed.behind_at for consumed in self.partitions.values() if consumed.behind]
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
        consumed = ConsumedPartition(assigned.slot, assigned.generation, offset, saved)
        consumed.keeps_key_order = self._settings.options.keep_key_order
        self.deferred.take_over(consumed, assigned.deferred)
        with self.changed:
            consumed.is_paused = assigned.slot in self.paused
            self.partitions[assigned.slot] = consumed
            self._revoked_until.pop(assigned.slot, None)
        self.deferred.go_on(consumed, lambda: self._has(consumed), lambda: self.deferred_bytes < SIZE_BYTES_MAX)
        self._log.info("partition assigned", topic=assigned.slot[0], partition=assigned.slot[1], offset=offset)
        self.more()

    def _has(self, consumed: ConsumedPartition) -> bool:
        return not self.is_left and self.partitions.get(consumed.slot) is consumed

    def _starting_offset(self, slot: TopicPartition, start: str | int) -> int:
        if isinstance(start, int):
            return int(self._client.offset_for(*slot, start))
        held = self._client.offsets(*slot)
        return int(held.start if start == "earliest" else held.end)

    def revoked(self, slot: TopicPartition) -> None:
        """See ``Partitions``."""
        with self.changed:
            consumed = self.partitions.get(slot)
            if consumed is not None and not consumed.is_revoked:
                consumed.is_revoked = True
                self._revoked_until[slot] = self._clock.monotonic() + HAND_OVER_S

    def kept(self, slot: TopicPartition) -> None:
        """See ``Partitions``."""
        with self.changed:
            consumed = self.partitions.get(slot)
            if consumed is None or not consumed.is_revoked:
                return
            consumed.is_revoked = False
            self._revoked_until.pop(slot, None)
            self.changed.notify_all()
        self.more()

    def lost(self, slot: TopicPartition) -> None:
        """See ``Partitions``."""
        with self.changed:
            if self.partitions.pop(slot, None) is not None:
                self._log.info("partition given up", topic=slot[0], partition=slot[1])
            self._revoked_until.pop(slot, None)

    def held(self) -> list[tuple[TopicPartition, int]]:
        """See ``Partitions``."""
        with self.changed:
            return [(slot, consumed.generation) for slot, consumed in self.partitions.items()]

    def to_save(self, *, everything: bool) -> list[OffsetPosition]:
        """See ``Partitions``."""
        with self.changed:
            order = next_order()
            return [
                OffsetPosition(slot, consumed.generation, consumed.position, text, order)
                for slot, consumed in self.partitions.items()
                if ((text := deferred_text(consumed)) != consumed.deferred_saved or consumed.position != consumed.saved)
                and (everything or consumed.saved is not None or consumed.position)
                and consumed.is_ready
                and consumed.saving is None
                and not (self._settings.offset_store is not None and (consumed.pending_acks or consumed.in_doubt))
            ]

    def were_saved(self, positions: Iterable[OffsetPosition]) -> None:
        """See ``Partitions``."""
        for position in positions:
            with self.changed:
                consumed = self.partitions.get(position.slot)
                if consumed is None or consumed.generation != position.generation:
                    continue
                is_other = consumed.deferred_saved != position.deferred
                consumed.saved, consumed.deferred_saved = position.offset, position.deferred
            if is_other:
                self._deferred_saved(consumed, parsed(position.deferred).keys())

    def _deferred_saved(self, consumed: ConsumedPartition, named: Collection[int]) -> None:
        crash_point("client.deferred.saved")
        with self.changed:
            done = [offset for offset in consumed.dealt if offset not in named]
            consumed.dealt = [offset for offset in consumed.dealt if offset in named]
        if done:
            self.deferred.remove(consumed.slot, done)
            crash_point("client.deferred.removed")

    def drained(self) -> list[TopicPartition]:
        """See ``Partitions``."""
        now = self._clock.monotonic()
        with self.changed:
            return [
                slot
                for slot, until in self._revoked_until.items()
                if now >= until or (slot in self.partitions and not self.partitions[slot].under_way)
            ]
