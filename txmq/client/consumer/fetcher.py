"""Fetches for a consumer from one home: keeps a ``get`` open there for every partition that has room.

Theory of operation. The thread that makes room sends the request. One thread waits for the answers on a connection of
its own, checks them and gives them to their partitions (``ReadAhead``); not while they are being read, because it may
have to ask for the topic. Each get has a number: the answer is dropped if
``seek`` or the loss of the partition has overtaken it.

Invariants:
    * one get a partition at a time, and none while the partition's share of the buffer is full;
    * an error costs the partition a pause, never the others, and the thread survives it; an offset that is gone is
      logged, and the oldest message there is comes next;
    * sound batches are delivered up to the damage, and nothing of it or after it; an error that stays is logged each
      minute;
    * ``pass_unreadable``: a batch that is whole and in its place, and cannot be read twice, is passed over once all
      before it was delivered and it is a dead letter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.options import FETCH_SIZE_BYTES_MIN
from txmq.client.transport.connection import Connection, Waiter
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import (
    ClosedError,
    ConnectionLostError,
    InvalidBatchError,
    NotOwnerError,
    OffsetOutOfRangeError,
    StaleLogError,
    TxmqError,
    UnavailableError,
)
from txmq.log import records
from txmq.log.records import DAMAGED, RawBatch
from txmq.model import Message, TopicPartition
from txmq.protocol.answers import broker_error
from txmq.runtime.logging import Logger
from txmq.runtime.threads import Condition, start_daemon

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.read_place import ReadPlace

FETCH_WAIT_MS = 1000
FETCH_AGAIN_S = 0.2  # after an error
NEVER = float("inf")
FETCH_DAMAGED_S = 5.0  # if the same bytes failed twice: each try reads up to the partition's share of the buffer
REPORTED_AGAIN_S = 60.0
LookAgain = Callable[[ConsumedPartition], None]  # for the log of a partition, if no group has it
Unreadable = Callable[[TopicPartition, RawBatch, str], None]  # makes a dead letter of a batch, because of ...


class _Fetch:
    """One ``get`` on its way; ``connection.Pending``."""

    __slots__ = ("consumed", "fetching", "number")

    def __init__(self, fetching: ConsumerFetcher, consumed: ConsumedPartition, number: int) -> None:
        self.fetching, self.consumed, self.number = fetching, consumed, number

    def answered(self, code: int, body: bytes) -> None:
        self.fetching.arrived(self.consumed, self.number, code, body)

    def lost(self, error: TxmqError) -> None:
        self.fetching.failed(self.consumed, self.number, error)


class ConsumerFetcher:
    """See the module's docstring. Thread safety: any thread.

    Attributes:
        look_again: finds out where a partition goes on whose log is another one than it was; None if a group does.
        place: chooses the process that is asked; None: there is no choice.
    """

    look_again: LookAgain | None
    place: ReadPlace | None

    def __init__(
        self, client: Client, connection: ReconnectingConnection, changed: Condition,
        partitions: dict[TopicPartition, ConsumedPartition], buffer_size_bytes: int, log: Logger, home: int = 0,
        unreadable: Unreadable | None = None,
    ) -> None:  # fmt: skip
        self._client, self._connection, self._clock, self._log = client, connection, client.clock, log
        self._changed, self._partitions, self._buffer_size_bytes = changed, partitions, buffer_size_bytes
        self._home, self._waiter, self._numbers, self._is_closed = home, Waiter(), count(1), False
        self._unreadable, self.look_again = unreadable, None
        self.place, self._is_moving = None, False
        self._asked_at = dict[int, float]()  # of gets that are open, where there is a choice
        self._arrived: deque[tuple[ConsumedPartition, int, int, bytes]] = deque()

    def start(self) -> None:
        """Start the thread that reads answers."""
        start_daemon("txmq-fetch", self._run)

    def close(self) -> None:
        """End the thread and the connection."""
        self._is_closed = True
        self._connection.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection = self._connection.connect(self._clock.monotonic() + self._client.timeout)
            except ClosedError:
                return
            except ConnectionLostError:
                self._clock.sleep(FETCH_AGAIN_S)
                continue
            try:
                self.more(connection)
                if not self._arrived:
                    connection.wait(self._waiter, self._clock.monotonic() + FETCH_AGAIN_S)
                self._take_arrived()
                if self.place is not None and self.place.should_move(connection, self._oldest_asked_at()):
                    self._move()
            except Exception as error:  # noqa: BLE001  memory is short, a defect; the connection has failed
                self._log.error("the fetching thread failed; it goes on", error=repr(error), exc_info=error)
                self._clock.sleep(FETCH_AGAIN_S)

    def more(self, connection: Connection | None = None) -> None:
        """Send a get for each partition that has room. Without a live connection the fetching thread does so soon."""
        try:
            connection = connection or self._connection.live
            if connection is None:
                return
            for consumed in self._with_room():
                self._fetch(connection, consumed)
        except ClosedError:
            return

    def _move(self) -> None:
        """Ask another process from now on; nothing is wrong with gets that are lost by it."""
        self._is_moving = True
        try:
            self._connection.rest()
        finally:
            self._is_moving = False

    def _oldest_asked_at(self) -> float | None:
        with self._changed:
            return min(self._asked_at.values(), default=None)

    def _fetch(self, connection: Connection, consumed: ConsumedPartition) -> None:
        number, size = next(self._numbers), max(FETCH_SIZE_BYTES_MIN, self._share_bytes() // 2)
        try:
            if self._is_begun(consumed, number):
                connection.start(
                    _Fetch(self, consumed, number), "get", *consumed.slot, consumed.next_fetch, size,
                    extensions={"wait": FETCH_WAIT_MS, **({} if consumed.log is None else {"log": consumed.log.log})},
                )  # fmt: skip
        except TxmqError as error:
            self.failed(consumed, number, error)
        except BaseException:  # an interrupt of the application's thread: perhaps nothing was sent, or will be answered
            self.failed(consumed, number, ConnectionLostError("interrupted"))
            raise

    def _share_bytes(self) -> int:
        return self._buffer_size_bytes // max(1, len(self._partitions))

    def _with_room(self) -> Sequence[ConsumedPartition]:
        with self._changed:
            now, share = self._clock.monotonic(), self._share_bytes()
            ours = (consumed for consumed in self._partitions.values() if consumed.home == self._home)
            return [consumed for consumed in ours if consumed.wants_more(now, share)]

    def _is_begun(self, consumed: ConsumedPartition, number: int) -> bool:
        with self._changed:
            if not consumed.wants_more(self._clock.monotonic(), self._share_bytes()):
                return False  # another thread was faster
            consumed.fetch = number
            if self.place is not None:
                self._asked_at[number] = self._clock.monotonic()
            return True

    def arrived(self, consumed: ConsumedPartition, number: int, code: int, body: bytes) -> None:
        """Keep an answer for the fetching thread; called by the thread that reads."""
        self._arrived.append((consumed, number, code, body))
        self._waiter.nudge()

    def _take_arrived(self) -> None:
        self._waiter.nudged = False  # before it is looked for
        while self._arrived:
            consumed, number, code, body = self._arrived.popleft()
            try:
                self.answered(consumed, number, code, body)
            except BaseException:
                self.failed(consumed, number, ConnectionLostError("the answer could not be taken"))
                raise

    def answered(self, consumed: ConsumedPartition, number: int, code: int, body: bytes) -> None:
        """Buffer the messages of an answer."""
        self._asked_at.pop(number, None)
        if code != 200:
            error = broker_error(code, body)
            if self.place is not None and isinstance(error, UnavailableError | NotOwnerError):
                self.place.refused()
            self.failed(consumed, number, error)
            return
        topic, partition = consumed.slot
        try:
            topic_id = self._client.topics.known(topic).topic_id if body else 0
        except TxmqError as error:
            self.failed(consumed, number, error)
            return
        batches, damage = records.sound_batches(body, topic, partition, topic_id=topic_id)
        messages: list[Message] = []
        unreadable: RawBatch | None = None
        if batches:
            try:
                messages = records.decode_batch(batches[0], topic, partition)
            except InvalidBatchError as error:
                unreadable, batches, damage = batches[0], [], error
        if damage is not None and (not messages or messages[-1].offset < consumed.next_fetch):
            self._client.topics.forget(topic)  # it may have been made anew: another id is stamped into what it holds
            self.failed(consumed, number, damage, unreadable)
            return
        with self._changed:
            if consumed.fetched(number, messages, batches[1:]) and messages:
                self._changed.notify_all()
        self.more()

    def failed(
        self, consumed: ConsumedPartition, number: int, error: TxmqError, unreadable: RawBatch | None = None
    ) -> None:
        """Note that a get failed, and when the next one may go out.

        Args:
            unreadable: the batch that is whole and cannot be read, if that is the error.
        """
        text, is_damaged = str(error), False
        with self._changed:
            self._asked_at.pop(number, None)
            if isinstance(error, InvalidBatchError):
                text = f"at offset {consumed.next_fetch}: {text}"
                if (consumed.fetch_error or "").startswith(text):
                    text, is_damaged = f"{text}; {DAMAGED}", True  # the topic's id, too, has been asked for anew
            now = self._clock.monotonic()
            if not consumed.failed(number, now + (FETCH_DAMAGED_S if is_damaged else FETCH_AGAIN_S)):
                return
            if is_damaged and unreadable is not None and self._unreadable is not None and consumed.ahead.is_empty:
                consumed.fetch_at = NEVER  # until it is dealt with
                start_daemon(
                    "txmq-unreadable", partial(self._pass_over, consumed, unreadable, str(error), self._unreadable)
                )
            is_reported = text == consumed.fetch_error and now < consumed.fetch_reported + REPORTED_AGAIN_S
            consumed.fetch_error = text
            if not is_reported:
                consumed.fetch_reported = now
            topic, partition = consumed.slot
            if isinstance(error, StaleLogError):
                is_reported = True  # a broker that has started: the member's next view has the log as it is now
                if self.look_again is not None:
                    start_daemon("txmq-stale-log", partial(self._look, consumed, self.look_again))
            if isinstance(error, OffsetOutOfRangeError):
                offset = consumed.next_fetch
                start_daemon("txmq-out-of-range", lambda: self._go_to_start(consumed, offset))
        if not (self._is_closed or self._is_moving or is_reported):
            self._log.warning("fetch failed; it is tried again", topic=topic, partition=partition, error=text)

    def _pass_over(
        self, consumed: ConsumedPartition, batch: RawBatch, reason: str, dead_letter: Unreadable
    ) -> None:  # fmt: skip
        """Make a dead letter of a batch, and go on after it."""
        again_at = 0.0
        try:
            dead_letter(consumed.slot, batch, reason)
        except TxmqError as error:
            again_at = self._clock.monotonic() + FETCH_DAMAGED_S
            self._log.warning(
                "dead letter could not be stored; it is tried again", topic=consumed.slot[0],
                partition=consumed.slot[1], error=repr(error),
            )  # fmt: skip
        finally:
            with self._changed:
                is_there = batch.base_offset <= consumed.next_fetch < batch.end_offset and consumed.ahead.is_empty
                if is_there and not again_at:  # else a seek came first
                    consumed.pass_over(batch.end_offset)
                elif consumed.fetch_at == NEVER:
                    consumed.fetch_at = again_at
        self.more()

    def _look(self, consumed: ConsumedPartition, look_again: LookAgain) -> None:
        with suppress(TxmqError):  # asked again when the next fetch fails
            look_again(consumed)

    def _go_to_start(self, consumed: ConsumedPartition, offset: int) -> None:
        """Retention has passed the position (or the log was replaced): go on with the oldest message there is."""
        try:
            held = self._client.offsets(*consumed.slot)
        except TxmqError:
            return  # asked again when the next fetch fails
        with self._changed:
            # Else it went on meanwhile: the end in that answer may be before it, and all would come again.
            if consumed.next_fetch == offset and not held.start <= offset <= held.end:
                skipped = held.start - offset
                self._log.error(
                    "messages were gone before they were consumed", topic=consumed.slot[0], partition=consumed.slot[1],
                    skipped=skipped, now_at=held.start,
                )  # fmt: skip
                if skipped > 0:
                    consumed.skip_to(held.start)
                else:
                    consumed.seek(held.start)
