"""One partition of an ordered producer: direct while its spool is empty, through the spool until it is empty again.

Theory of operation. ``send`` runs one at a time. Where nothing of the partition waits, the batch gets the next number
of the current session and goes out; its answer ends it. Where the broker cannot be reached or refuses for now,
it goes to the spool. Where the fate is unknown (no answer), it goes there *with its number*, and only ``flight``, the
drain's part, sends it again: by that number, in that session, so that the broker knows it if it has it. What is sent
afterwards queues behind it. ``flight`` pins the head of the queue on disk, sends it, and deletes what is acknowledged.

What if the process dies right here:
    * before the answer to a direct send: the caller was told nothing; the message is stored once or not at all;
    * between a spool's commit and its return: as before, the message will be sent;
    * behind the pins, the sending, or the answers of a flight: the same bytes go out again in the same session, which
      the next life resumes; the broker answers those it has as duplicates.

What if the session is gone meanwhile (410), or the partition no longer knows its numbers (its topic was made anew):
nothing comes in by that number any more, so after ``VISIBILITY_WAIT_S``, in which whatever was stored becomes visible,
the log is read (``ordered_fate``): what is there is done, what is not gets a new number. Where retention took the part
of the log that would tell, the message is parked, never guessed.

Invariants:
    * Direct sending happens only while no batch of the partition is in the spool, and under the lane's lock.
    * A number is used for one batch only; it is given to another one only after a refusal that is certain.
    * A batch that was handed to a connection is in ``_owed`` until its fate or its row in the spool is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from txmq.client.link import Reply
from txmq.client.ordered_fate import Fate, Reader, look_up
from txmq.client.ordered_sessions import Sessions
from txmq.client.producer_core import SEQUENCE_MASK
from txmq.client.spool import Entry, Identity, Pin, Place, Spool
from txmq.errors import (
    BadRequestError,
    BrokerError,
    ClosedError,
    FencedError,
    ForbiddenError,
    InvalidBatchError,
    InvalidNameError,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
    StorageError,
    TooLargeError,
    TxmqError,
    UnavailableError,
    UnknownTopicError,
)
from txmq.log import batch
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock

FLIGHT_BATCHES_MAX = 8
VISIBILITY_WAIT_S = 35.0  # behind the broker's visibility_hold_ms_max: what is stored by then is visible
POISON = (TooLargeError, InvalidBatchError, BadRequestError, InvalidNameError, UnknownTopicError, LocalProtocolError)


class Lane:
    """See the module's docstring. Thread safety: ``send`` any thread, ``flight`` one thread."""

    def __init__(
        self, place: Place, spool: Spool, sessions: Sessions, reader: Reader, clock: Clock, *, attempts_max: int,
        visibility_wait_s: float = VISIBILITY_WAIT_S,
    ) -> None:  # fmt: skip
        self.place = place
        self._spool, self._sessions, self._reader, self._clock = spool, sessions, reader, clock
        self._attempts_max, self._visibility_wait_s = attempts_max, visibility_wait_s
        self._lock = Lock()
        self._identity: Identity | None = None  # the session that ``_sequence`` counts in
        self._sequence = 0
        self._floor: int | None = None  # an offset the partition has reached
        self._owed: tuple[bytes, Pin] | None = None
        self._contradicted: dict[Identity, float] = {}  # sessions whose numbers no longer count here, and since when
        self._is_closed = False
        self._log = get_logger(topic=place[0], partition=place[1])

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, content: bytes, deadline: float) -> int | None:
        """Send a batch, or spool it; its offset, or None where it is in the spool.

        Raises:
            SpoolFullError, StorageError: it is neither sent nor spooled.
            TooLargeError, InvalidBatchError, UnknownTopicError, ...: refused for good, nothing was stored.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the producer is closed")
            self._store_owed()
            if self._spool.count(self.place) == 0:
                offset = self._direct(content, deadline)
                if offset is not None:
                    return offset
                if self._spool.count(self.place):  # with its number
                    return None
            self._spool.append(self.place, content, self._clock.now_ms())
            return None

    def _direct(self, content: bytes, deadline: float) -> int | None:
        """The offset; or None, and then it is in the spool if its fate is unknown, else nothing was stored."""
        try:
            identity = self._sessions.current(deadline)
            pin = self._pins(identity, 1)[0]
            self._owed = content, pin
            reply = self._sessions.start(pin, self.place, content, deadline)
            crash_point("client.ordered.sent")
        except (StorageError, ClosedError, *POISON):
            self._owed = None
            raise
        except TxmqError:
            self._owed = None
            return None
        try:
            offset = _offset(reply)
        except TxmqError as error:
            if not is_certain(error):
                self._store_owed()
                return None
            self._owed = None
            if isinstance(error, POISON):
                raise
            self._look_after_session(error, identity, deadline)
            return None
        self._sequence = pin.sequence + 1 & SEQUENCE_MASK
        self._floor = offset + 1
        self._owed = None
        return offset

    def _store_owed(self) -> None:
        """Spool what was handed to a connection and not answered; the caller holds the lock.

        Twice is harmless (an interrupt behind the commit): both rows give the same bytes.
        """
        if self._owed is not None:
            content, pin = self._owed
            self._spool.append(self.place, content, self._clock.now_ms(), pin)
            self._sequence = pin.sequence + 1 & SEQUENCE_MASK
            self._owed = None

    def _pins(self, identity: Identity, count: int) -> list[Pin]:
        if self._floor is None:
            self._floor = self._reader.offsets(*self.place).end
        if identity != self._identity:
            self._identity, self._sequence = identity, 0
        return [Pin(identity, self._sequence + number & SEQUENCE_MASK, self._floor) for number in range(count)]

    def _look_after_session(self, error: TxmqError, identity: Identity, deadline: float) -> None:
        if isinstance(error, ForbiddenError):
            self._sessions.reconnect()
        elif isinstance(error, FencedError | SequenceError):
            self._sessions.renew(identity, deadline)

    # --- draining ----------------------------------------------------------------------------------------------------

    def flight(self, deadline: float) -> None:
        """Send the first batches of the queue and take in their answers.

        Raises:
            TxmqError: the first of those left cannot be sent now; try again later.
        """
        with self._lock:
            self._store_owed()
        entries = self._spool.head(self.place, min(FLIGHT_BATCHES_MAX, self._sessions.in_flight_max))
        if not entries:
            return
        reason = _damage(entries[0])
        if reason is not None:
            self._park(entries[0], reason, renumber=False)
            return
        try:
            entries = self._pinned(entries, deadline) if entries[0].pin is None else _same_session(entries)
        except POISON as error:
            self._failed(entries[0], error, deadline)
            return
        failure = self._fly(entries, deadline)
        if failure is not None:
            self._failed(*failure, deadline)

    def _pinned(self, entries: list[Entry], deadline: float) -> list[Entry]:
        """Number the unpinned batches at the front, on disk before any of them is sent."""
        front = _front(entries, lambda entry: entry.pin is None and _damage(entry) is None)
        pins = self._pins(self._sessions.current(deadline), len(front))
        self._spool.pin(list(zip(front, pins, strict=True)))
        crash_point("client.ordered.pinned")
        self._sequence = pins[-1].sequence + 1 & SEQUENCE_MASK
        return [replace(entry, pin=pin) for entry, pin in zip(front, pins, strict=True)]

    def _fly(self, entries: Sequence[Entry], deadline: float) -> tuple[Entry, TxmqError] | None:
        """Send them all, then take in the answers, in order; the first that failed, and why."""
        failure = None
        replies = []
        for entry in entries:
            assert entry.pin is not None
            try:
                replies.append(self._sessions.start(entry.pin, self.place, entry.content, deadline))
            except TxmqError as error:
                failure = entry, error
                break
        crash_point("client.ordered.flown")
        done = []
        for entry, reply in zip(entries, replies, strict=False):
            try:
                self._floor = _offset(reply) + 1
            except TxmqError as error:
                failure = entry, error
                break
            done.append(entry)
        if done:
            crash_point("client.ordered.answered")
            self._spool.done(done)
            crash_point("client.ordered.removed")
        return failure

    def _failed(self, entry: Entry, error: TxmqError, deadline: float) -> None:
        if isinstance(error, FencedError | SequenceError):
            self._settle(entry, error, deadline)
        elif isinstance(error, POISON):
            if entry.attempts + 1 < self._attempts_max:
                self._spool.failed(entry, str(error))
                raise error
            self._park(entry, f"refused {self._attempts_max} times: {error}", renumber=True)
        else:
            if isinstance(error, ForbiddenError):
                self._sessions.reconnect()
            raise error

    def _settle(self, entry: Entry, error: TxmqError, deadline: float) -> None:
        """The batch's number no longer counts: the log says what became of it."""
        assert entry.pin is not None
        identity = entry.pin.identity
        self._sessions.renew(identity, deadline)
        now = self._clock.monotonic()
        if now - self._contradicted.setdefault(identity, now) < self._visibility_wait_s:
            raise error
        try:
            fate = look_up(self._reader, entry)
        except UnknownTopicError:
            fate = Fate.ABSENT
        if fate is Fate.STORED:
            self._spool.done([entry])
        elif fate is Fate.ABSENT:
            self._spool.unpin(entry)
        else:
            why = f"may or may not be stored, and the part of the log that would tell is gone: {error}"
            self._park(entry, why, renumber=False)

    def _park(self, entry: Entry, reason: str, *, renumber: bool) -> None:
        """Set it aside. A certain refusal leaves its number unused, and so all behind it: ``renumber``."""
        with self._lock:  # else a direct send might begin between the two
            self._spool.park(entry, reason, renumber=renumber)
            if renumber and entry.pin is not None and entry.pin.identity == self._identity:
                self._sequence = entry.pin.sequence
        self._log.warning("message parked", number=entry.number, reason=reason)

    # --- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the ``send`` that runs; later ones are refused."""
        with self._lock:
            self._is_closed = True
            self._store_owed()


def is_certain(error: TxmqError) -> bool:
    """Whether this answer to the only transmission of a batch says that it was not stored."""
    return isinstance(error, BrokerError) and not isinstance(error, UnavailableError) and type(error) is not BrokerError


def _offset(reply: Reply) -> int:
    body = reply.result()
    if not body.isdigit():
        raise RemoteProtocolError(f"not an answer to put: {body[:80]!r}")
    return int(body)


def _front(entries: Sequence[Entry], belongs: Callable[[Entry], bool]) -> list[Entry]:
    return list(takewhile(belongs, entries))


def _same_session(entries: Sequence[Entry]) -> list[Entry]:
    """The front of the queue that was sent before, in one session."""
    first = entries[0].pin
    assert first is not None
    return _front(
        entries, lambda entry: entry.pin is not None and entry.pin.identity == first.identity and _damage(entry) is None
    )


def _damage(entry: Entry) -> str | None:
    """Why a row cannot be sent: its CRC is checked before it is written anew with the number."""
    try:
        batch.check(bytearray(entry.content))
    except InvalidBatchError as error:
        return f"damaged in the spool: {error}"
    return None
