"""Takes the messages that wait in a database's outbox to the broker: each once, in the order of their numbers.

Theory of operation. Rows are numbered, sent as numbered commits (docs/protocol.md, Outboxes), several at once, and
deleted when the broker has placed them. The broker takes a number only behind the one before, and remembers which row
took it; so whatever is sent twice, by this drainer behind a lost answer or by another process, is taken once. An answer
that takes long (the messages wait there for an earlier transaction of their keys) keeps nothing else waiting: it is
looked at in each round.

A row that the broker refuses for good is parked, and its number is used up by a void: a commit without messages. Rows
behind it of its keys are recalled; the others go on. What this process's user may not send is left to other processes
for a while, which may be other users, before it is parked.

What the broker says of the series is compared with the table before anything is sent. Both may have been restored from
a backup: then nothing is sent, and an operator is to look (``txmq outbox``). Rows whose number a restored broker has
taken leave first: under new numbers they would be sent twice.

Invariants:
    * a row is deleted only behind the broker's answer that it is placed;
    * a row is parked, durably, before a void for its number is sent; the number is taken from it only behind the
      answer to that. What took a number the broker says;
    * numbers are sent over the connection over which they were compared: behind another one there may be a broker that
      was restored, while this process stood still. Over it the broker takes nothing behind a number that it refused,
      until it is asked again: meanwhile rows may have been kept back;
    * another database than the known one (``fingerprint``) drains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from txmq.errors import (
    BadRequestError,
    BrokerError,
    ConnectionLostError,
    ForbiddenError,
    InvalidBatchError,
    OutOfTurnError,
    StaleTopicError,
    TooLargeError,
    TopicClosedError,
    TxmqError,
    UnknownTopicError,
)
from txmq.model import is_valid_name
from txmq.protocol.commands import TransactionRequest
from txmq.protocol.json_text import json_object
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.os_clock import OSRandom
from txmq.runtime.ports import Clock
from txmq.xa.broker_port import REQUEST_TIMEOUT_S, Answer, Client, NumberingSession
from txmq.xa.database.marker_table import own_transaction
from txmq.xa.database.outbox_homes import LONE, WAITING
from txmq.xa.database.outbox_series import NUMBERED_MAX, OutboxRow, SeriesChangedError
from txmq.xa.database.outbox_tables import OutboxSize, OutboxTables
from txmq.xa.last_resource.outbox import OutboxState
from txmq.xa.last_resource.resolving import ResolvingConnection

IN_FLIGHT_MAX = NUMBERED_MAX  # requests
IN_FLIGHT_BYTES_MAX = 16 << 20  # but for a row that is larger
PAGE_SIZE_MIN, PAGE_SIZE_MAX = 8, 128  # rows that are numbered and sent at once: few behind one that was refused
DELETE_SIZE = 128  # rows in one commit
SEND_S = 1.0  # for a connection, and for the socket to take a page; answers are waited for as long as it takes
ROUND_S = 0.5  # then the resolver has its turn
WAIT_S = 0.1  # for the first answer of those in flight
LEASE_MS = 2000  # of a turn to drain
ALARM_EVERY_S = 60.0
COUNT_EVERY_S, COUNT_SHARE = 0.4, 20  # at most a twentieth of the time is spent on it
LOOK_EVERY_S = 5.0  # for rows that other processes have left
FORBIDDEN_RETRY_S = 10.0  # what this user may not send others may have sent by then
FORBIDDEN_PARKED_S = 24 * 3600.0  # the service that may may be down for a while; meanwhile nothing waits for its rows
FORBIDDEN_MAX = 1000
VOID = "void"
_CALLS_MAX = 3  # until one goes over the connection that there was before
_FOR_GOOD = (
    BadRequestError, UnknownTopicError, StaleTopicError, ForbiddenError, TopicClosedError, InvalidBatchError,
    TooLargeError,
)  # fmt: skip


class DrainError(TxmqError):
    """Broker and database do not agree about what was drained: one of them was restored. Nothing is sent."""


class Agreed(NamedTuple):
    """Numbers that fit together: the last one that the broker took, and the last one that the database gave."""

    taken: int
    given: int


class Taken(NamedTuple):
    """What a broker knows of a series: the last number, and which row took each of the last ones."""

    last: int
    rows: dict[int, str]


@dataclass(slots=True)
class _Flight:
    """A row on its way.

    Attributes:
        is_late: it was waited for; others are waited for instead.
    """

    row: OutboxRow
    is_void: bool
    session: NumberingSession
    counter: int
    answer: Answer
    is_late: bool = False

    def finish(self) -> None:
        """Let the broker drop the outcome: the number says what was taken."""
        self.session.finished(self.counter)


class Drainer:
    """One resource's at one broker. See the module's docstring. Used by one thread at a time.

    Attributes:
        home: whose rows it drains, 16 hex digits; LONE at a broker without a registry.
        series: the numbering that was compared last.
    """

    def __init__(
        self, client: Client, state: OutboxState, uuid: str, name: str, clock: Clock, home: str = LONE
    ) -> None:  # fmt: skip
        self._client, self._state, self._uuid, self._clock = client, state.at(home), uuid, clock
        self.home, self._begin_at = home, 0.0
        self._flying: list[_Flight] = []
        self._page_size = PAGE_SIZE_MAX
        self._drained: list[OutboxRow] = []  # placed, and not deleted yet
        self.series, self._taken = "", Taken(0, {})
        self._sent_through = 0
        self._is_compared = False  # with what the broker knows
        self._connection: object = None  # over which they were compared
        self._is_behind = False  # it lacks numbers that have left: of it only the answers to what it took are wanted
        self._forbidden: dict[str, float] = {}  # rows, and since when
        self._left: dict[frozenset[str], float] = {}  # topics of such rows, and until when they are left to others
        self._look_at = self._alarm_at = self._count_at = 0.0
        self._log = get_logger(resource=name)

    @property
    def is_due(self) -> bool:
        """Whether there may be something to do."""
        return bool(self._flying) or self._state.is_to_be_looked_at or self._clock.monotonic() >= self._look_at

    def round(self, database: ResolvingConnection) -> bool:
        """Look at the broker, and drain for a while; whether more waits that can be sent.

        Raises:
            Exception: database or broker are away, in whatever way, or DrainError; nothing is lost.
        """
        self._look_at = self._clock.monotonic() + LOOK_EVERY_S
        try:
            return self._drain(database, self._outbox_of(database))
        except BaseException:
            self._land()
            raise

    def compare(self, database: ResolvingConnection) -> Agreed:
        """Compare the table with what the broker knows of the series.

        Raises:
            DrainError: they do not fit together; the text has the numbers.
        """
        return self._compare(database, self._outbox_of(database))

    def has_older(self, database: ResolvingConnection, until_ms: int) -> bool:
        """See ``OutboxSeries``."""
        assert database.outbox is not None
        return database.outbox.at(self.home).has_older(database.connection, until_ms)

    def _outbox_of(self, database: ResolvingConnection) -> OutboxTables:
        """The rows of the home, which has a numbering from then on, and what was left to it as a lone broker's."""
        assert database.outbox is not None
        outbox, now = database.outbox.at(self.home), self._clock.monotonic()
        if self.home != LONE and now >= self._begin_at:
            outbox.begin(database.connection, f"{OSRandom().bits(128):032x}")
            self._begin_at = now + LOOK_EVERY_S
        return outbox

    def _drain(self, database: ResolvingConnection, outbox: OutboxTables) -> bool:
        connection, state = database.connection, self._state
        self._count(connection, outbox)
        self._look_if_tripped(connection, outbox)
        may_wait = state.may_wait
        if may_wait and not self._is_compared:
            self._compare(database, outbox)
        if not may_wait or not outbox.hold(connection, state.holder, LEASE_MS):
            self._land()
            return False
        until = self._clock.monotonic() + ROUND_S
        is_more = True
        while is_more and self._clock.monotonic() < until:
            if not self._is_compared:
                self._compare(database, outbox)
            is_sent = self._send(connection, outbox)
            is_more = self._settle(connection, outbox) or is_sent or bool(self._flying)
            if len(self._drained) >= DELETE_SIZE or not is_sent:
                self._delete(connection, outbox)
        self._delete(connection, outbox)
        if not is_more:
            if self._left_to_others():
                outbox.let_go(connection, state.holder)
            self._count_at = 0.0
            self._is_compared = self._is_compared and not self._is_behind
        self._count(connection, outbox)
        return is_more

    def _look_if_tripped(self, connection: Any, outbox: OutboxTables) -> None:
        """Look whether the broker is there again, also if nothing can be drained: blocks are to try it again."""
        if self._state.is_tripped:
            # As in ``_call``, behind which there is a journal: a broker whose disk hangs answers a ping all the same.
            self._client.control.call("drained", outbox.series(connection).name, timeout=REQUEST_TIMEOUT_S)
            self._state.close()
            self._is_compared = False  # broker or database may have been restored while it was away

    def _count(self, connection: Any, outbox: OutboxTables) -> None:
        """Count what waits, now and then: that reads the whole table."""
        began = self._clock.monotonic()
        if began >= self._count_at:
            newest = self._state.newest
            size = outbox.size(connection)
            self._state.counted(size, newest)
            now = self._clock.monotonic()
            self._count_at = now + max(COUNT_EVERY_S, COUNT_SHARE * (now - began))
            self._alarm(size)

    def _alarm(self, size: OutboxSize) -> None:
        """Messages wait for too long."""
        now = self._clock.monotonic()
        if size.age_ms > self._state.options.alarm_after_s * 1000 and now >= self._alarm_at:
            self._alarm_at = now + ALARM_EVERY_S
            self._log.error("outbox: messages wait", **size._asdict())

    # --- agreeing with the broker ------------------------------------------------------------------------------------

    def _compare(self, database: ResolvingConnection, outbox: OutboxTables) -> Agreed:
        connection = database.connection
        with own_transaction(connection, outbox.dialect, outbox.place):
            database.table.require_known(connection)
        # In this order: a number that the broker has is in the table by then. Others may go on all the time: what they
        # have taken out of the table by then, the broker has when it is asked once more.
        self.series = outbox.series(connection).name
        taken = self._ask()
        series, numbers = outbox.series(connection), outbox.numbers(connection)
        if series.name != self.series:
            raise SeriesChangedError("the outbox was numbered anew")
        at, given = taken.last, series.last
        left = given  # the highest number that has left: a row below it may still wait for its place
        while left in numbers:
            left -= 1
        self._require(at <= given, f"the broker took {at} rows, and {given} have a number: was the database restored?")
        later = at if at >= left else self._asked_again().last
        found = f"the broker took {later} rows, and number {left} has left: was it restored?"
        problem = found if later < left else None
        self._require(problem is None or min(numbers, default=given) <= at, problem or "")
        for number, row_id in numbers.items():
            if number <= taken.last:
                known = taken.rows.get(number)
                self._require(known in (row_id, VOID), f"row {number} is {row_id} here, and {known} at the broker")
        self._taken, self._sent_through, self._is_compared = taken, 0, True
        self._state.problem, self._is_behind = problem, problem is not None
        return Agreed(at, given)

    def _ask(self) -> Taken:
        answer = self._call()
        self._state.close()
        told = json_object(answer)
        return Taken(int(told["last"]), {int(number): str(row) for number, row in told["rows"].items()})

    def _asked_again(self) -> Taken:
        """Ask over the same connection."""
        connection = self._connection
        taken = self._ask()
        if self._connection is not connection:
            raise ConnectionLostError("the connection was made anew meanwhile")
        return taken

    def _call(self) -> bytes:
        """Ask, and know over which connection."""
        for _ in range(_CALLS_MAX):
            control = self._client.control
            self._connection = control.live
            answer = control.call("drained", self.series, timeout=REQUEST_TIMEOUT_S)
            if self._connection is not None and self._connection is control.live:
                return answer
        raise ConnectionLostError("the connection is made anew each time")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            self._state.problem = problem
            raise DrainError(f"the outbox is not drained: {problem}")

    # --- sending -----------------------------------------------------------------------------------------------------

    def _send(self, connection: Any, outbox: OutboxTables) -> bool:
        """Send a page of rows, if there is room; whether any was sent."""
        size, flying = self._page_size, self._flying
        in_flight_bytes = sum(len(flight.row.batches) for flight in flying)
        if len(flying) + size > IN_FLIGHT_MAX or in_flight_bytes > IN_FLIGHT_BYTES_MAX:
            return False
        rows = outbox.numbered(connection, self._sent_through, size, self.series)
        if self._is_behind:
            rows = [row for row in rows if row.number <= self._taken.last]
        elif len(rows) < size and outbox.number(connection, without=self._left_to_others()):
            rows = outbox.numbered(connection, self._sent_through, size, self.series)
        if rows:
            crash_point("client.outbox.numbered")
        most = self._session.request_size_bytes_max
        large = next((row for row in rows if len(row.batches) > most and not self._needs_no_body(row)), None)
        if large is not None and large is rows[0]:
            # Not sent: the broker ends the connection with its answer, which is lost with that more often than not.
            self._park(connection, outbox, large, TooLargeError(f"{len(large.batches)} bytes, the broker takes {most}"))
            return True
        rows = [row for row in rows if large is None or row.number < large.number]
        if rows:
            self._submit(rows)
            self._sent_through = rows[-1].number
            self._page_size = min(2 * size, PAGE_SIZE_MAX)
        return bool(rows)

    @property
    def _session(self) -> NumberingSession:
        return cast("NumberingSession", self._client.session)

    def _needs_no_body(self, row: OutboxRow) -> bool:
        """Whether the broker takes no messages for its number: it is void, or it has them and is only asked again."""
        return row.state != WAITING or self._taken.rows.get(row.number) == row.id

    def _submit(self, rows: Sequence[OutboxRow]) -> None:
        voids = [self._is_void(row) for row in rows]
        session, most = self._session, self._session.request_size_bytes_max
        ids = [session.next_txid() for _ in rows]
        floor = session.finished_through
        requests = [
            TransactionRequest(
                f"commit {txid}",
                {
                    "drained": self.series, "number": row.number, "row": VOID if is_void else row.id,
                    "uuid": self._uuid, "floor": floor,
                },
                [] if is_void or (row.id == self._taken.rows.get(row.number) and len(row.batches) > most)
                else [row.batches],
            )
            for row, is_void, (_, txid) in zip(rows, voids, ids, strict=True)
        ]  # fmt: skip
        try:
            answers = self._client.control.submit_transactions(requests, SEND_S, self._connection)
        except BaseException:
            for counter, _ in ids:
                session.finished(counter)
            raise
        for row, is_void, (counter, _), answer in zip(rows, voids, ids, answers, strict=True):
            self._flying.append(_Flight(row, is_void, session, counter, answer))
        crash_point("client.outbox.sent")

    def _is_void(self, row: OutboxRow) -> bool:
        known = self._taken.rows.get(row.number)
        is_void = known == VOID if known is not None else row.state != WAITING
        # Hot (once a row): no text is made that nobody reads.
        if is_void and row.state == WAITING:
            self._require(False, f"row {row.number} waits here, and is void at the broker")
        if not is_valid_name(row.id):
            self._require(False, f"row {row.number} has an id that is none: {row.id[:80]!r}")
        return is_void

    # --- taking the answers ------------------------------------------------------------------------------------------

    def _settle(self, connection: Any, outbox: OutboxTables) -> bool:
        """Take the answers that are in; whether there was any.

        Raises:
            TxmqError: away, or out of turn: what was in flight is sent again behind a comparison.
        """
        self._await_one()
        answered = [flight for flight in self._flying if flight.answer.done]
        self._flying = [flight for flight in self._flying if not flight.answer.done]
        refused, known = None, len(self._drained)
        for flight in answered:
            flight.finish()
            if refused is None:
                refused = self._result(flight)
            if refused is None and not flight.is_void:
                self._drained.append(flight.row)
            elif refused is None:
                outbox.voided(connection, flight.row)
        self._state.placed(row.id for row in self._drained[known:])
        if refused is not None:
            self._refused(connection, outbox, *refused)
        return bool(answered)

    def _await_one(self) -> None:
        """Wait for an answer, of those that are not known to take long if there are any."""
        flight = min(self._flying, key=lambda flight: flight.is_late, default=None)
        if flight is not None:
            flight.answer.look()
            if not any(flight.answer.done for flight in self._flying):
                with suppress(TxmqError):  # taken by ``_settle``
                    flight.answer.result(WAIT_S)
                flight.is_late = True

    def _delete(self, connection: Any, outbox: OutboxTables) -> None:
        if self._drained:
            crash_point("client.outbox.answered")
            outbox.delete(connection, self._drained)
            self._removed()
            crash_point("client.outbox.deleted")

    def _removed(self) -> None:
        self._state.left(len(self._drained), sum(len(row.batches) for row in self._drained))
        self._drained.clear()

    def _result(self, flight: _Flight) -> tuple[_Flight, TxmqError] | None:
        try:
            flight.answer.result()
        except TxmqError as error:
            return flight, error
        return None

    def _refused(self, connection: Any, outbox: OutboxTables, flight: _Flight, error: TxmqError) -> None:
        """Park a row that is refused for good; whatever was behind it was refused, too."""
        self._delete(connection, outbox)
        self._land()
        self._page_size = PAGE_SIZE_MIN
        row = flight.row
        is_taken = self._taken.rows.get(row.number) == row.id  # only the answer was lost
        if flight.is_void or is_taken or not isinstance(error, _FOR_GOOD) or not isinstance(error, BrokerError):
            if not isinstance(error, OutOfTurnError):
                raise error
            return
        if isinstance(error, ForbiddenError) and self._leave_to_others(connection, outbox, row, error):
            return
        self._park(connection, outbox, row, error)

    def _park(self, connection: Any, outbox: OutboxTables, row: OutboxRow, error: BrokerError) -> None:
        self._log.error("outbox: parked, the broker refuses it", row=row.id, number=row.number, error=str(error))
        outbox.park(connection, row, f"{error.wire_name}: {error}")
        crash_point("client.outbox.parked")

    def _leave_to_others(self, connection: Any, outbox: OutboxTables, row: OutboxRow, error: ForbiddenError) -> bool:
        """Leave a row that this process's user may not send to other users; False if none has sent it for long."""
        now = self._clock.monotonic()
        if len(self._forbidden) >= FORBIDDEN_MAX:
            self._forbidden.clear()
        if now >= self._forbidden.setdefault(row.id, now) + FORBIDDEN_PARKED_S:
            del self._forbidden[row.id]
            return False
        topics = outbox.recall(connection, row, f"{error.wire_name}: {error}")
        if topics:
            self._left[topics] = now + FORBIDDEN_RETRY_S
            self._log.warning("outbox: left to other users, this one may not send it", row=row.id, error=str(error))
        return True

    def _left_to_others(self) -> Collection[frozenset[str]]:
        now = self._clock.monotonic()
        self._left = {topics: until for topics, until in self._left.items() if until > now}
        return self._left.keys()

    def _land(self) -> None:
        """Forget what is in flight: the broker knows what it took."""
        for flight in self._flying:
            flight.finish()
        self._flying.clear()
        self._drained.clear()
        self._is_compared, self._sent_through = False, 0
