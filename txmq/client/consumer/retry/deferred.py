"""What a consumer does with messages that fail: deferred, retried later, dead-lettered in the end.

Theory of operation. A message that failed ``max_retries`` times in place is deferred. Its content is stored
(``retry_store`` or ``RetryTopic``), its offset is noted in the ``ConsumedPartition``, then it is acknowledged, so that
the partition moves on. The note is saved with the group's offset (``deferred``) and decides: JSON ``[[offset,
failures, CRC of the key or null, copy], ...]`` of offsets below the saved one, with ``copy`` if the content is in the
retry topic.
Only the owner of the partition delivers these messages again, each after a pause that grows, and makes them dead
letters (``dead_letters``) after ``deferred_retries`` more failures. A new owner takes contents from its own store, and
from the log what its store does not have.

Invariants:
    * store, then acknowledge, then save: a process that dies in between has the message delivered again;
    * acknowledge, then save, then remove from the store: what the group names is stored somewhere;
    * a saved text that cannot be read is logged, and stays: its partition is not consumed;
    * one partition has at most ``DEFERRED_MESSAGES_MAX`` deferred messages.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from txmq.client.consumer.consumed_partition import ConsumedPartition, Waiting
from txmq.client.consumer.retry.dead_letters import DeadLetters, LogAt
from txmq.client.consumer.retry.retry_store import RetryStore, RetryTopic, Stored
from txmq.errors import ClosedError, OffsetOutOfRangeError, StorageError, TxmqError
from txmq.model import Message, TopicPartition
from txmq.runtime.logging import Logger
from txmq.runtime.threads import Condition, off_loop, start_daemon

if TYPE_CHECKING:
    from txmq.client.client import Client

DEFERRED_S_MAX = 600.0
FAILURES_MAX = 99_999  # that are written: the text is bounded
FETCH_AGAIN_S = 0.2
READ_AGAIN_S = 1.0
FETCH_SIZE_BYTES = 64 << 10
IN_TOPIC = "topic"


class Store(Protocol):
    """Keeps the contents of deferred messages."""

    def put(self, rows: Sequence[Stored]) -> list[int | None] | None:
        """Keep contents, all or none; the ``copy`` of each, None if there is no room. Durable when this returns."""

    def update(self, row: Stored) -> None:
        """Note that a kept message failed again."""

    def remove(self, group: str, topic: str, partition: int, offset: int) -> bool:
        """Forget a message; whether it was there."""

    def partition(self, group: str, topic: str, partition: int) -> dict[int, Stored]:
        """The contents of one partition, by offset."""

    def close(self) -> None:
        """Close the store."""


def open_store(client: Client, group: str, member: str, where: str | None) -> Store | None:
    """The store of ``client.consumer(retry_store=)``.

    Raises:
        StorageError: the file cannot be opened.
    """
    if where is None:
        return None
    return RetryTopic(client, group, member) if where == IN_TOPIC else off_loop(lambda: RetryStore(where))


def deferred_text(consumed: ConsumedPartition) -> str | None:
    """The text to save with the position: deferred messages below it. Others are delivered again anyway."""
    return text_of((at, waiting) for at, waiting in sorted(consumed.deferred.items()) if at < consumed.position)


def deferred_text_with(consumed: ConsumedPartition, offset: int, owner: object) -> str | None:
    """The text to save with an offset of a transaction, without the messages that the transaction acknowledges."""
    dealt = {at for at, pending_ack in consumed.pending_acks.items() if pending_ack.owner is owner}
    rows = sorted(consumed.deferred.items())
    return text_of((at, waiting) for at, waiting in rows if at < offset and at not in dealt)


def text_of(deferred: Iterable[tuple[int, Waiting]]) -> str | None:
    """Encode deferred messages; None for none."""
    rows = []
    for offset, waiting in deferred:
        row = [offset, min(waiting.failures, FAILURES_MAX), waiting.key_crc]
        rows.append(row if waiting.copy is None else [*row, waiting.copy])
    return json.dumps(rows, separators=(",", ":")) if rows else None


def parsed(text: str | None) -> dict[int, Waiting]:
    """The reverse, without contents and due at once. Text that is not ours is an error, never passed over.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        rows = json.loads(text) if text else []
        return {int(row[0]): _waiting(*row[1:]) for row in rows}
    except (TypeError, ValueError, IndexError) as error:
        raise StorageError(f"what the group has deferred cannot be read: {str(text)[:100]!r}") from error


def _waiting(failures: int, key_crc: int | None, copy: int | None = None) -> Waiting:
    return Waiting(None, int(failures), key_crc if key_crc is None else int(key_crc), copy=copy)


