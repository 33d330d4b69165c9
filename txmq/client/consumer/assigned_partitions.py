"""The partitions that a consumer has, and delivery from them.

Theory of operation. The member's thread (``group_member``, through ``partition_handover``) adds and removes partitions,
the fetcher fills their buffers, the application's threads take messages, acknowledge and reject them (``failures``,
``transactional_acks``), and offsets are saved (``offsets/saver``). One lock guards all of it,
``AssignedPartitions.changed``: every ``ConsumedPartition``, and the dictionary that holds them. It is notified whenever
there may be something to take, or nothing ever again. No request is sent and no file is written while it is held.

The parts are made in one order, each with the ones before it in its constructor, so that no part needs a later one:
assignment, deferred messages, homes (each with saver, fetcher and handover), transactional
acks, failures, members.

Invariants:
    * an offset is saved only when every message below it is acknowledged, deferred or in the dead-letter topic.
"""

from __future__ import annotations

from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.options import ConsumerSettings
from txmq.errors import ClosedError, TxmqError
from txmq.model import Message, TopicPartition
from txmq.runtime.logging import Logger, Sparingly, in_words
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Condition, new_condition, watch_forks

IDLE_S_MAX = 1.0
TURN_S = 0.005  # one-by-one takes stay with a partition for so long, before another one has its turn
REFUSED_MAX = 500  # by the filter, before others get the lock


class _ParentsLock(Condition):
    """In a forked child: what the lock guards is the parent's, and a thread of the parent may hold the lock."""

    def __enter__(self) -> bool:
        raise ClosedError("this consumer is the parent process's: make one here")


