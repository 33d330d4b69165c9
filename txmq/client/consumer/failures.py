"""What becomes of messages that fail: retried in place, deferred, dead-lettered.

Theory of operation. A message that fails (``reject``, or a listener that raises) is delivered again after a growing
pause; in ``run`` its partition waits for it. After ``max_retries`` it is deferred (``retry/``) if there is a
``retry_store``, or becomes a dead letter (``dead_letters``), and the partition moves on. With ``keep_key_order``
later messages of its key are *blocked*: deferred without being delivered, by the thread that takes messages next.

Invariants:
    * only its own failures count: a message whose transaction was refused because an earlier one of its partition is
      not acknowledged yet (``ConsumedPartition.out_of_turn``) is delivered again, after that one; and none counts
      while the database that keeps the group's offsets does not answer: nothing can be acknowledged then;
    * a message that cannot be stored is tried again; its partition waits and reports why (``stopped``): nothing is
      dropped;
    * a message that failed is deferred only where there is room, else it becomes a dead letter;
      a blocked one never becomes a dead letter for want of room: its partition waits, and reports why.
"""

from __future__ import annotations

from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumed_partition import DEFERRED_MESSAGES_MAX, ConsumedPartition, Waiting, key_crc
from txmq.client.consumer.options import ConsumerSettings
from txmq.client.consumer.retry.dead_letters import DeadLetters
from txmq.client.consumer.retry.deferred import DEFERRED_S_MAX, DeferredMessages
from txmq.client.consumer.retry.retry_store import SIZE_BYTES_MAX
from txmq.client.consumer.transactional_acks import PendingAcks
from txmq.errors import TxmqError
from txmq.model import Message
from txmq.runtime.backoff import Backoff
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Logger, Sparingly, in_words
from txmq.runtime.ports import Clock

RETRY_S_MAX = 60.0
STORE_AGAIN_S = 1.0
_EARLIER = "an earlier message of its partition is not acknowledged yet: a message comes again after it"
_AWAY = "the offset store cannot be asked: a message that failed comes again, and that does not count"
BLOCKED = "blocked by an earlier message of its key"


