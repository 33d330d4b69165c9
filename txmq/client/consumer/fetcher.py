"""Fetches for a consumer: keeps a ``get`` open at the broker for every partition that has room.

Theory of operation. Requests go out from whatever thread makes room; one thread of its own reads the answers (a
connection that nobody else uses), decodes them and puts the messages into the partitions' buffers (``tracker``). Each
get has a number: an answer that ``seek`` or the loss of the partition has overtaken is dropped.

Invariants:
    * one get a partition at a time, and none where the partition's share of the buffer is full;
    * an error costs the partition a pause, never the others; an offset that is gone is told, and the oldest message
      there is comes next;
    * what is sound is delivered up to the damage, and nothing of or behind it; an error that stays is told each minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from txmq.client.consumer.partition import Slot, Tracker
from txmq.client.reading import DAMAGED
from txmq.client.transport.connection import Connection, Waiter
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import (
    ClosedError,
    ConnectionLostError,
    InvalidBatchError,
    OffsetOutOfRangeError,
    TxmqError,
    broker_error,
)
from txmq.log import records
from txmq.runtime.threads import Condition, start_daemon

FETCH_WAIT_MS = 1000
FETCH_SIZE_BYTES_MIN = 64 << 10
FETCH_AGAIN_S = 0.2  # after an error
FETCH_DAMAGED_S = 5.0  # where the same bytes failed twice: each look reads up to the partition's share of the buffer
TOLD_AGAIN_S = 60.0


class _Fetch:
    """One ``get`` on its way; ``link.Pending``."""

    __slots__ = ("fetching", "number", "tracker")

    def __init__(self, fetching: Fetching, tracker: Tracker, number: int) -> None:
        self.fetching, self.tracker, self.number = fetching, tracker, number

    def answered(self, code: int, body: bytes) -> None:
        self.fetching.answered(self.tracker, self.number, code, body)

    def lost(self, error: TxmqError) -> None:
        self.fetching.failed(self.tracker, self.number, error)


class Fetching:
    """See the module's docstring; ``changed`` guards ``trackers``, told of messages. Thread safety: any thread."""

    def __init__(
        self, client: Any, connection: ReconnectingConnection, changed: Condition, trackers: dict[Slot, Tracker],
        buffer_size_bytes: int,
    ) -> None:  # fmt: skip
        self._client, self._connection, self._clock = client, connection, client.clock
        self._changed, self._trackers, self._buffer_size_bytes = changed, trackers, buffer_size_bytes
        self._waiter, self._numbers, self._is_closed = Waiter(), 0, False
        self._log: Any = None

    def start(self, log: Any) -> None:
        """Start the thread."""
        self._log = log
        start_daemon("txmq-fetch", self._run)

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        self._connection.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                link = self._connection.link(self._clock.monotonic() + self._client.timeout)
            except ClosedError:
                return
            except ConnectionLostError:
                self._clock.sleep(FETCH_AGAIN_S)
                continue
            self.more(link)
            link.wait(self._waiter, self._clock.monotonic() + FETCH_AGAIN_S)

    def more(self, link: Connection | None = None) -> None:
        """Ask for more where there is room; any thread. Without a link the fetching thread does it soon."""
        try:
            link = link or self._connection.live
            if link is None:
                return
            for tracker, number in self._to_fetch():
                size = max(FETCH_SIZE_BYTES_MIN, self._share_bytes() // 2)
                try:
                    link.start(
                        _Fetch(self, tracker, number), "get", *tracker.slot, tracker.next_fetch, size,
                        extensions={"wait": FETCH_WAIT_MS},
                    )  # fmt: skip
                except TxmqError as error:
                    self.failed(tracker, number, error)
        except ClosedError:
            return

    def _share_bytes(self) -> int:
        return self._buffer_size_bytes // max(1, len(self._trackers))

    def _to_fetch(self) -> Sequence[tuple[Tracker, int]]:
        found = []
        with self._changed:
            now, share = self._clock.monotonic(), self._share_bytes()
            for tracker in self._trackers.values():
                if tracker.wants_more(now, share):
                    self._numbers += 1
                    tracker.fetch = self._numbers
                    found.append((tracker, tracker.fetch))
        return found

    def answered(self, tracker: Tracker, number: int, code: int, body: bytes) -> None:
        """For ``_Fetch``; in whatever thread reads."""
        if code != 200:
            self.failed(tracker, number, broker_error(code, body))
            return
        topic, partition = tracker.slot
        try:
            topic_id = self._client.topics.known(topic).topic_id if body else 0
        except TxmqError as error:
            self.failed(tracker, number, error)
            return
        messages, damage = records.decode_sound(body, topic, partition, topic_id=topic_id) if body else ([], None)
        if damage is not None and (not messages or messages[-1].offset < tracker.next_fetch):
            self._client.topics.forget(topic)  # it may have been made anew: another id is stamped into what it holds
            self.failed(tracker, number, damage)
            return
        with self._changed:
            if tracker.fetched(number, messages) and messages:
                self._changed.notify_all()
        self.more()

    def failed(self, tracker: Tracker, number: int, error: TxmqError) -> None:
        """For ``_Fetch``."""
        text, is_damaged = str(error), False
        with self._changed:
            if isinstance(error, InvalidBatchError):
                text = f"at offset {tracker.next_fetch}: {text}"
                if (tracker.fetch_error or "").startswith(text):
                    text, is_damaged = f"{text}; {DAMAGED}", True  # the topic's id, too, has been asked for anew
            now = self._clock.monotonic()
            if not tracker.failed(number, now + (FETCH_DAMAGED_S if is_damaged else FETCH_AGAIN_S)):
                return
            is_told = text == tracker.fetch_error and now < tracker.fetch_told + TOLD_AGAIN_S
            tracker.fetch_error = text
            if not is_told:
                tracker.fetch_told = now
            topic, partition = tracker.slot
            if isinstance(error, OffsetOutOfRangeError):
                offset = tracker.next_fetch
                start_daemon("txmq-out-of-range", lambda: self._go_to_start(tracker, offset))
        if not (self._is_closed or is_told):
            self._log.warning("fetch failed; it is tried again", topic=topic, partition=partition, error=text)

    def _go_to_start(self, tracker: Tracker, offset: int) -> None:
        """Retention has passed the position (or the log was replaced): go on with the oldest message there is."""
        try:
            held = self._client.offsets(*tracker.slot)
        except TxmqError:
            return  # asked again when the next fetch fails
        with self._changed:
            # Else it went on meanwhile: the end that was told may be behind it, and all would come again.
            if tracker.next_fetch == offset and not held.start <= offset <= held.end:
                skipped = held.start - offset
                self._log.error(
                    "messages were gone before they were consumed", topic=tracker.slot[0], partition=tracker.slot[1],
                    skipped=skipped, now_at=held.start,
                )  # fmt: skip
                if skipped > 0:
                    tracker.skip_to(held.start)
                else:
                    tracker.seek(held.start)
