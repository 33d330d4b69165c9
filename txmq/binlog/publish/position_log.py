"""The topic that has the positions, and the group whose saved offset says which one holds.

Theory of operation. Each txmq transaction writes one position message, and acknowledges the one before it: the saved
offset is that of the newest message, always. The reader is the group's member that has the topic's one partition. A
second one stands by, and takes over with a new generation. The broker refuses the former one's transaction then.

A position goes out with messages, in one txmq transaction (``PositionCommits``), until what became of it is known: if
the outcome is not known, the log says it; a transaction that was rolled back is sent again, the same messages. A broker
that is away is waited for (``BrokerWait``): the binlog keeps what is not published.

A start creates the topic, writes the first message, and creates the parked topic, in this order. So a position topic
that is missing or empty while there is a parked topic was deleted, and is no first start.

Invariants:
    * what the log says is what is published: after an end of a transaction that was not seen, it is read again;
    * only transactions that save the group's offset write positions; any number of first messages may lie between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from txmq.binlog.config import BinlogSettings, PublishSettings
from txmq.binlog.errors import BinlogError, ReaderFencedError
from txmq.binlog.publish.change_messages import Outgoing
from txmq.binlog.publish.published import GENESIS, Published, read_published
from txmq.client import Client
from txmq.client.consumer.consumer import ConsumerOptions
from txmq.client.transaction.block import Transaction
from txmq.errors import (
    BadRequestError,
    DeliveryUnknownError,
    FencedError,
    InvalidBatchError,
    InvalidNameError,
    OutcomeUnknownError,
    RequestTimeoutError,
    RolledBackError,
    TooLargeError,
    TransactionStateError,
    TxmqError,
    UnknownGroupError,
    UnknownTopicError,
)
from txmq.model import Message
from txmq.runtime.backoff import Backoff
from txmq.runtime.caller import host_name
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.ports import Clock

T = TypeVar("T")
PAUSE_S = Backoff(0.05, 1.0)
POLL_S = 0.25
_SEGMENT_SIZE_BYTES = 8 << 20
_RETENTION_SIZE_BYTES = 64 << 20  # by size alone: the newest message always stays
_NAME_LENGTH_MAX = 100
_FINAL = (TooLargeError, UnknownTopicError, BadRequestError, InvalidNameError, InvalidBatchError)


# --- a broker that is away --------------------------------------------------------------------------------------------


class BrokerWait:
    """Asks again, with longer and longer pauses, until the broker answers. Thread safety: any thread.

    Args:
        is_stopped: the reader must end: the last error is raised.
    """

    def __init__(self, clock: Clock, is_stopped: Callable[[], bool]) -> None:
        self._clock, self._is_stopped = clock, is_stopped
        self._sparingly = Sparingly(get_logger(), clock)

    def answer(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns, however long that takes.

        Raises:
            TxmqError: an error that asking again does not mend.
        """
        pause_s = PAUSE_S.first
        while True:
            try:
                return ask()
            except TxmqError as error:
                if not error.retriable or self._is_stopped():
                    raise
                self.say(error)
            self._clock.sleep(pause_s)
            pause_s = PAUSE_S.following(pause_s)

    def say(self, error: TxmqError) -> None:
        """Log it, not too often."""
        self._sparingly.warning("waiting for the broker", error=str(error))


# --- the log ----------------------------------------------------------------------------------------------------------


