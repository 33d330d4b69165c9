"""One transaction's conversation with one broker: parts, prepare, commit, rollback, under one transaction id.

Theory of operation. ``begin`` takes the id from a session, and it stands for that session's broker for good. Every
request may be repeated under the same id: the broker executes it once and gives the same answer. After a lost
connection a request is repeated here until the deadline. The meaning of a refusal is left to the caller, together with
whether an earlier attempt may have been executed (``may_have_arrived``, ``is_doubtful``). A block has one conversation
with each home that it wrote to (``HomePart``). A refusal before the decision reaches the caller as a
``RolledBackError``: nothing happened (``rolled_back``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from txmq.client.transaction.messages import NOTHING_STREAMED, EncodedPart, MessageBuffer, SavedOffsets
from txmq.client.transport.reconnecting import AWAY_S_MAX
from txmq.client.transport.session import ClientSession
from txmq.errors import (
    ConnectionLostError,
    FencedError,
    NotOwnerError,
    OverloadedError,
    RemoteProtocolError,
    RequestTimeoutError,
    RolledBackError,
    SessionFullError,
    StaleTopicError,
    TransactionAwayError,
    TransactionConflictError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
    UnknownTransactionError,
)
from txmq.model import Outcome
from txmq.protocol.transaction_bodies import PARTS_MAX, PartResult, encode_part, parse_outcome, parse_result_lines
from txmq.runtime.ports import Buffer, Clock
from txmq.xa.reporter import Hazard
from txmq.xa.resolver_ports import Answer
from txmq.xid import TxId

if TYPE_CHECKING:
    from txmq.client.home_link import HomeLink

LOST = (ConnectionLostError, UnavailableError)  # not answered, and the broker may be away
# Refusals of a transaction's id, or its topics': the block has others when it is run again.
_OF_THESE_IDS = (TransactionConflictError, FencedError, UnknownTransactionError, StaleTopicError)
RETRY_S = 0.02  # between attempts that failed without taking time themselves
ROLLBACK_TIMEOUT_S = 2.0  # no outcome depends on its answer
OVERLOADED_PAUSE_S = 0.2  # megabytes are sent again each time
_UNANSWERED = (*LOST, RequestTimeoutError)
_REFUSALS = (SessionFullError, StaleTopicError, NotOwnerError)  # see ``look_at_refusal``
_REQUEST_OVERHEAD_BYTES = 300  # one part's line
Extensions = dict[str, str | int | bytes | None]
Fields = dict[str, str | int]


def rolled_back(error: TxmqError, txid: str | None) -> RolledBackError:
    """The caller's error for a refusal before the decision: nothing happened. The refusal is its cause."""
    if isinstance(error, RolledBackError):
        return error
    if isinstance(error, LOST):
        wrapped: RolledBackError = TransactionAwayError(f"the broker is away: {error}; nothing happened", txid)
    elif isinstance(error, RequestTimeoutError):
        wrapped = TransactionTimeoutError(f"no answer before the deadline: {error}", txid)
    else:
        text = f"refused: {error}" if str(error) else f"refused: {type(error).__name__}"
        wrapped = RolledBackError(text, txid, retriable=error.retriable or isinstance(error, _OF_THESE_IDS))
    wrapped.__cause__ = error
    return wrapped


def raise_rolled_back(error: TxmqError, txid: str | None) -> NoReturn:
    """Raise what ``rolled_back`` makes of the error that is being handled.

    Not ``raise rolled_back(error, ...) from error``: an error that needs no wrapping would become its own cause.
    """
    raise rolled_back(error, txid)


_ENDS = {outcome.value: outcome for outcome in (Outcome.COMMITTED, Outcome.ROLLED_BACK)}