class Failures:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(
        self, assignment: AssignedPartitions, deferred: DeferredMessages, dead_letters: DeadLetters, acks: PendingAcks,
        settings: ConsumerSettings, clock: Clock, log: Logger,
    ) -> None:  # fmt: skip
        self._assignment, self._deferred, self._dead_letters, self._acks = assignment, deferred, dead_letters, acks
        self._settings, self._clock, self._log = settings, clock, log
        self._sparingly = Sparingly(log, clock)

    def acked(self, message: Message) -> None:
        """Acknowledge a message, and cancel its retries."""
        assignment = self._assignment
        with assignment.lock:
            consumed = assignment.partitions.get((message.topic, message.partition))
            if consumed is not None and consumed.acked(message):
                assignment.changed.notify_all()  # it may have blocked later ones

    def returned(self, message: Message, consumed: ConsumedPartition) -> None:
        """Acknowledge the message of a listener that returned, unless the listener has rejected it; under the lock."""
        if consumed.retries or consumed.deferred or not self._assignment.has(consumed):
            if not consumed.waits_again(message.offset):
                self.acked(message)
        elif consumed.acked(message):
            self._assignment.changed.notify_all()

    def failed(self, message: Message, reason: object, error: Exception | None = None) -> None:
        """Deliver a message that failed again, defer it, or make it a dead letter.

        Args:
            reason: in a few words; it stands in the retry store and in the dead letter. Of anything but text the
                ``repr``.
            error: raised by the listener; its traceback is logged.
        """
        if self._acks.rejected(message):
            return
        with self._assignment.changed:
            consumed = self._assignment.partitions.get((message.topic, message.partition))
            if consumed is None or consumed.is_of_another(message):
                return  # another member has the partition, and will get the message
            if message.offset in consumed.failing or consumed.waits_again(message.offset):
                return  # another thread has rejected it, too
            ours = consumed.failing[message.offset] = object()
        try:
            self._failed(consumed, message, in_words(reason), error)
        finally:
            with self._assignment.changed:
                if consumed.failing.get(message.offset) is ours:  # else another thread has it again by now
                    del consumed.failing[message.offset]

    def _failed(self, consumed: ConsumedPartition, message: Message, reason: str, error: Exception | None) -> None:
        is_store_away = self._acks.is_store_away(message)
        with self._assignment.changed:
            if is_store_away or message.offset in consumed.out_of_turn:
                self._wait_its_turn(consumed, message, _AWAY if is_store_away else _EARLIER, reason)
                return
            waiting = consumed.deferred_in_hand(message.offset)
            is_under_way = consumed.is_under_way(message.offset)
            count = consumed.count_failure(message) if is_under_way else 0
        if waiting is not None:
            self._say_failed(message, waiting.failures + 1, reason, error)
            self._failed_deferred(consumed, message, waiting, reason)
        elif is_under_way:
            self._say_failed(message, count, reason, error)
            is_last = count > self._settings.max_retries and self._acks.may_give_up(message)
            if not (is_last and self._is_given_up(consumed, message, count, reason)):
                self._retry(consumed, message, count)

    def _wait_its_turn(self, consumed: ConsumedPartition, message: Message, event: str, reason: str) -> None:
        consumed.out_of_turn.discard(message.offset)
        again_at = self._clock.monotonic() + self._settings.options.retry_delay
        consumed.deliver_again(message, consumed.turn_at(message.offset, again_at))
        consumed.failing.pop(message.offset, None)
        self._sparingly.warning(
            event, topic=message.topic, partition=message.partition, offset=message.offset, reason=reason[:200]
        )  # fmt: skip
        self._assignment.changed.notify_all()

    def _say_failed(self, message: Message, times: int, reason: str, error: Exception | None) -> None:
        """Log the 1st, 2nd, 4th ... failure as a warning: a message that fails for ever does not fill the log."""
        is_seen = times & (times - 1) == 0
        (self._log.warning if is_seen else self._log.info)(
            "message failed", topic=message.topic, partition=message.partition, offset=message.offset, times=times,
            reason=reason[:200], exc_info=error if is_seen else None,
        )  # fmt: skip

    def _retry(self, consumed: ConsumedPartition, message: Message, count: int) -> None:
        with self._assignment.changed:
            if consumed.is_under_way(message.offset):
                consumed.retry(message, self._clock.monotonic() + self._delay_s(count - 1))
                consumed.failing.pop(message.offset, None)
            self._assignment.changed.notify_all()

    def _delay_s(self, failures: int) -> float:
        return Backoff(self._settings.options.retry_delay, RETRY_S_MAX).after(failures)

    # --- deferred ----------------------------------------------------------------------------------------------------

    def _is_given_up(self, consumed: ConsumedPartition, message: Message, count: int, reason: str) -> bool:
        """Defer a message or dead-letter it, then acknowledge it; False if both failed."""
        try:
            waiting = self._stored(consumed, message, count, reason)
            if waiting is None:
                self._dead_letters.dead_letter(message, count, reason)
                crash_point("client.dead_letter.sent")
        except TxmqError as error:
            with self._assignment.changed:
                self._assignment.stop(consumed, f"a message could be neither deferred nor made a dead letter: {error}")
            return False
        if waiting is not None:
            self._sparingly.warning(
                "message deferred: it is retried later, its partition goes on", topic=message.topic,
                partition=message.partition, offset=message.offset, times=count, reason=reason[:200],
            )  # fmt: skip
        with self._assignment.changed:
            consumed.stopped = None
            consumed.failing.pop(message.offset, None)
            if consumed.is_under_way(message.offset) and waiting is not None:
                consumed.defer(message, waiting)
            else:
                consumed.ack(message.offset)
            self._assignment.changed.notify_all()
        return True

    def _stored(self, consumed: ConsumedPartition, message: Message, count: int, reason: str) -> Waiting | None:
        with self._assignment.changed:
            if len(consumed.deferred) + len(consumed.blocked) >= DEFERRED_MESSAGES_MAX or not self._has_room([message]):
                return None
        copies = self._deferred.store([message], count, reason)
        if copies is None:
            return None
        crash_point("client.deferred.stored")
        return Waiting(message, count, key_crc(message), self._clock.monotonic() + self._deferred_s(count), copies[0])

    def _has_room(self, messages: list[Message]) -> bool:
        return (
            self._assignment.deferred_bytes + sum(len(message.value or b"") for message in messages) <= SIZE_BYTES_MAX
        )

    def _failed_deferred(self, consumed: ConsumedPartition, message: Message, waiting: Waiting, reason: str) -> None:
        failures = waiting.failures + 1
        limit = self._settings.max_retries + self._settings.options.deferred_retries
        if failures > limit and self._acks.may_give_up(message):
            try:
                self._dead_letters.dead_letter(message, failures, reason)
                crash_point("client.dead_letter.sent")
            except TxmqError as error:
                self._log.warning("dead letter could not be stored; it is tried again", error=repr(error))
            else:
                with self._assignment.changed:
                    if consumed.deferred.get(message.offset) is waiting:
                        consumed.forget_deferred(message.offset)
                    self._assignment.changed.notify_all()
                return
        try:
            self._deferred.update(message, failures, reason)
        except TxmqError as error:
            self._log.warning("retry store: the newest failure is not in it", error=repr(error))
        with self._assignment.changed:
            waiting.failures, waiting.is_out = failures, False
            consumed.failing.pop(message.offset, None)
            waiting.due_at = self._clock.monotonic() + self._deferred_s(failures)
            self._assignment.changed.notify_all()

    def _deferred_s(self, failures: int) -> float:
        """The pause after so many failures; a blocked one has those in place still to come."""
        times = failures - self._settings.max_retries - 1
        if times < 0:
            return self._delay_s(failures - 1)
        return Backoff(self._settings.options.deferred_delay, DEFERRED_S_MAX).after(times)

    # --- blocked -----------------------------------------------------------------------------------------------------

    def store_blocked(self) -> None:
        """Defer blocked messages; call it without the lock, when messages are taken."""
        if not self._assignment.has_blocked:
            return
        for consumed, messages in self._assignment.take_blocked(self._clock.monotonic()):
            copies, problem = None, "the retry store is full, and a message in it blocks the next one"
            try:
                if self._has_room(messages):
                    copies = self._deferred.store(messages, 0, BLOCKED)
            except TxmqError as error:
                problem = f"a message that has to wait could not be deferred: {error}"
            finally:
                with self._assignment.changed:
                    consumed.blocked_at = self._clock.monotonic() + (STORE_AGAIN_S if copies is None else 0.0)
            if copies is not None:
                self._sparingly.warning(
                    "messages deferred: an earlier message of their key blocks them", topic=consumed.slot[0],
                    partition=consumed.slot[1], offset=messages[0].offset, messages=len(messages),
                )  # fmt: skip
            with self._assignment.changed:
                if copies is None:
                    self._assignment.stop(consumed, problem)
                else:
                    consumed.stopped = None
                    consumed.defer_blocked(zip(messages, copies, strict=True))
                self._assignment.changed.notify_all()
