"""What a consumer does with messages it cannot deal with now: set aside, retried later, buried in the end.

Theory of operation. A message that failed ``max_retries`` times in place is set aside: stored (``retry_store``), noted
in its partition's tracker, then acknowledged, so that the partition moves on. The note travels in the group's saved
offset (``aside``), which is the truth: JSON ``[[offset, failures, CRC of the key or null], ...]`` of offsets below the
saved one. Whoever has the partition, and nobody else, delivers these again, each after a pause that grows, and sends
them to ``<group>.dead-letter`` after ``aside_retries`` more failures. Who gets a partition takes contents from its own
store, and from the broker what that has not.

Invariants:
    * store, then acknowledge, then save: a process that dies in between has the message delivered again;
    * what cannot be stored or buried is retried in place: nothing is dropped;
    * one partition has at most ``ASIDE_MESSAGES_MAX`` aside; where there is no room, a message becomes a dead letter.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

from txmq.client.consumer_options import ConsumerSettings
from txmq.client.retry_store import RetryStore, Stored
from txmq.client.tracker import Tracker, Waiting
from txmq.errors import ClosedError, OffsetOutOfRangeError, StorageError, TxmqError
from txmq.model import Message
from txmq.runtime.threads import Condition, start_daemon

ASIDE_MESSAGES_MAX = 1000  # 50 characters each at most: below what the broker takes for one partition
ASIDE_S_MAX = 600.0
FETCH_AGAIN_S = 0.2
FETCH_SIZE_BYTES = 64 << 10
DEAD_LETTER_SUFFIX = ".dead-letter"


def aside_text(tracker: Tracker) -> str | None:
    """What is to be saved beside the tracker's position; what is not below it is delivered again anyway."""
    rows = [
        [offset, waiting.failures, waiting.key_crc]
        for offset, waiting in sorted(tracker.aside.items())
        if offset < tracker.position
    ]
    return json.dumps(rows, separators=(",", ":")) if rows else None


def parsed(text: str | None) -> dict[int, Waiting]:
    """The reverse, without contents and due at once. Text that is not ours is an error, never passed over.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        rows = json.loads(text) if text else []
        return {int(offset): Waiting(None, int(failures), key_crc) for offset, failures, key_crc in rows}
    except (TypeError, ValueError) as error:
        raise StorageError(f"what the group has set aside cannot be read: {str(text)[:100]!r}") from error


def key_crc(message: Message) -> int | None:
    """What stands for a message's key among what is set aside."""
    return None if message.key is None else zlib.crc32(message.key)


class Aside:
    """See the module's docstring; ``changed`` guards the trackers. Thread safety: any thread."""

    def __init__(
        self, client: Any, settings: ConsumerSettings, member: str, store: RetryStore | None, changed: Condition
    ) -> None:
        self._client, self._group, self._member, self._store, self._changed = (
            client, settings.saved_as, member, store, changed
        )  # fmt: skip
        self._dead_letters = settings.group + DEAD_LETTER_SUFFIX
        self._producer: Any = None

    @property
    def is_kept(self) -> bool:
        """Whether there is a store: without one a message becomes a dead letter at once."""
        return self._store is not None

    def store(self, message: Message, failures: int, reason: str) -> bool:
        """Keep the contents; False where there is no room. Durability: on disk when this returns True."""
        return self._store is not None and self._store.put(Stored(self._group, message, failures, reason))

    def forget(self, message: Message, log: Any) -> None:
        """It was dealt with. A row that stays is stale, and goes when the partition is assigned the next time."""
        if self._store is None:
            return
        try:
            self._store.remove(self._group, message.topic, message.partition, message.offset)
        except StorageError as error:
            log.warning("retry store: a message that was dealt with could not be removed", error=repr(error))

    def take_over(self, tracker: Tracker, text: str | None, log: Any) -> None:
        """A partition was assigned: its messages aside are ours to retry. Before the tracker is used."""
        tracker.aside = {at: waiting for at, waiting in parsed(text).items() if at < tracker.position}
        tracker.aside_saved = text
        topic, partition = tracker.slot
        kept = self._store.partition(self._group, topic, partition) if self._store is not None else {}
        for offset, stored in kept.items():
            waiting = tracker.aside.get(offset)
            if waiting is None:
                self.forget(stored.message, log)
            else:
                waiting.message = stored.message

    def fetch_missing(self, tracker: Tracker, log: Any, is_current: Callable[[], bool]) -> None:
        """Fetch from the broker, in a thread, what the store has not; once the tracker is in use."""
        missing = [offset for offset, waiting in tracker.aside.items() if waiting.message is None]
        if missing:
            start_daemon("txmq-aside", lambda: self._fetch(tracker, missing, log, is_current))

    def _fetch(self, tracker: Tracker, offsets: list[int], log: Any, is_current: Callable[[], bool]) -> None:
        for offset in offsets:
            while is_current():
                try:
                    found = self._client.fetch(*tracker.slot, offset, FETCH_SIZE_BYTES, FETCH_AGAIN_S)
                except ClosedError:
                    return
                except OffsetOutOfRangeError:
                    self._gone(tracker, offset, log)
                    break
                except TxmqError as error:
                    log.warning("a message set aside could not be fetched; it is tried again", error=repr(error))
                    self._client.clock.sleep(FETCH_AGAIN_S)
                    continue
                if found:
                    self._fetched(tracker, found[0], log)
                    break

    def _fetched(self, tracker: Tracker, message: Message, log: Any) -> None:
        waiting = tracker.aside.get(message.offset)
        if waiting is None:
            return
        try:
            self.store(message, waiting.failures, "taken over")
        except StorageError as error:
            log.warning("retry store: contents stay with the broker alone", error=repr(error))
        with self._changed:
            waiting.message = message
            self._changed.notify_all()

    def _gone(self, tracker: Tracker, offset: int, log: Any) -> None:
        log.error(
            "a message set aside was gone before it was consumed", topic=tracker.slot[0], partition=tracker.slot[1],
            offset=offset,
        )  # fmt: skip
        with self._changed:
            tracker.aside.pop(offset, None)

    def bury(self, message: Message, failures: int, reason: str) -> None:
        """Send it to the dead-letter topic. Raises TxmqError where that fails."""
        topic = self._dead_letters
        headers = {
            **message.headers, "txmq.dead.reason": reason.encode()[:1000], "txmq.dead.topic": message.topic.encode(),
            "txmq.dead.partition": b"%d" % message.partition, "txmq.dead.offset": b"%d" % message.offset,
            "txmq.dead.attempts": b"%d" % failures, "txmq.dead.member": self._member.encode(),
        }  # fmt: skip
        if self._producer is None:
            self._client.topics.ensure(topic)
            self._producer = self._client.producer()
        send = partial(self._producer.send, key=message.key, headers=headers, tag=message.tag)
        # In a context of its own: a transaction's block that rolls back later must not take it along.
        Context().run(send, topic, message.value or b"")

    def close(self) -> None:
        """Let go of the store and the producer."""
        if self._producer is not None:
            self._producer.close()
        if self._store is not None:
            self._store.close()
