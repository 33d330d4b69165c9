"""What becomes of messages that fail: retried in place, set aside, buried.

A message that fails (``reject``, or a listener that raises) is delivered again after a growing pause; in ``run`` its
partition waits for it. After ``max_retries`` it is set aside (``aside``) where there is a ``retry_store``, or goes to
the topic ``<group>.dead-letter``, with headers that say why, from where and how often; and the partition moves on. What
can be stored nowhere is tried again: nothing is dropped.
"""

from __future__ import annotations

from typing import Any

from txmq.client.aside import ASIDE_MESSAGES_MAX, ASIDE_S_MAX, Aside, key_crc
from txmq.client.consumer_options import ConsumerSettings
from txmq.client.share import Share
from txmq.client.tracker import Waiting
from txmq.errors import StorageError, TxmqError
from txmq.model import Message
from txmq.runtime.ports import Clock

RETRY_S_MAX = 60.0


class Failures:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, share: Share, aside: Aside, settings: ConsumerSettings, clock: Clock, log: Any) -> None:
        self._share, self._aside, self._settings, self._clock, self._log = share, aside, settings, clock, log

    def acked(self, message: Message) -> None:
        """A message is dealt with: it waits nowhere any more."""
        with self._share.changed:
            tracker = self._share.trackers.get((message.topic, message.partition))
            waiting = None
            if tracker is not None:
                tracker.ack(message.offset)
                waiting = tracker.aside.pop(message.offset, None)
        if waiting is not None:
            self._aside.forget(message, self._log)

    def failed(self, message: Message, reason: str) -> None:
        """A message could not be dealt with: it is delivered again, set aside, or becomes a dead letter."""
        with self._share.changed:
            tracker = self._share.trackers.get((message.topic, message.partition))
            waiting = tracker.aside_in_hand(message.offset) if tracker is not None else None
        if waiting is not None:
            self._failed_aside(message, waiting, reason)
        elif (count := self._again(message, reason)) > self._settings.max_retries:
            self._give_up(message, count, reason)

    def _failed_aside(self, message: Message, waiting: Waiting, reason: str) -> None:
        options, failures = self._settings.options, waiting.failures + 1
        times = failures - self._settings.max_retries - 1
        if times >= options.aside_retries and self._is_buried(message, failures, reason):
            with self._share.changed:
                tracker = self._share.trackers.get((message.topic, message.partition))
                if tracker is not None and tracker.aside.get(message.offset) is waiting:
                    del tracker.aside[message.offset]
            self._aside.forget(message, self._log)
            return
        try:
            self._aside.store(message, failures, reason)
        except StorageError as error:
            self._log.warning("retry store: the newest failure is not in it", error=repr(error))
        with self._share.changed:
            waiting.failures, waiting.is_out = failures, False
            waiting.due_at = self._clock.monotonic() + self._aside_s(times)
            self._share.changed.notify_all()

    def _aside_s(self, times: int) -> float:
        return float(min(self._settings.options.aside_delay * 2 ** min(max(times, 0), 20), ASIDE_S_MAX))

    def _again(self, message: Message, reason: str) -> int:
        with self._share.changed:
            tracker = self._share.under_way(message)
            if tracker is None:
                return 0  # somebody else has the partition, and will get the message
            count = tracker.attempts.get(message.offset, 0)
            count = tracker.fail(message, self._clock.monotonic() + self._delay_s(count))
            self._share.changed.notify_all()
        self._log.info(
            "message failed", topic=message.topic, partition=message.partition, offset=message.offset, times=count,
            reason=reason[:200],
        )  # fmt: skip
        return count

    def _delay_s(self, failures: int) -> float:
        return float(min(self._settings.options.retry_delay * 2 ** min(failures, 20), RETRY_S_MAX))

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
        with self._share.changed:
            tracker = self._share.under_way(message)
            if tracker is not None and waiting is not None:
                tracker.set_aside(message, waiting)
            elif tracker is not None:
                tracker.give_up_retry(message)
                tracker.ack(message.offset)
            self._share.changed.notify_all()

    def _has_room_aside(self, message: Message) -> bool:
        with self._share.changed:
            tracker = self._share.under_way(message)
            return tracker is not None and len(tracker.aside) < ASIDE_MESSAGES_MAX

    def _is_buried(self, message: Message, failures: int, reason: str) -> bool:
        try:
            self._aside.bury(message, failures, reason)
        except TxmqError as error:
            self._log.warning("dead letter could not be stored; it is tried again", error=repr(error))
            return False
        return True
