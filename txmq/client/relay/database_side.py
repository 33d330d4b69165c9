"""The database's side of a relay: one connection, one transaction at a time, which begins with the relay row's lock.

Invariants:
    * a step that meets an error closes the connection, which undoes what is open; the next step opens another one;
    * a claim's commit is forced: the connection is not one on which commits may be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, TypeVar

from txmq.errors import ConfigError, caused
from txmq.outbox.outbox import Outbox, begin_statement, let_commit_commit
from txmq.outbox.page import BYTES_PER_S, Waiting
from txmq.outbox.relay_core import PAGE_BYTES, Claim, Locked, Read, RelayRow
from txmq.outbox.tables import Backlog, OutboxTables
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.ports import Clock
from txmq.xa.database.dbapi import run, silence_copy
from txmq.xa.database.refusals import described, refusal_of

LEASE_MS: Final = 15_000  # and longer, if the page is larger than most
IDLE_PAGE_S: Final = 10.0
LOOK_EVERY_S: Final = 1.0  # for what is parked for homes that are away
TURN_S: Final = 0.0002  # SQLite's own pauses grow, and others come first for ever
TURN_S_MAX: Final = 5.0
SLOW_READ_S: Final = 0.04  # deleted rows are passed on the way: a million in 60 ms (MariaDB), 120 ms (PostgreSQL)
SLOW_ROW_S: Final = 0.000_05  # that each row may take on top, on a busy machine
REST_S_MAX: Final = 1.0
_AWAY: Final = "outbox's database does not answer; it is tried again"
_REFUSED: Final = "outbox cannot be relayed until somebody corrects it; it is tried again, more and more rarely"

Durability = Literal["forced", "weak"]

T = TypeVar("T")


class RelaySession(NamedTuple):
    """A connection on which the relay row may be locked: of a relay, or of an operator.

    Attributes:
        begin: what begins a transaction there; empty if the driver does so by itself.
    """

    connection: Any
    tables: OutboxTables
    begin: str

    @classmethod
    def opened(cls, outbox: Outbox, connect: Callable[[], Any], *, durability: Durability = "forced") -> RelaySession:
        """A new one, whose commits are forced, unless less will do.

        Raises:
            ConfigError: the outbox is not installed there, or the database may lose its commits.
            the driver's error: it is away.
        """
        connection = connect()
        try:
            tables = outbox.tables(connection)
            let_commit_commit(connection, tables.dialect)
            begin = tables.begin_of_relays or begin_statement(connection, tables.dialect)
            for statement in tables.for_relays(connection):
                run(connection, statement)
            connection.commit()  # PostgreSQL takes a SET back with its transaction
            tables.require_shape(connection)
            connection.rollback()
            tables.dialect.strengthen(connection)
            weakness = tables.dialect.weakness(connection)
        except BaseException:
            with suppress(Exception):
                connection.close()
            raise
        if weakness is not None and durability != "weak":
            connection.close()
            raise ConfigError(
                f"outbox {outbox.name!r}: a power loss may take the relay's commits back, and stop the line: "
                f'{weakness}; correct it, or accept it with durability="weak"'
            )
        return cls(connection, tables, begin)

    def lock(self, clock: Clock) -> tuple[RelayRow, bool]:
        """Begin, and lock the relay row; see ``OutboxTables.lock``."""
        return self._take_turn(clock) if self.tables.dialect.name == "sqlite" else self._lock()

    def _lock(self) -> tuple[RelayRow, bool]:
        if self.begin:
            run(self.connection, self.begin)
        return self.tables.lock(self.connection)

    def _take_turn(self, clock: Clock) -> tuple[RelayRow, bool]:
        """Lock the file of SQLite, as often as asked for."""
        connection, until = self.connection, clock.monotonic() + TURN_S_MAX
        ((patience_ms,),), _ = run(connection, "PRAGMA busy_timeout")
        run(connection, "PRAGMA busy_timeout = 0")
        try:
            while True:
                try:
                    return self._lock()
                except Exception as error:
                    if not self.tables.dialect.may_pass(error) or clock.monotonic() >= until:
                        raise
                clock.sleep(TURN_S)
        finally:
            run(connection, f"PRAGMA busy_timeout = {int(patience_ms)}")


class RelayDatabase:
    """See the module's docstring.

    Args:
        connect: opens a connection for this relay alone.
        durability: ``weak`` if the database may lose commits: then a power loss may stop the line.

    Attributes:
        failure: what the last try ended with, if it failed; what the database refuses is a ConfigError.
        parked_for: homes that units are parked for, as last seen.
        answering: those of them that answer: the next read lets their units wait again.
        read_s: how long the last read took, if that was long.

    Thread safety: the relay's thread.
    """

    def __init__(
        self, outbox: Outbox, connect: Callable[[], Any], clock: Clock, durability: Durability = "forced"
    ) -> None:
        self._outbox, self._connect, self._clock, self._durability = outbox, connect, clock, durability
        self._session: RelaySession | None = None
        self._page_at = self._looked_at = float("-inf")  # when a page was sent last; when parked rows were looked at
        self._log = get_logger(outbox=outbox.name)
        self._sparingly = Sparingly(self._log, clock)
        self._lease_ms = LEASE_MS
        self.failure: Exception | None = None
        self.parked_for: Collection[int] = ()
        self.answering: Collection[int] = ()
        self.read_s = 0.0

    def page_was_sent(self) -> None:
        """A page is on its way, perhaps an empty one."""
        self._page_at = self._clock.monotonic()

    def peek(self) -> RelayRow | None:
        """The relay row without a lock."""
        return self._tried(self._peek)

    def lock(self) -> Locked | None:
        """Begin, and lock the relay row."""
        return self._tried(self._lock)

    def unlock(self) -> None:
        """Undo the open transaction."""
        if self._session is not None:
            self._tried(self._rollback)

    def read(self, step: Read) -> Waiting | None:
        """Delete rows that are messages, and read the next ones."""
        return self._tried(lambda: self._read(step))

    def claim(self, step: Claim) -> bool:
        """Park, claim, commit; whether it is known to have happened."""
        return self._tried(lambda: self._claim(step)) is True

    def renew(self, row: RelayRow) -> None:
        """Keep the lease while a page is on its way."""
        self._tried(lambda: self._renew(row))

    @property
    def refusal(self) -> ConfigError | None:
        """Why this database will not do, as long as nobody corrects it."""
        return self.failure if isinstance(self.failure, ConfigError) else None

    def backlog(self) -> Backlog | None:
        """How much waits, and since when."""
        return self._tried(self._backlog)

    def nothing_waits(self) -> bool:
        """Whether there is nothing to send, for a relay that is not its turn."""
        return self._tried(self._nothing_waits) is True

    def release(self, holder: str) -> None:
        """Let another relay go on at once, if this one has the lease; a database that is away is not waited for."""
        if self.failure is None:
            self._tried(lambda: self._release(holder))

    def close(self) -> None:
        """Let go of the connection; what is open is undone."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                session.connection.close()

    def forked(self) -> None:
        """In a forked child."""
        if self._session is not None:
            silence_copy(self._session.connection)

    def _tried(self, work: Callable[[], T]) -> T | None:
        try:
            found = work()
        except Exception as error:  # noqa: BLE001  the driver's, whatever it is
            self.close()
            self._failed(error)
            return None
        if self.failure is not None:
            self._log.info("outbox's database is there")
        self.failure = None
        return found

    def _failed(self, error: Exception) -> None:
        """Say what is the matter: at once if it is new, then rarely."""
        before, self.failure = self.failure, self._as_refusal(error)
        event = _AWAY if self.refusal is None else _REFUSED
        if before is None or _refused(before) != _refused(self.failure):
            self._sparingly.forget(event)
        self._sparingly.warning(event, error=described(self.failure))

    def _as_refusal(self, error: Exception) -> Exception:
        refusal = None if isinstance(error, ConfigError) else refusal_of(error)
        if refusal is None:
            return error
        return caused(ConfigError(f"outbox {self._outbox.name!r}: {refusal.value}: {described(error)}"), error)

    def _open(self) -> RelaySession:
        if self._session is None:
            self._session = RelaySession.opened(self._outbox, self._connect, durability=self._durability)
        return self._session

    def _peek(self) -> RelayRow:
        connection, tables, _ = self._open()
        row = tables.peek(connection)
        self._rollback()
        if row is None:
            raise ConfigError(f"table {tables.relay} has no row: call install() of the outbox once")
        return row

    def _backlog(self) -> Backlog:
        connection, tables, _ = self._open()
        found = tables.backlog(connection)
        self._rollback()
        return found

    def _lock(self) -> Locked:
        row, is_over = self._open().lock(self._clock)
        is_due = self._clock.monotonic() - self._page_at >= IDLE_PAGE_S
        return Locked(row, is_over, is_due)

    def _rollback(self) -> None:
        if self._session is not None:
            self._session.connection.rollback()

    def _release(self, holder: str) -> None:
        session = self._open()
        session.lock(self._clock)
        session.tables.release(session.connection, holder)
        session.connection.commit()

    def _read(self, step: Read) -> Waiting:
        connection, tables, _ = self._open()
        tables.delete(connection, step.gone)
        self._look_at_parked(connection, tables)
        begun = self._clock.monotonic()
        waiting = tables.waiting(connection, step.rows_max, step.bytes_max)
        took_s = self._clock.monotonic() - begun
        bytes_max = max([step.bytes_max, PAGE_BYTES, *(len(row.value) for row in waiting.rows[:1])])
        self._lease_ms = LEASE_MS + 1000 * (bytes_max - PAGE_BYTES) // BYTES_PER_S
        is_slow = took_s >= SLOW_READ_S + SLOW_ROW_S * len(waiting.rows)
        self.read_s = min(took_s, REST_S_MAX) if is_slow else 0.0
        return waiting._replace(is_slow=self.read_s > 0)

    def _look_at_parked(self, connection: Any, tables: OutboxTables) -> None:
        """What is parked for homes that answer waits again; which others there are is asked now and then."""
        for home in self.answering:
            tables.unpark_home(connection, home)
        self.parked_for = [home for home in self.parked_for if home not in self.answering]
        self.answering = ()
        if self._clock.monotonic() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = self._clock.monotonic()
            self.parked_for = tables.away(connection)

    def _renew(self, row: RelayRow) -> None:
        session = self._open()
        self._lock()
        session.tables.renew(session.connection, row, self._lease_ms)
        session.connection.commit()

    def _nothing_waits(self) -> bool:
        connection, tables, _ = self._open()
        found = tables.nothing_waits(connection)
        self._rollback()
        return found

    def _claim(self, step: Claim) -> bool:
        connection, tables, _ = self._open()
        for why in dict.fromkeys(why for _, why in step.parked):
            tables.park(connection, [row for row, reason in step.parked if reason == why], why)
        tables.claim(connection, step.row, self._lease_ms)
        crash_point("relay.claim.written")
        connection.commit()
        crash_point("relay.claim.committed")
        if step.parked:
            row, why = step.parked[0]
            self._sparingly.warning("outbox: messages are parked", topic=row.topic, why=why, parked=len(step.parked))
        return True


def _refused(error: Exception) -> str:
    """What is refused; empty if the database does not answer."""
    return str(error) if isinstance(error, ConfigError) else ""
