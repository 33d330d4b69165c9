"""The database's side of a relay: one connection, one transaction at a time, which begins with the relay row's lock.

Invariants:
    * a step that meets an error closes the connection, which undoes what is open; the next step opens another one;
    * a claim's commit is forced: the connection is not one on which commits may be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from txmq.errors import ConfigError
from txmq.outbox.outbox import Outbox, begin_statement, let_commit_commit
from txmq.outbox.page import Waiting
from txmq.outbox.relay_core import Claim, Locked, Read, RelayRow
from txmq.outbox.tables import Backlog, OutboxTables
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.xa.database.dbapi import run, silence_copy

LEASE_MS: Final = 15_000
IDLE_PAGE_S: Final = 10.0
_UNKNOWN_TOPIC: Final = "its topic does not exist"
_REFUSED: Final = "the broker refuses it"
_BEHIND: Final = "an earlier message of its key is parked"

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
    def opened(cls, outbox: Outbox, connect: Callable[[], Any]) -> RelaySession:
        """A new one, whose commits are forced.

        Raises:
            ConfigError: the database may lose its commits.
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
            tables.dialect.strengthen(connection)
            weakness = tables.dialect.weakness(connection)
        except BaseException:
            with suppress(Exception):
                connection.close()
            raise
        if weakness is not None:
            connection.close()
            raise ConfigError(f"outbox {outbox.name!r}: a power loss may take the relay's commits back: {weakness}")
        return cls(connection, tables, begin)

    def lock(self) -> tuple[RelayRow, bool]:
        """Begin, and lock the relay row; see ``OutboxTables.lock``."""
        if self.begin:
            run(self.connection, self.begin)
        return self.tables.lock(self.connection)


class RelayDatabase:
    """See the module's docstring.

    Args:
        connect: opens a connection for this relay alone.

    Thread safety: the relay's thread.
    """

    def __init__(self, outbox: Outbox, connect: Callable[[], Any], clock: Clock) -> None:
        self._outbox, self._connect, self._clock = outbox, connect, clock
        self._session: RelaySession | None = None
        self._page_at = float("-inf")  # when a page was sent last
        self._log = get_logger(outbox=outbox.name)
        self._has_failed = False
        self.known_topics: Any = ()

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
        self._tried(self._rollback)

    def read(self, step: Read) -> Waiting | None:
        """Delete rows that are messages, and read the next ones."""
        return self._tried(lambda: self._read(step))

    def claim(self, step: Claim) -> bool:
        """Park, claim, commit; whether it is known to have happened."""
        return self._tried(lambda: self._claim(step)) is True

    def backlog(self) -> Backlog | None:
        """How much waits, and since when."""
        return self._tried(self._backlog)

    def release(self, holder: str) -> None:
        """Let another relay go on at once, if this one has the lease."""
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
            say = self._log.debug if self._has_failed else self._log.warning
            say("outbox's database away", error=repr(error))
            self._has_failed = True
            return None
        self._has_failed = False
        return found

    def _open(self) -> RelaySession:
        if self._session is None:
            self._session = RelaySession.opened(self._outbox, self._connect)
        return self._session

    def _peek(self) -> RelayRow | None:
        connection, tables, _ = self._open()
        row = tables.peek(connection)
        self._rollback()
        return row

    def _backlog(self) -> Backlog:
        connection, tables, _ = self._open()
        found = tables.backlog(connection)
        self._rollback()
        return found

    def _lock(self) -> Locked:
        row, is_over = self._open().lock()
        is_due = self._clock.monotonic() - self._page_at >= IDLE_PAGE_S
        return Locked(row, is_over, is_due)

    def _rollback(self) -> None:
        if self._session is not None:
            self._session.connection.rollback()

    def _release(self, holder: str) -> None:
        connection, tables, _ = self._open()
        tables.release(connection, holder)
        connection.commit()

    def _read(self, step: Read) -> Waiting:
        connection, tables, _ = self._open()
        tables.delete(connection, step.gone)
        return tables.waiting(connection, step.rows_max, step.bytes_max)

    def _claim(self, step: Claim) -> bool:
        connection, tables, _ = self._open()
        tables.park(connection, step.parked, _BEHIND)
        unknown = [row for row in step.bad if row.topic not in self.known_topics]
        tables.park(connection, unknown, _UNKNOWN_TOPIC)
        tables.park(connection, [row for row in step.bad if row not in unknown], _REFUSED)
        tables.claim(connection, step.row, LEASE_MS)
        crash_point("relay.claim.written")
        connection.commit()
        crash_point("relay.claim.committed")
        return True