def member_name() -> str:
    """The reader's name in the group: one that is started again on its machine takes over at once."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", host_name())[:_NAME_LENGTH_MAX].lstrip(".-") or "reader"


def position_at(client: Client, settings: BinlogSettings, offset: int) -> Published | None:
    """The position at an offset; None if there is none, or no topic.

    Raises:
        BinlogError: another program writes into the topic.
        TxmqError: the broker is away.
    """
    topic = settings.position_topic
    try:
        messages = client.fetch(topic, 0, max(offset, 0)) if offset >= 0 else []
    except UnknownTopicError:
        return None
    return read_published(messages[0].value, f"message {offset} of {topic}") if messages else None


def newest_position(client: Client, settings: BinlogSettings) -> Published | None:
    """The newest position; None if there is none, or no topic. Raises as ``position_at``."""
    try:
        return position_at(client, settings, client.offsets(settings.position_topic, 0).end - 1)
    except UnknownTopicError:
        return None


class PositionLog:
    """The log of one reader, which is the member of its group. Used by one thread.

    Args:
        settings: name and group.
        is_stopped: the reader must end; waits end with it.

    Raises:
        BinlogError: the topic was deleted.
        TxmqError: the broker is away.
    """

    def __init__(self, client: Client, settings: BinlogSettings, is_stopped: Callable[[], bool]) -> None:
        self._client, self._settings, self._is_stopped = client, settings, is_stopped
        self._topic = settings.position_topic
        self._held: list[Message] = []
        self._log = get_logger(group=settings.group)
        self._make_topic()
        options = ConsumerOptions(name=member_name(), session_timeout=settings.publish.session_timeout_ms / 1000)
        self._consumer = client.consumer(settings.group, [self._topic], options=options)

    def close(self) -> None:
        """Leave the group: one that stands by takes over at once."""
        self._consumer.close()

    # --- making it ---------------------------------------------------------------------------------------------------

    def _make_topic(self) -> None:
        topics, missing = self._client.topics, not self._exists(self._topic)
        if missing:
            self._refuse_deleted()
            topics.ensure(
                self._topic, 1, retention_ms=None, retention_size_bytes=_RETENTION_SIZE_BYTES,
                segment_size_bytes=_SEGMENT_SIZE_BYTES,
            )  # fmt: skip
            crash_point("binlog.positions.created")

    def _begin(self) -> None:
        """Write the first message; the partition is ours."""
        self._refuse_deleted()
        with self._client.producer() as producer, suppress(DeliveryUnknownError):
            producer.send(self._topic, GENESIS)
        crash_point("binlog.positions.begun")

    def _refuse_deleted(self) -> None:
        if self._exists(self._settings.parked_topic):
            raise BinlogError(
                f"the positions of {self._settings.name!r} are gone: {self._topic} was deleted. To begin anew, "
                f"delete {self._settings.parked_topic} and the group {self._settings.group}, too"
            )

    def _exists(self, topic: str) -> bool:
        try:
            self._client.topics.refresh(topic)
        except UnknownTopicError:
            return False
        return True

    # --- reading it --------------------------------------------------------------------------------------------------

    @property
    def _is_ours(self) -> bool:
        return (self._topic, 0) in self._consumer.assignment

    def take(self) -> Published | None:
        """Wait until this is the reader; what is published then, None if nothing ever was.

        Raises:
            BinlogError: the topic does not hold what it must.
            TxmqError: the broker is away, or the consumer was closed.
        """
        is_said = False
        while not self._is_stopped():
            if not self._held:
                self._held = self._polled(POLL_S)
            if self._held:
                self._require_saved()
                newest = self._newest()
                self._client.topics.ensure(
                    self._settings.parked_topic, 1, retention_ms=None, retention_size_bytes=None
                )  # what is prepared may wait for longer than anything else is kept
                return newest
            held = self._client.offsets(self._topic, 0)
            if self._is_ours and held.end == 0:
                self._begin()
            elif not self._is_ours and not is_said and self._other() is not None:
                is_said = True
                self._log.info("another reader is at work: this one stands by", reader=self._other())
        return None

    def follow(self, expected: bytes) -> None:
        """Wait for the message that a committed transaction wrote: the next one acknowledges it.

        Raises:
            ReaderFencedError: as ``was_committed``.
        """
        self._held = []
        while not self._held or self._held[-1].value != expected:
            self._held += self._polled(POLL_S)
            if not self._held:
                self._refuse_fenced()
            if self._is_stopped():
                return

    def was_committed(self, before: str, expected: str, *, is_unknown: bool) -> bool:
        """What became of a transaction that failed, as the log says.

        Args:
            before: the id that held.
            expected: the one that the transaction wrote.
            is_unknown: its outcome was not seen; else it was rolled back, and what is held may be held still.

        Raises:
            ReaderFencedError: neither holds, or the partition is another reader's: it took over.
        """
        while not self._is_stopped():
            polled = self._polled(POLL_S if is_unknown or not self._is_ours else 0.0)
            if polled:
                self._held = polled
                newest = self._newest()
                found = "" if newest is None else newest.id
                if found not in (before, expected):
                    raise ReaderFencedError("another reader took over, and has published since; this one stops")
                return found == expected
            if self._is_ours and not is_unknown:
                return False
            self._refuse_fenced()
        return False

    def _refuse_fenced(self) -> None:
        if not self._is_ours and (other := self._other()) is not None:
            raise ReaderFencedError(f"another reader ({other}) took over; this one stops")

    def _polled(self, timeout: float) -> list[Message]:
        try:
            return self._consumer.poll(timeout=timeout)
        except FencedError as error:
            raise ReaderFencedError(f"another reader of this machine took over; this one stops ({error})") from None

    def _newest(self) -> Published | None:
        """Read on from what was delivered to the end; what the last position message says."""
        end = self._client.offsets(self._topic, 0).end
        while self._held[-1].offset + 1 < end and not self._is_stopped():
            self._held += self._polled(POLL_S)
        newest = None
        for message in self._held:
            newest = read_published(message.value, f"message {message.offset} of {self._topic}") or newest
        return newest

    def _require_saved(self) -> None:
        saved = next((row["offset"] for row in self._rows() if row["topic"] == self._topic), None)
        first = self._held[0].offset
        if first != (saved or 0):
            raise BinlogError(
                f"the position at offset {saved or 0} of {self._topic} is gone: the oldest there is at {first}. To "
                f"begin anew, delete {self._topic}, {self._settings.parked_topic} and the group {self._settings.group}"
            )

    def _other(self) -> str | None:
        """The member that has the partition, if it is not this one."""
        owner = next((row["owner"] for row in self._rows() if row["topic"] == self._topic), None)
        return None if owner in (None, self._consumer.name) else str(owner)

    def _rows(self) -> list[dict[str, Any]]:
        """What the group says of its partitions; nothing if its members, this one too, were given up as gone."""
        try:
            rows: list[dict[str, Any]] = self._client.groups.describe(self._settings.group)["partitions"]
        except UnknownGroupError:  # a broker that was frozen, or a network that was cut, before an offset was saved
            return []
        return rows

    # --- writing it --------------------------------------------------------------------------------------------------

    def write(self, tx: Transaction, published: Published) -> None:
        """Make a transaction the next one: its position, and the acknowledgement of what held before.

        Raises:
            RolledBackError: the partition is another member's, or was given up and is ours again: what held is then
                delivered once more, and acknowledged by the next try.
        """
        tx.send(self._topic, published.to_json(), partition=0)
        try:
            for message in self._held:
                tx.ack(message)
        except TransactionStateError as error:
            raise RolledBackError(f"the position was not delivered again yet: {error}") from error


# --- commits ----------------------------------------------------------------------------------------------------------


class PositionCommits:
    """Publishes positions with messages, until it is known what became of them. Used by one thread.

    Args:
        gives_up: the reader ends, and the broker is not waited for any more.
    """

    def __init__(
        self, client: Client, settings: PublishSettings, wait: BrokerWait, gives_up: Callable[[], bool]
    ) -> None:
        compression = None if settings.compression == "none" else settings.compression
        self._producer, self._clock = client.producer(compression=compression), client.clock
        self._timeout_s, self._wait, self._gives_up = settings.transaction_timeout_ms / 1000, wait, gives_up

    def commit(self, log: PositionLog, before: str, published: Published, messages: Sequence[Outgoing]) -> None:
        """Publish messages and what is then published, however long that takes.

        Args:
            before: the id of the position that holds.

        Raises:
            BinlogError: the broker refuses them for good, or another reader took over.
            RequestTimeoutError: the reader ends, and nothing was published.
        """
        while True:
            is_unknown = False
            try:
                self._send(log, published, messages)
                break
            except OutcomeUnknownError as error:
                is_unknown = True
                self._wait.say(error)
            except RolledBackError as error:
                _refuse_final(error)
                self._wait.say(error)
            if self._was_committed(log, before, published.id, is_unknown=is_unknown):
                return
            if self._gives_up():
                raise RequestTimeoutError("the broker is away: what is not published is read again at the next start")
            self._clock.sleep(PAUSE_S.first)
        self._wait.answer(lambda: log.follow(published.to_json()))

    def _was_committed(self, log: PositionLog, before: str, expected: str, *, is_unknown: bool) -> bool:
        return self._wait.answer(lambda: log.was_committed(before, expected, is_unknown=is_unknown))

    def _send(self, log: PositionLog, published: Published, messages: Sequence[Outgoing]) -> None:
        with self._producer.transaction(timeout=self._timeout_s) as tx:
            for message in messages:
                tx.add(*message)
            log.write(tx, published)
            crash_point("binlog.tx.filled")
        crash_point("binlog.tx.committed")


def _refuse_final(error: RolledBackError) -> None:
    if isinstance(error.__cause__, _FINAL):
        raise BinlogError(f"the broker refuses what is to be published: {error.__cause__}") from error
