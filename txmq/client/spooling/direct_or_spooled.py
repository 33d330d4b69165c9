"""One partition of an ordered producer: direct while its spool is empty, through the spool until it is empty again.

Theory of operation. While no message of the partition waits, messages are sent directly, pipelined, many of them in
flight (``direct_sender``). The first failure gives the partition up, and the producer's spooling thread makes the queue
take over: the messages that are not acknowledged go to the spool, in order. A message that may be stored (no answer
came) goes there *with its sequence*, and only ``drain`` sends it again: with that sequence, in that session, so that
the broker recognises it if it has it. Later messages queue after it. ``drain`` assigns sequences to the head of the
queue on disk, sends it, and deletes what is acknowledged.

If the process dies
    * before the answer to a direct send: the caller has no result; the message is stored once or not at all;
    * between taking over and the spool's commit, or between that and its return: the same; in the latter case the
      message will be sent;
    * after sequences were assigned, after the sending, or after the answers of a drain: the same bytes are sent again
      in the same session, which the next process resumes; the broker answers those that it has as duplicates.

A refusal leaves a sequence unused only if refusals were all its answers. A message that may have been stored before (no
answer came, or another process sent it) is not parked as refused before the log was read.

The session may be gone meanwhile (410), or the partition may not know its sequences (its topic was created anew). Then
nothing is stored under that sequence any more. After ``VISIBILITY_WAIT_S`` in one incarnation of the broker, in which
all that was stored becomes visible, the log is read (``look_up``): a batch that is there is done, one that is not gets
a new sequence. If retention took the part of the log that would tell, the message is parked, never guessed.

With several homes the partition has one, which a topic that is created anew may change. The queue goes over to the new
home when nothing is sent directly. Sequences of the old home's session count nowhere any more: the log of the new home
says what of it is stored there.

In a cluster a message is meant for the topic that its partition was chosen for, by its id, and the broker refuses it if
another topic has the name. Before it is spooled the caller gets that refusal. A spooled message is parked, with all
others that were meant for that topic. The new topic's numbers begin at 0.

Invariants:
    * Direct sending begins only while no message of the partition is in the spool, or enqueued for it.
    * Nothing is enqueued in the spool while a direct send is unfinished: that is taken over first.
    * A sequence is used for one batch only; it is given to another one only after a certain refusal.
    * Only the spooling thread takes over: it is no thread of the application, so no KeyboardInterrupt strikes it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from txmq.client.producer.core import ANY_TOPIC, SEQUENCE_MASK, Batch, Record, TopicRef
from txmq.client.producer.sender import Completion
from txmq.client.spooling.direct_sender import TakenOver, Unsent, is_certain
from txmq.client.spooling.spool import AssignedSequence, Entry, Spool, SpoolIdentity, Ticket
from txmq.client.spooling.spool_homes import SpoolHomes, stamped
from txmq.client.transport.connection import Reply
from txmq.errors import (
    BadRequestError,
    ClosedError,
    FencedError,
    InvalidBatchError,
    InvalidNameError,
    LocalProtocolError,
    NotOwnerError,
    OtherSessionError,
    RemoteProtocolError,
    SequenceError,
    StaleTopicError,
    StorageError,
    TooLargeError,
    TxmqError,
    UnknownTopicError,
)
from txmq.log import batch, records
from txmq.log.batch import HEADER
from txmq.model import SendResult, SendStatus, TopicPartition
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Future, new_future, new_lock

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.spooling.spool_homes import SpoolHome

GONE = (UnknownTopicError, StaleTopicError)  # the topic is; with it went what it held
POISON = (TooLargeError, InvalidBatchError, BadRequestError, InvalidNameError, LocalProtocolError, *GONE)
READ_SIZE_BYTES = 1 << 20
DRAIN_BATCHES_MAX, DRAIN_SIZE_BYTES_MAX = 256, 4 << 20  # numbered by one synced transaction, and removed by another
VISIBILITY_WAIT_S = 35.0  # longer than the broker's visibility_hold_ms_max: what is stored is visible by then


def stored_at(reply: Reply) -> int:
    """Wait for the answer to ``put``: the offset of the batch."""
    line = reply.result().removesuffix(b"\n")
    if not line.isdigit():
        raise RemoteProtocolError(f"not an answer to put: {line[:80]!r}")
    return int(line)


def has_stored_nothing(error: TxmqError) -> bool:
    """Whether this transmission has certainly stored nothing."""
    return isinstance(error, LocalProtocolError) or is_certain(error)


def is_refused_for_good(taken: Batch) -> bool:
    """Whether the callers get the refusal and nothing is spooled. Of several messages only one may be refused."""
    return isinstance(taken.refusal, GONE) or (taken.count == 1 and isinstance(taken.refusal, POISON))


def to_be_numbered(entries: Sequence[Entry]) -> list[Entry]:
    """The first batches without a sequence: numbers count in one topic."""
    return list(
        takewhile(
            lambda entry: entry.assigned is None and entry.topic_id == entries[0].topic_id and damage_of(entry) is None,
            entries,
        )
    )


def of_one_session(entries: Sequence[Entry]) -> list[Entry]:
    """The first batches that were sent before in one session."""
    first = entries[0].assigned
    assert first is not None
    return list(
        takewhile(
            lambda entry: (
                entry.assigned is not None
                and entry.assigned.identity == first.identity
                and entry.topic_id == entries[0].topic_id
                and damage_of(entry) is None
            ),
            entries,
        )
    )


def damage_of(entry: Entry) -> str | None:
    """Why a row cannot be sent: its CRC is checked before the sequence is written into it."""
    try:
        batch.check(bytearray(entry.content))
    except InvalidBatchError as error:
        return f"damaged in the spool: {error}"
    return None


class StoredInLog(enum.Enum):
    """Whether the log holds a batch."""

    STORED = "stored"
    ABSENT = "absent"
    UNKNOWN = "unknown"


def broker_epoch(home: SpoolHome) -> str:
    """The number of the broker's incarnation: another one after each restart.

    Raises:
        TxmqError: the broker does not tell it now.
    """
    for line in home.stats().splitlines():
        if line.startswith("epoch "):
            return line
    raise RemoteProtocolError("the broker's stats tell no epoch")


def look_up(client: Client, entry: Entry) -> StoredInLog:
    """Look for a batch in the log, if its session can no longer tell whether it is stored.

    A session that has ended (410), or a partition that does not know its sequences (its topic was created anew), takes
    nothing more under that sequence. So the log is the whole truth, once all that it holds is visible. Batches keep
    producer id, epoch, sequence and CRC in the log. A batch that is not found in a log that goes back to before its
    first sending was never stored. If retention has removed that part, the answer is unknown.

    Read the partition from the offset that it had reached before the batch was first sent.

    Raises:
        UnknownTopicError: the partition is gone, with all it held.
        TxmqError: it cannot be read now.
    """
    assert entry.assigned is not None
    wanted = _identity(stamped(entry.content, entry.assigned))
    held = client.offsets(entry.topic, entry.partition)
    # An end below it: the topic was created anew under its name.
    offset_at_least = entry.assigned.offset_at_least if entry.assigned.offset_at_least <= held.end else 0
    offset = max(held.start, offset_at_least)
    while offset < held.end:
        body = client.fetch_raw(entry.topic, entry.partition, offset, READ_SIZE_BYTES)
        if not body:
            return StoredInLog.UNKNOWN
        for raw in records.decode_raw(body, entry.topic, entry.partition):
            if _identity(raw.content) == wanted:
                return StoredInLog.STORED
            offset = raw.end_offset
    return StoredInLog.ABSENT if held.start <= offset_at_least else StoredInLog.UNKNOWN


def _identity(batch: bytearray | memoryview) -> tuple[int, ...]:
    fields = HEADER.unpack_from(batch)
    return fields[4], *fields[9:12]  # CRC, producer id, epoch, sequence


class PartitionQueue:
    """One partition's messages. Thread safety: ``send`` and ``drain`` any thread, ``take_over`` one thread.

    Attributes:
        home: the home that it sends to.
    """

    def __init__(
        self, partition: TopicPartition, spool: Spool, homes: SpoolHomes, client: Client, clock: Clock, *,
        attempts_max: int, visibility_wait_s: float = VISIBILITY_WAIT_S,
    ) -> None:  # fmt: skip
        self.partition = partition
        self._spool, self._homes, self.home = spool, homes, homes.known(partition)
        self._client, self._clock = client, clock
        self._attempts_max, self._visibility_wait_s = attempts_max, visibility_wait_s
        self._lock = new_lock()
        self._draining = new_lock()  # the drain threads of two homes meet if the partition is made anew at another home
        self._is_misrouted = False
        self._is_direct = False  # the sender has the next sequence; otherwise it is here
        self._identity: SpoolIdentity | None = None  # the session that ``_sequence`` counts in
        self._sequence = 0
        self._topic_id = 0  # the topic that ``_sequence`` counts in, if a broker has told
        self._offset_at_least: int | None = None  # an offset that the partition has reached
        self._certain: set[int] = set()  # rows that were refused and cannot have been stored
        # Sessions whose sequences no longer count here, in which incarnation of the broker, and since when there.
        self._contradicted: dict[tuple[SpoolIdentity, str], float] = {}
        self._is_closed = False
        self.drained = 0  # batches sent from the spool
        self._log = get_logger(topic=partition[0], partition=partition[1])

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, record: Record, deadline: float, topic_ref: TopicRef = ANY_TOPIC) -> SendResult:
        """Send a message, or spool it.

        Args:
            topic_ref: the topic that its partition was chosen for.

        Raises:
            SpoolFullError, StorageError: it is neither sent nor spooled.
            TooLargeError, InvalidBatchError, UnknownTopicError, ...: refused for good, nothing was stored.
        """
        begun = self._begin(record, deadline, None, topic_ref)
        if isinstance(begun, Ticket):
            return self._spooled(begun)
        completion, number = begun
        self.home.sender.drive(completion)
        return completion.result(number)

    def send_async(self, record: Record, deadline: float, topic_ref: TopicRef = ANY_TOPIC) -> Future[SendResult]:
        """As ``send``, without waiting for the broker; a spooled message is synced when this returns."""
        future = new_future()
        begun = self._begin(record, deadline, future, topic_ref)
        if isinstance(begun, Ticket):
            try:
                future.set_result(self._spooled(begun))
            except TxmqError as error:
                future.set_exception(error)
        else:
            self.home.sender.see_to_futures(deadline)
        return future

    def _spooled(self, ticket: Ticket) -> SendResult:
        self._spool.wait_synced(ticket)
        return SendResult(*self.partition, None, SendStatus.SPOOLED)

    def _begin(
        self, record: Record, deadline: float, future: Future[SendResult] | None, topic_ref: TopicRef
    ) -> Ticket | tuple[Completion, int]:  # fmt: skip
        """Put the message in its order: after those sent directly, or in the spool."""
        if self.home.commits:
            self._await_commits(deadline)
        # Without the lock while nothing has failed.
        begun = self.home.sender.start(self.partition, record, deadline, future, topic_ref.topic_id)
        while begun is None:
            with self._lock:
                if self._is_closed:
                    raise ClosedError("the producer is closed")
                if not self.home.sender.is_given_up(self.partition):
                    if self._spool.count(self.partition) == 0:
                        begun = self._direct(record, deadline, future, topic_ref)
                        if begun is not None:
                            break
                    if not self.home.sender.give_up(self.partition):
                        return self._enqueued(record, topic_ref)
            self.home.sender.await_taken_over()
        return begun

    def _await_commits(self, deadline: float) -> None:
        """Let no message pass a transaction that its home has not answered: if that takes too long, it is spooled."""
        with suppress(TxmqError):
            self.home.commits.wait(self.partition, deadline)
        if self.home.commits.holds(self.partition):
            self.home.sender.give_up(self.partition)

    def _direct(
        self, record: Record, deadline: float, future: Future[SendResult] | None, topic_ref: TopicRef
    ) -> tuple[Completion, int] | None:  # fmt: skip
        if 0 < topic_ref.topic_id < self._topic_id:
            raise StaleTopicError(f"topic {self.partition[0]!r} was deleted meanwhile, and created anew: send it again")
        is_anew = self._is_anew(topic_ref.topic_id)
        try:
            self._find_home()
            self.home.commits.wait(self.partition, deadline)
            identity = self.home.sender.follow(deadline)
            ours = self._sequence if identity == self._identity and not is_anew else 0
            self._look_at_end(ours)
        except (StorageError, ClosedError, *POISON):
            raise
        except TxmqError:
            return None
        if not self.home.sender.begin(self.partition, None if self._is_direct else ours, topic_ref):
            return None
        self._is_direct, self._topic_id = True, max(self._topic_id, topic_ref.topic_id)
        return self.home.sender.start(self.partition, record, deadline, future, topic_ref.topic_id)

    def _is_anew(self, topic_id: int) -> bool:
        """Whether the topic was created anew since messages were numbered: the new one knows no numbers."""
        return 0 < self._topic_id < topic_id

    def _find_home(self) -> None:
        """Go to the home that owns the partition, unless messages are sent directly; the caller holds the lock."""
        if self._is_misrouted:
            self._homes.corrected(self.partition[0])
            self._is_misrouted = False
        if not self._is_direct:
            home = self._homes.owner(self.partition)
            if home is not self.home:
                self.home = home
                home.wake.set()

    def _enqueued(self, record: Record, topic_ref: TopicRef) -> Ticket:
        if self._is_direct:
            self._go_on_from(self.home.sender.hand_over(self.partition))
        content, now_ms = self.home.sender.encoded(record), self._clock.now_ms()
        return self._spool.enqueue(self.partition, content, now_ms, topic_id=topic_ref.topic_id)

    def _go_on_from(self, handed: TakenOver) -> None:
        self._is_direct = False
        self._identity, self._sequence = handed.identity, handed.sequence
        self._offset_at_least = max(self._offset_at_least or 0, handed.offset_at_least or 0)

    # --- taking over -------------------------------------------------------------------------------------------------

    def take_over(self, deadline: float) -> None:
        """Spool what was sent directly and is not acknowledged, if the sender has given up; on the spooling thread."""
        with self._lock:
            sender = self.home.sender  # under the lock: the partition may have got another home
            if not sender.is_given_up(self.partition):
                return
            handed = sender.hand_over(self.partition)
            self._go_on_from(handed)
            owed = [(unsent.batch, self._spooled_from(unsent)) for unsent in handed.batches]
        for taken, tickets in owed:
            sender.finish(taken, self._outcomes(taken, tickets))
        refusals = [taken.refusal for taken, _ in owed if taken.refusal is not None]
        if refusals and handed.identity is not None:
            self._look_after_session(refusals[0], handed.identity, deadline)

    def _spooled_from(self, unsent: Unsent) -> list[Ticket]:
        """Enqueue a batch: whole, with its sequence; or its messages; or nothing if they are refused for good."""
        taken, now_ms = unsent.batch, self._clock.now_ms()
        topic_id = taken.queue.topic_ref.topic_id
        if unsent.sequence is None:
            if is_refused_for_good(taken):
                return []
            return [
                self._spool.enqueue(self.partition, self.home.sender.encoded(record), now_ms, topic_id=topic_id)
                for record in taken.records
            ]
        assert self._identity is not None
        assert taken.content is not None
        assigned = AssignedSequence(self._identity, unsent.sequence, self._offset_at_least or 0)
        return [self._spool.enqueue(self.partition, bytes(taken.content), now_ms, assigned, taken.count, topic_id)]

    def _outcomes(self, taken: Batch, tickets: Sequence[Ticket]) -> list[TxmqError | None]:
        if not tickets:
            return [taken.refusal] * taken.count
        outcomes: list[TxmqError | None] = []
        for ticket in tickets:
            try:
                self._spool.wait_synced(ticket)
            except TxmqError as error:
                outcomes += [error] * ticket.messages
            else:
                outcomes += [None] * ticket.messages
        return outcomes

    def _look_at_end(self, sequence: int) -> int:
        """How far the partition has got. Asked again where numbering begins: the topic may be another one by then."""
        if self._offset_at_least is None or sequence == 0:
            self._offset_at_least = self._client.offsets(*self.partition).end
        return self._offset_at_least

    def _next_sequences(self, identity: SpoolIdentity, entries: Sequence[Entry]) -> list[AssignedSequence]:
        begins = identity != self._identity or self._is_anew(entries[0].topic_id)
        offset_at_least = self._look_at_end(0 if begins else self._sequence)
        if begins:
            self._identity, self._sequence = identity, 0
        self._topic_id = max(self._topic_id, entries[0].topic_id)
        # A sequence counts messages; a batch that was sent directly and is numbered anew may hold several.
        steps = accumulate((entry.messages for entry in entries[:-1]), initial=self._sequence)
        return [AssignedSequence(identity, step & SEQUENCE_MASK, offset_at_least) for step in steps]

    def _look_after_session(self, error: TxmqError, identity: SpoolIdentity, deadline: float) -> None:
        self._is_misrouted = self._is_misrouted or isinstance(error, NotOwnerError | StaleTopicError)
        if isinstance(error, OtherSessionError):
            self.home.sessions.reconnect()
        elif isinstance(error, FencedError | SequenceError):
            self.home.sessions.renew(identity, deadline)

    # --- draining ----------------------------------------------------------------------------------------------------

    def drain(self, deadline: float) -> None:
        """Send the first batches of the spool and read their answers.

        Raises:
            TxmqError: the first of those left cannot be sent now; try again later.
        """
        with self._draining:
            self._drain(deadline)

    def _drain(self, deadline: float) -> None:
        with self._lock:
            self._find_home()
        self.home.commits.wait(self.partition, deadline)  # without the lock: messages are spooled meanwhile
        self._spool.sync_all()
        entries = self._spool.head(self.partition, DRAIN_BATCHES_MAX, DRAIN_SIZE_BYTES_MAX)
        if not entries:
            return
        reason = damage_of(entries[0])
        if reason is not None:
            self._park(entries[0], reason, renumber=False)
            return
        try:
            entries = self._numbered(entries, deadline) if entries[0].assigned is None else of_one_session(entries)
        except POISON as error:
            self._failed(entries[0], error, deadline)
            return
        failure = self._send_spooled(entries, deadline)
        if failure is not None:
            self._failed(*failure, deadline)

    def _numbered(self, entries: list[Entry], deadline: float) -> list[Entry]:
        """Assign sequences to the first batches without one, on disk before any of them is sent."""
        front = to_be_numbered(entries)
        sequences = self._next_sequences(self.home.sessions.current(deadline), front)
        self._spool.assign(list(zip(front, sequences, strict=True)))
        self._certain = {entry.number for entry in front}
        crash_point("client.ordered.pinned")
        self._sequence = sequences[-1].sequence + front[-1].messages & SEQUENCE_MASK
        return [replace(entry, assigned=assigned) for entry, assigned in zip(front, sequences, strict=True)]

    def _send_spooled(self, entries: Sequence[Entry], deadline: float) -> tuple[Entry, TxmqError] | None:
        """Send them in order, as many at a time as the broker tells apart. Returns the first failure."""
        failure: tuple[Entry, TxmqError] | None = None
        certain, self._certain = self._certain, set()
        waiting, in_flight, done = iter(entries), deque[tuple[Entry, Reply]](), list[Entry]()
        sessions = self.home.sessions
        while True:
            while failure is None and len(in_flight) < sessions.in_flight_max and (entry := next(waiting, None)):
                assert entry.assigned is not None
                try:
                    reply = sessions.start(entry.assigned, self.partition, entry.content, deadline, entry.topic_id)
                except TxmqError as error:
                    failure = entry, error
                else:
                    in_flight.append((entry, reply))
                    crash_point("client.ordered.flown")
            if not in_flight:
                break
            entry, reply = in_flight.popleft()
            try:
                self._offset_at_least = stored_at(reply) + entry.messages
            except TxmqError as error:
                failure = entry, error
                break
            done.append(entry)
        if done:
            crash_point("client.ordered.answered")
            self._spool.done(done)
            crash_point("client.ordered.removed")
            self.drained += len(done)
        if failure is not None and has_stored_nothing(failure[1]) and failure[0].number in certain:
            self._certain = {number for number in certain if number >= failure[0].number}  # these follow a gap
        return failure

    def _failed(self, entry: Entry, error: TxmqError, deadline: float) -> None:
        if isinstance(error, FencedError | SequenceError):
            self._resolve_from_log(entry, error, deadline)
        elif isinstance(error, POISON):
            if isinstance(error, StaleTopicError):
                self._is_misrouted = True
                self._homes.topic_is_gone(entry.topic)
            if entry.attempts + 1 < self._attempts_max or not self._spool.parks_refused:
                self._spool.failed(entry, str(error))
                raise error
            if isinstance(error, StaleTopicError):
                self._park_topic(entry, error)
            elif entry.assigned is not None and entry.number not in self._certain:
                self._resolve_from_log(entry, error, deadline)
            else:
                self._park(entry, f"refused {self._attempts_max} times: {error}", renumber=True)
        else:
            if isinstance(error, OtherSessionError):
                self.home.sessions.reconnect()
            elif isinstance(error, NotOwnerError):
                self._is_misrouted = True
                self._spool.unassign(self._certain)  # never sent before: their numbers count nowhere
            raise error

    def _resolve_from_log(self, entry: Entry, error: TxmqError, deadline: float) -> None:
        """The batch's sequence no longer counts: the log says whether it is stored."""
        assert entry.assigned is not None
        identity = entry.assigned.identity
        self.home.sessions.renew(identity, deadline)
        # A broker that was restarted meanwhile holds partitions for their whole time again.
        epoch, now = broker_epoch(self.home), self._clock.monotonic()
        if now - self._contradicted.setdefault((identity, epoch), now) < self._visibility_wait_s:
            raise error
        try:
            stored = look_up(self._client, entry)
        except UnknownTopicError:
            stored = StoredInLog.ABSENT
        if stored is StoredInLog.STORED:
            self._spool.done([entry])
        elif stored is StoredInLog.ABSENT:
            self._spool.unassign([entry.number])
        else:
            why = f"may or may not be stored, and the part of the log that would tell is gone: {error}"
            self._park(entry, why, renumber=False)

    def _park(self, entry: Entry, reason: str, *, renumber: bool) -> None:
        """Park a batch. After a certain refusal its sequence is unused, and so are those after it: ``renumber``."""
        with self._lock:  # otherwise a direct send could begin between the two
            self._spool.park(entry, reason, renumber=renumber)
            if renumber and entry.assigned is not None and entry.assigned.identity == self._identity:
                self._sequence = entry.assigned.sequence
        self._log.warning("message parked", number=entry.number, reason=reason)

    def _park_topic(self, entry: Entry, error: TxmqError) -> None:
        """Park what waits for a topic that is gone. Another one knows none of its numbers."""
        reason = f"refused {self._attempts_max} times: {error}"
        with self._lock:
            self._spool.park_topic(entry, reason)
            if self._topic_id == entry.topic_id:
                self._topic_id = self._sequence = 0
        self._log.warning("messages for a topic that is gone parked", topic_id=entry.topic_id, reason=reason)

    # --- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more messages. What is unfinished is given up and taken over here: the spooling thread has ended."""
        with self._lock:
            self._is_closed = True
        self.home.sender.give_up(self.partition)
        with suppress(TxmqError):  # its session is not needed any more, and all waits have ended
            self.take_over(self._clock.monotonic())