class AssignedPartitions:
    """See the module's docstring. Thread safety: any thread.

    Attributes:
        consumer: that messages are delivered for.
        lock: see the module's docstring; ``changed`` is its condition, which costs more to enter.
        partitions: what is consumed now.
        paused: what the application wants no messages of.
        is_closed: nothing more is delivered.
        is_left: the group is being left.
        has_blocked: a message is blocked, and must be deferred.
        has_room: a partition has room for a fetch since messages of it were taken; the thread that takes messages
            fetches.
        failure: why the consumer ended, if the application did not end it.
        is_parents: this process was forked from the one that consumes.
    """

    def __init__(self, consumer: object, settings: ConsumerSettings, clock: Clock, log: Logger) -> None:
        self.consumer, self._settings, self._log = consumer, settings, log
        self._accept, self._sparingly = settings.options.accept, Sparingly(log, clock)
        self.lock, self.changed = new_condition()
        self.partitions: dict[TopicPartition, ConsumedPartition] = {}
        self.paused: set[TopicPartition] = set()
        self.is_closed = self.is_left = self.has_blocked = self.has_room = self.is_parents = False
        self.failure: TxmqError | None = None
        self._turn = 0
        self._again: ConsumedPartition | None = None  # whose message was taken last by a caller of ``take_again``
        self._again_until = 0.0
        self._has_refused = False
        watch_forks(self)

    def forked(self) -> None:
        """In a forked child: nothing here is the child's to take, to acknowledge or to save."""
        self.changed = self.lock = _ParentsLock()
        self.is_parents = True

    def stop_delivery(self) -> None:
        """Deliver nothing more."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def fail(self, error: TxmqError) -> None:
        """Deliver nothing more, and raise the error in threads that ask for messages."""
        self.failure = error
        self.stop_delivery()

    @property
    def deferred_bytes(self) -> int:
        """Size of the deferred messages whose content is in memory."""
        return sum(consumed.deferred_bytes for consumed in list(self.partitions.values()))

    def log_at(self, slot: TopicPartition, offset: int) -> str:
        """Which log a message is in (``LogHistory.log_at``); empty if the partition is no longer consumed."""
        consumed = self.partitions.get(slot)
        return "" if consumed is None or consumed.log is None else consumed.log.log_at(offset)

    def stop(self, consumed: ConsumedPartition, problem: str) -> None:
        """Note and log why a partition delivers nothing new; under ``changed``."""
        consumed.stopped = problem
        self._report(consumed)

    def _report(self, consumed: ConsumedPartition) -> None:
        if consumed.stopped != consumed.reported:
            consumed.reported = consumed.stopped
            if consumed.stopped is not None:
                self._log.error(
                    "partition stopped: nothing new is delivered until this is over", topic=consumed.slot[0],
                    partition=consumed.slot[1], problem=consumed.stopped,
                )  # fmt: skip

    # --- delivery, under ``changed`` ---------------------------------------------------------------------------------

    def take(self, limit: int, now: float) -> list[Message]:
        """Take at most ``limit`` messages of any partitions."""
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

    def take_again(self, now: float) -> Message | None:
        """For one-by-one takes: the next message of the same partition, for ``TURN_S``; None: use ``take``."""
        consumed = self._again
        if consumed is None or now >= self._again_until or consumed.is_busy:
            return None
        return self.take_next(consumed, now)

    def begin_turn(self, message: Message, now: float) -> None:
        """From now on ``take_again`` takes messages of the partition of this one."""
        self._again = self.partitions.get((message.topic, message.partition))
        self._again_until = now + TURN_S

    def take_in_order(self, now: float) -> tuple[Message, ConsumedPartition] | None:
        """Take a message of a partition that no listener works for, and mark the partition as busy."""
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

    def take_next(self, consumed: ConsumedPartition, now: float) -> Message | None:
        """Take the next message of a partition for the listener that works for it; None if it is another's turn."""
        if consumed.keeps_key_order or consumed.retries or consumed.deferred or not self.has(consumed):
            return None
        if self._accept is None and (message := consumed.take_opened()) is not None:
            message.consumer = self.consumer
            return message
        taken = self._accepted(consumed, self._take(consumed, 1, now))
        return taken[0] if taken else None

    def _take(self, consumed: ConsumedPartition, limit: int, now: float) -> list[Message]:
        taken = consumed.take(limit, now)
        if not consumed.fetch and consumed.wants_more(now, self.share_bytes()):
            self.has_room = True
        if consumed.keeps_key_order:
            self.has_blocked = self.has_blocked or bool(consumed.blocked)
            self._report(consumed)
        return taken

    def take_blocked(self, now: float) -> list[tuple[ConsumedPartition, list[Message]]]:
        """Take the blocked messages; the caller defers them, and no other thread does meanwhile."""
        with self.changed:
            waiting = [consumed for consumed in self.partitions.values() if consumed.blocked]
            self.has_blocked = bool(waiting)
            found = [consumed for consumed in waiting if consumed.blocked_at <= now]
            for consumed in found:
                consumed.blocked_at = float("inf")
            return [(consumed, list(consumed.blocked.values())) for consumed in found]

    def _accepted(self, consumed: ConsumedPartition, messages: list[Message]) -> list[Message]:
        consumer, kept = self.consumer, []
        if self._accept is None:
            for message in messages:
                message.consumer = consumer
            return messages
        for message in messages:
            message.consumer = consumer
            if self._is_accepted(message):
                kept.append(message)
            else:
                self._has_refused = True
                consumed.ack(message.offset)
                consumed.forget_deferred(message.offset)
        return kept

    def _is_accepted(self, message: Message) -> bool:
        try:
            return self._accept is None or self._accept(message)
        except Exception as error:  # noqa: BLE001  the application's own code
            self._sparingly.error(
                "the filter failed: the message is delivered", topic=message.topic, partition=message.partition,
                offset=message.offset, error=in_words(error), exc_info=error,
            )  # fmt: skip
            return True

    def next_retry_in(self, now: float) -> float:
        """Seconds until a failed message is due; 0 if the filter refused some, because more may be there."""
        if self._has_refused:
            return 0.0
        due = [at for consumed in self.partitions.values() if (at := consumed.next_due()) is not None]
        due += [consumed.blocked_at for consumed in self.partitions.values() if consumed.blocked]
        return max(min(due) - now, 0.0) if due else IDLE_S_MAX

    def share_bytes(self) -> int:
        """How much each partition may have fetched ahead."""
        return self._settings.options.buffer_size_bytes // max(1, len(self.partitions))

    # --- what the group gives and takes ------------------------------------------------------------------------------

    def held(self, home: int) -> list[tuple[TopicPartition, int]]:
        """The partitions of a home that are consumed now, with generations."""
        with self.changed:
            held = self.partitions.items()
            return [(slot, consumed.generation) for slot, consumed in held if consumed.home == home]

    def has(self, consumed: ConsumedPartition) -> bool:
        """Whether a partition is still consumed, under the same generation."""
        return not self.is_left and self.partitions.get(consumed.slot) is consumed

    def lost(self, slot: TopicPartition) -> None:
        """Consume a partition no longer: another member has it."""
        with self.changed:
            if self.partitions.pop(slot, None) is not None:
                self._log.info("partition given up", topic=slot[0], partition=slot[1])