class DeferredMessages:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(
        self,
        client: Client,
        group: str,
        store: Store | None,
        dead_letters: DeadLetters,
        changed: Condition,
        log: Logger,
        log_at: LogAt = lambda *_: "",
    ) -> None:
        self._log_at = log_at
        self._client, self._group, self._store, self.dead_letters = client, group, store, dead_letters
        self._changed, self._log = changed, log

    # --- contents ----------------------------------------------------------------------------------------------------

    def store(self, messages: Sequence[Message], failures: int, reason: str) -> list[int | None] | None:
        """Keep contents, all or none; the ``copy`` of each, None where there is no room.

        Raises:
            TxmqError: the disk or the broker refused.

        Durability: stored when this returns.
        """
        if self._store is None:
            return None
        return self._store.put([self._stored(message, failures, reason) for message in messages])

    def update(self, message: Message, failures: int, reason: str) -> None:
        """Note that a deferred message failed again. Raises as ``store``."""
        if self._store is not None:
            self._store.update(self._stored(message, failures, reason))

    def _stored(self, message: Message, failures: int, reason: str) -> Stored:
        log = self._log_at((message.topic, message.partition), message.offset)
        return Stored(self._group, message, failures, reason, log)

    def remove(self, slot: TopicPartition, offsets: Iterable[int]) -> None:
        """Remove contents that the group no longer names; a row that stays is stale, and goes later."""
        try:
            for offset in offsets:
                if self._store is not None:
                    self._store.remove(self._group, *slot, offset)
        except StorageError as error:
            self._log.warning("retry store: a message that was dealt with could not be removed", error=repr(error))

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    # --- a partition is assigned -------------------------------------------------------------------------------------

    def take_over(self, consumed: ConsumedPartition, text: str | None) -> None:
        """Read a partition's deferred messages, before it is consumed; if they cannot be read, it is not ready."""
        consumed.deferred_saved = text
        try:
            self._read(consumed, text)
        except StorageError as error:
            consumed.is_ready, consumed.stopped = False, str(error)
            self._log.error(
                "what is deferred cannot be read: the partition is not consumed; see txmq retry list",
                topic=consumed.slot[0], partition=consumed.slot[1], error=str(error),
            )  # fmt: skip

    def _read(self, consumed: ConsumedPartition, text: str | None) -> None:
        named = parsed(text)
        if max(named, default=-1) >= consumed.position:
            # A reset went back: messages from there on come again from the log, if the log still has them.
            consumed.skip_to(max(consumed.position, self._log_start(consumed)))
        consumed.deferred = {at: waiting for at, waiting in named.items() if at < consumed.position}
        kept = self._store.partition(self._group, *consumed.slot) if self._store is not None else {}
        self.remove(consumed.slot, kept.keys() - consumed.deferred.keys())
        for offset, waiting in consumed.deferred.items():
            known = kept.get(offset)
            is_same = known is not None and consumed.log is not None and known.log == consumed.log.log_at(offset)
            waiting.message = known.message if known is not None and is_same else None

    def _log_start(self, consumed: ConsumedPartition) -> int:
        try:
            return int(self._client.offsets(*consumed.slot).start)
        except StorageError:
            raise
        except TxmqError as error:
            raise StorageError(f"where the log begins is not known: {error}") from error

    def go_on(self, consumed: ConsumedPartition, is_current: Callable[[], bool], has_room: Callable[[], bool]) -> None:
        """Read, in a thread, what ``take_over`` could not; once the partition is consumed.

        Args:
            is_current: whether the partition is still ours, under the same generation.
            has_room: whether more contents may be held in memory now.
        """
        if not consumed.is_ready or self._missing(consumed):
            start_daemon("txmq-deferred", lambda: self._go_on(consumed, is_current, has_room))

    def _missing(self, consumed: ConsumedPartition) -> list[int]:
        with self._changed:
            return [offset for offset, waiting in consumed.deferred.items() if waiting.message is None]

    def _go_on(self, consumed: ConsumedPartition, is_current: Callable[[], bool], has_room: Callable[[], bool]) -> None:
        while not consumed.is_ready and is_current():
            self._client.clock.sleep(READ_AGAIN_S)
            try:
                self._read(consumed, consumed.deferred_saved)
            except StorageError as error:
                consumed.stopped = str(error)
                continue
            with self._changed:
                consumed.is_ready, consumed.stopped = True, None
                self._changed.notify_all()
        missing = deque(self._missing(consumed))
        failed = 0  # in a row; one that cannot be fetched holds up no other
        while missing and is_current():
            try:
                if has_room() and self._is_fetched(consumed, missing[0]):
                    missing.popleft()
                    failed = 0
                    continue
            except ClosedError:
                return
            except TxmqError as error:
                self._log.warning(
                    "a deferred message could not be fetched; it is tried again", topic=consumed.slot[0],
                    partition=consumed.slot[1], offset=missing[0], error=repr(error),
                )  # fmt: skip
            missing.rotate(-1)
            failed += 1
            if failed >= len(missing):
                self._client.clock.sleep(FETCH_AGAIN_S)

    def _is_fetched(self, consumed: ConsumedPartition, offset: int) -> bool:
        waiting = consumed.deferred.get(offset)
        if waiting is None:
            return True
        try:
            found = self._client.fetch(*consumed.slot, offset, FETCH_SIZE_BYTES, FETCH_AGAIN_S)
        except OffsetOutOfRangeError:
            copied = self._copied(consumed, offset, waiting)
            if copied is None:
                self._gone(consumed, offset, waiting)
                return True
            found = [copied]
        if not found:
            return False
        if waiting.copy is None:
            self._keep(found[0], waiting)
        with self._changed:
            waiting.message = found[0]
            self._changed.notify_all()
        return True

    def _copied(self, consumed: ConsumedPartition, offset: int, waiting: Waiting) -> Message | None:
        if waiting.copy is None:
            return None
        log = "" if consumed.log is None else consumed.log.log_at(offset)
        return RetryTopic(self._client, self._group, "").read(*consumed.slot, offset, waiting.copy, log)

    def _keep(self, message: Message, waiting: Waiting) -> None:
        try:
            copies = self.store([message], waiting.failures, "taken over")
        except TxmqError as error:
            self._log.warning("retry store: contents stay in the log alone", error=repr(error))
            return
        if copies is not None:
            waiting.copy = copies[0]

    def _gone(self, consumed: ConsumedPartition, offset: int, waiting: Waiting) -> None:
        self._log.error(
            "the content of a deferred message is gone; a dead letter says which", topic=consumed.slot[0],
            partition=consumed.slot[1], offset=offset,
        )  # fmt: skip
        self.dead_letters.dead_letter_gone(consumed.slot, offset, waiting.failures)
        with self._changed:
            consumed.forget_deferred(offset)
            self._changed.notify_all()