class Conversation:
    """See the module's docstring.

    Attributes:
        home: the broker that it talks to.
        txid: the id by which the broker knows the transaction; empty before ``begin``.
        deadline: monotonic time.
        session: in which it has its id.
        streamed: the parts that were sent ahead.
        may_have_arrived: a request that decides was sent and was not answered.
        is_doubtful: a prepare was sent and not answered: it may be prepared, whatever comes next.
        acks: the offsets that are saved together with the messages.
        on_other_topic: called if a part is refused because its topic is another one, or another home's, by now.
        on_part: called after each part that was sent ahead.
    """

    session: ClientSession  # from ``attach`` on

    def __init__(self, home: HomeLink, clock: Clock, timeout_s: float) -> None:
        self.home, self._clock = home, clock
        self.timeout_s = timeout_s
        self.deadline = clock.monotonic() + timeout_s
        self.streamed = NOTHING_STREAMED
        self.may_have_arrived = self.is_doubtful = False
        self.acks: SavedOffsets | None = None
        self.on_other_topic: Callable[[], None] | None = None
        self.on_part: Callable[[], None] | None = None
        self._control = home.control
        self._is_attached = False
        self._counter = 0
        self._prepare: Answer | None = None
        self.txid = ""

    # --- identity and time -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Have a session, from which ``begin`` takes the id, and ask for an earlier end of it that was not seen.

        Raises:
            TxmqError: the broker is away, or gives no session.
        """
        if self._is_attached:
            return
        # The connection goes with the session: this transaction stays with them, whatever the client takes next.
        self._control = control = self.home.control
        session = control.session
        if session is None:
            session = control.have_session(self._clock.monotonic() + self.home.timeout)
        self.session, self._is_attached = session, True
        if session.lost:
            self._find_lost()

    def begin(self) -> None:
        """Take an id; nothing if that was done. Raises as ``attach``."""
        if not self.txid:
            if not self._is_attached:
                self.attach()
            self._counter, self.txid = self.session.next_txid()

    def attach_for_caller(self) -> None:
        """Have a session before a database begins.

        Raises:
            RolledBackError: the broker is away, or refuses; nothing happened.
        """
        try:
            self.attach()
        except TxmqError as error:
            raise_rolled_back(error, None)

    def begin_for_caller(self) -> None:
        """Take the id before anything is prepared. Raises as ``attach_for_caller``."""
        try:
            self.begin()
        except TxmqError as error:
            raise_rolled_back(error, None)

    @property
    def txid_or_none(self) -> str | None:
        """The transaction's id; None before ``begin``."""
        return self.txid or None

    @property
    def cluster(self) -> str:
        """The broker's cluster, 16 hex digits."""
        return f"{self.session.cluster:016x}"

    @property
    def remaining_s(self) -> float:
        """Until the deadline; negative after it."""
        return self.deadline - self._clock.monotonic()

    @property
    def deadline_ms(self) -> int:
        """The deadline as wall time of the broker, which refuses what comes later."""
        return self.session.clock_ahead_ms + int(self.deadline * 1000)

    def check_deadline(self) -> None:
        """Refuse to go on after the deadline.

        Raises:
            TransactionTimeoutError: it has passed.
        """
        if self._clock.monotonic() >= self.deadline:
            text = "timeout= passed before the end of the block, or before the broker was reached; nothing happened"
            raise TransactionTimeoutError(text, self.txid_or_none)

    def was_refused(self, error: TxmqError) -> None:
        """After a refused prepare: if it was late by the broker's clock alone, measure that clock for the next one."""
        self.look_at_refusal(error)
        if isinstance(error, TransactionConflictError) and self.remaining_s > 0:
            with suppress(TxmqError):
                self._control.measure_clock(self.session, ROLLBACK_TIMEOUT_S)

    def look_at_refusal(self, error: TxmqError) -> None:
        """If its reason is the session, the client's next transactions have another one; if the topics, they ask."""
        if isinstance(error, SessionFullError):
            self.home.leave_session(self.session)
        elif isinstance(error, _REFUSALS) and self.on_other_topic is not None:
            self.on_other_topic()

    def reach(self) -> None:
        """Make sure that the broker is there: before the body, which locks rows, and before its end is begun.

        Raises:
            TransactionAwayError: it is not.
        """
        try:
            (self._control if self.txid else self.home.control).reach(self.deadline)
        except TxmqError as error:
            raise_rolled_back(error, self.txid_or_none)

    def is_back(self) -> bool:
        """Wait, at most ``AWAY_S_MAX``, for a broker that was lost before it answered; whether it is back."""
        try:
            self._control.regain(min(self.deadline, self._clock.monotonic() + AWAY_S_MAX))
        except TxmqError:
            return False
        return True

    def pause(self, seconds: float = RETRY_S) -> None:
        """Wait before the same thing is tried again."""
        self._clock.sleep(seconds)

    def keep(self) -> None:
        """Have the broker keep the outcome until ``finished``: a resolver needs it."""
        if self.txid:
            self.session.keep(self._counter)

    def finished(self) -> None:
        """Let the broker drop the outcome: the end is known. To be called once."""
        if self.txid:
            self.session.finished(self._counter)

    def lost(self) -> None:
        """Note an end that was not seen: a later transaction of this session asks for it."""
        if self.txid:
            self.session.lost.append(self._counter)

    def _find_lost(self) -> None:
        """Ask for the end of one lost transaction, now that the broker answers.

        It holds the session's floor, and the broker refuses a session (429) that leaves too many outcomes unfinished.
        ``fence`` makes the answer final: its deadline is over, so what never arrived must not arrive now.
        """
        session = self.session
        try:
            counter = session.lost.popleft()
        except IndexError:  # another thread took it
            return
        txid = str(TxId(session.cluster, session.home, session.id, counter))
        is_found = False
        try:
            reply = self._control.call("outcome", txid, extensions={"fence": None}, timeout=ROLLBACK_TIMEOUT_S)
            outcome = _ENDS.get(parse_outcome(reply)[0])
            if outcome is not None:
                session.found(counter, outcome)
                is_found = True
        except FencedError:  # nothing is kept of it
            session.finished(counter)
            is_found = True
        except TxmqError:
            pass
        finally:
            if not is_found:
                session.lost.append(counter)

    # --- towards the decision ----------------------------------------------------------------------------------------

    def take_parts(self, messages: MessageBuffer, *, keyed: bool = True) -> list[EncodedPart]:
        """Encode the messages that were not taken yet, in parts that fit a request."""
        return messages.take_parts(self.txid, self.session.request_size_bytes_max // 2, keyed=keyed)

    def stream(self, parts: Sequence[EncodedPart]) -> None:
        """Send parts ahead of the decision.

        Raises:
            TxmqError: the stream is broken; the broker, or ``rollback``, rolls back the parts that were sent.
        """
        for part in parts:
            self.check_deadline()
            extensions: Extensions = {"tx": self.txid}
            if part.topic_id:
                extensions["id"] = part.topic_id
            # Stated before it is sent: an unanswered part makes the decision fail, never pass without it.
            self.streamed = self.streamed.with_part(part.batch)
            self._call(self._wait_s, "put", part.topic, part.partition, extensions=extensions, body=(part.batch,))
            if self.on_part is not None:
                self.on_part()

    def fits_one_request(self, parts: Sequence[EncodedPart], beside_bytes: int = 0) -> bool:
        """Whether the parts can go with the decision, and with ``beside_bytes`` of something else."""
        size = beside_bytes + (len(self.acks.encoded()) if self.acks is not None else 0)
        for part in parts:
            size += len(part.batch) + _REQUEST_OVERHEAD_BYTES + 11 * len(part.keys or ())
        return len(parts) <= PARTS_MAX and size <= self.session.request_size_bytes_max

    def send_prepare(self, submit: Callable[[], Answer]) -> None:
        """Send ``prepare``, if the broker is there; otherwise ``await_prepare`` does.

        Raises:
            TxmqError: it is refused for good. After a lost connection the broker rolls back what was streamed.
        """
        try:
            self._prepare = submit()
        except (ConnectionLostError, RequestTimeoutError):
            if self.streamed.parts:
                raise

    def await_prepare(
        self, submit: Callable[[], Answer], *, waits_for_room: bool = False, waits_for_broker: bool = False
    ) -> None:
        """Send ``prepare`` under the same id until it is answered: it is prepared once.

        Args:
            waits_for_room: a broker that has no room now is asked again until the deadline.
            waits_for_broker: so is one that is away: no row is locked meanwhile.

        Raises:
            TxmqError: one of NOT_KNOWN, or it is refused. The cause of a timeout says what kept the broker from
            answering.
        """
        last: TxmqError | None = None
        while True:
            try:
                self.check_deadline()
            except TransactionTimeoutError as error:
                error.__cause__ = last  # compiled code sets none with ``from``
                raise
            is_sent = False
            try:
                reply = self._prepare or submit()
                is_sent = True
                reply.result()
            except OverloadedError as error:
                if not waits_for_room or isinstance(error, SessionFullError):
                    raise
                last, pause_s = error, OVERLOADED_PAUSE_S
            except RequestTimeoutError as error:  # the last try, which had little time
                error.__cause__ = error.__cause__ or last
                raise
            except LOST as error:
                self.is_doubtful |= is_sent
                if not waits_for_broker and not self.is_back():  # the rows of the body are locked
                    raise
                last, pause_s = error, RETRY_S
            else:
                return
            self._prepare = None
            self.pause(pause_s)

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit_prepare(
        self, parts: Sequence[EncodedPart], resource: str, uuid: str, table: str, of: str = ""
    ) -> Answer:
        """Send ``prepare`` of a last resource; the caller waits for its answer.

        Args:
            of: the transaction of whose marker this is a part, if not its own.

        Raises:
            TxmqError: nothing was sent.
        """
        deadline_ms = self.session.clock_ahead_ms + int(self.deadline * 1000)
        fields: Fields = {"resource": resource, "uuid": uuid, "table": table, "deadline": deadline_ms}
        self._tell(fields)
        if of:
            fields["of"] = of
        until = max(self.deadline, self._clock.monotonic())
        return self._control.submit_transaction(
            f"prepare {self.txid} last-resource", fields, self.encoded(parts), until
        )

    def submit_prepare_as(self, kind: str, fields: Extensions, parts: Sequence[EncodedPart]) -> Answer:
        """Send ``prepare`` of any kind, with the fields of that kind; the caller waits for its answer.

        Raises:
            TxmqError: nothing was sent.
        """
        told: Fields = {}
        self._tell(told)
        return self._control.submit(
            "prepare", self.txid, kind, extensions=fields | told,
            body=self.encoded(parts), timeout=max(self.remaining_s, 0.0),
        )  # fmt: skip

    def commit_local(self, parts: Sequence[EncodedPart]) -> list[PartResult]:
        """Decide: messages and decision in one request, repeated under the same id until it is answered.

        Raises:
            BrokerError: refused.
            TransactionTimeoutError: the deadline passed and nothing was ever sent.
            ConnectionLostError, RequestTimeoutError, UnavailableError: the deadline passed without an answer.
        """
        body = self.encoded(parts)
        while True:
            if not self.may_have_arrived:
                self.check_deadline()
            is_sent, fields = False, Fields()
            self._tell(fields)
            try:
                reply = self._control.submit_transaction(f"commit {self.txid}", fields, body, self.deadline)
                is_sent = True
                return parse_result_lines(reply.result())
            except _REFUSALS as error:
                self.look_at_refusal(error)
                raise
            except _UNANSWERED:
                self.may_have_arrived |= is_sent
                # A commit that may have arrived is repeated while there is time; one that was never sent is not.
                if self.remaining_s <= 0 if self.may_have_arrived else not self.is_back():
                    raise
                self.pause()
            except RemoteProtocolError:
                self.may_have_arrived |= is_sent  # an answer that cannot be read does not say what was done
                raise

    def submit_commit(self, timeout_s: float) -> Answer:
        """Send ``commit`` of what is prepared; the caller waits for its answer."""
        until = self._clock.monotonic() + timeout_s
        head = f"commit {self.txid}"
        return self._control.submit_transaction(head, self._floor(), (), until)

    def write_commit(self) -> Answer:
        """As ``submit_commit``, for a caller that waits for nothing. Raises ConnectionLostError: nothing was sent."""
        return self._control.write_transaction(f"commit {self.txid} delayable", self._floor(), ())

    def submit_branch(self, decided_by: str, parts: Sequence[EncodedPart], *, is_held: bool) -> Answer:
        """Send ``prepare`` of a part of a transaction that another home decides; the caller waits for its answer.

        Args:
            is_held: readers see it when the deciding home says so.

        Raises:
            TxmqError: nothing was sent.
        """
        fields: Fields = {"of": decided_by, "deadline": self.deadline_ms}
        self._tell(fields)
        head = f"prepare {self.txid} branch held" if is_held else f"prepare {self.txid} branch"
        return self._control.submit_transaction(head, fields, self.encoded(parts), self._until(0.0))

    def submit_decide(
        self, messages: Sequence[Buffer], branches: Sequence[bytes], homes: Sequence[str], timeout_s: float
    ) -> Answer:
        """Send the decision; the caller waits for its answer.

        Args:
            messages: as ``encoded`` made them.
            branches: in databases, as ``encode_branch`` made them; without any, it is a local transaction.
            homes: the ids of the parts that are prepared at other homes.

        Raises:
            TxmqError: nothing was sent.
        """
        fields: Fields = {"branches": len(branches)} if branches else {}
        if homes:
            fields["homes"] = ",".join(homes)
        self._tell(fields)
        until, body = self._clock.monotonic() + timeout_s, [*branches, *messages]
        head = f"decide {self.txid}" if branches else f"commit {self.txid}"
        return self._control.submit_transaction(head, fields, body, until)

    def submit_complete(self, uuid: str) -> Answer:
        """Send ``complete`` of the branch in a resource; its answer need not be waited for."""
        until = self._until(ROLLBACK_TIMEOUT_S)
        return self._control.submit_transaction(f"complete {self.txid}", {"uuid": uuid}, None, until)

    def submit_rollback(self) -> Answer:
        """Send ``rollback``; no outcome depends on its answer.

        Raises:
            TxmqError: nothing was sent.
        """
        until = self._clock.monotonic() + ROLLBACK_TIMEOUT_S
        return self._control.submit_transaction(f"rollback {self.txid}", self._floor(), None, until)

    def rollback(self, hazard: Hazard | None = None) -> None:
        """Roll back, also what has not arrived yet.

        Args:
            hazard: for the broker to keep, until an operator forgets it.

        Raises:
            TransactionConflictError: it is committed, or about to be.
            TxmqError: not sent, or not answered.
        """
        fields: Extensions = {**self._floor()}
        if hazard is not None:
            fields |= hazard.extensions()
        self._call(ROLLBACK_TIMEOUT_S, "rollback", self.txid, extensions=fields)

    def try_rollback(self) -> None:
        """As ``rollback``, for parts that the broker rolls back by itself in the end."""
        with suppress(TxmqError):
            self.rollback()

    def outcome(self) -> tuple[str, list[PartResult]]:
        """Ask for the outcome: its word, and the places of a commit."""
        return parse_outcome(self._call(self._wait_s, "outcome", self.txid))

    @property
    def _wait_s(self) -> float:
        return max(self.remaining_s, RETRY_S)

    def _call(self, timeout: float, verb: str, *arguments: str | int, **named: Any) -> bytes:
        """Ask in the session of the id."""
        try:
            return self._control.call(verb, *arguments, timeout=timeout, **named)
        except _REFUSALS as error:
            self.look_at_refusal(error)
            raise

    def _until(self, seconds_min: float) -> float:
        """The deadline, but not before so many seconds from now."""
        return max(self.deadline, self._clock.monotonic() + seconds_min)

    def _tell(self, fields: Fields) -> None:
        """Add the session's floor; for a request with parts, the offsets before them and what was streamed."""
        fields |= self._floor()
        if self.acks is not None:
            fields["offsets"] = len(self.acks.encoded())
        if self.streamed.parts:
            fields |= self.streamed.extensions()

    def encoded(self, parts: Sequence[EncodedPart]) -> list[Buffer]:
        """The body of a request: the offsets, then the parts. Raises LocalProtocolError if one cannot be carried."""
        buffers: list[Buffer] = [] if self.acks is None else [self.acks.encoded()]
        for part in parts:
            buffers += encode_part(*part)
        return buffers

    def _floor(self) -> Fields:
        floor = self.session.finished_through if self.txid else 0
        return {"floor": floor} if floor else {}
