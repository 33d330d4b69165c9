"""An XA resource over the simulated database: the seams of ``MySQLResource``, for simulations and unit tests.

Theory of operation. ``SimulatedXAResource`` is an ``XAResource`` (``txmq.xa.two_phase.resource_ports``); its branches
and recoveries call the sessions of a ``SimulatedXADatabase`` in the order in which ``MySQLResource`` sends statements,
and read the answers the same way.
The body of a block writes with ``connection.insert(table, key, value)``, ``remove`` and ``read``.

Invariants:
    * one thread at a time, no clock of its own;
    * marker rows and identity are rows of the database: a crash treats them as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tools.simulated.xa_answers import LOST, NOTA, RB_ROLLBACK, SimulatedError
from tools.simulated.xa_database import SimulatedSession, SimulatedXADatabase
from txmq.errors import ConfigError, RolledBackError, TransactionStateError, TransactionTimeoutError
from txmq.runtime.call_limits import CallLimit
from txmq.xa.database.guarded_connection import Guard
from txmq.xa.database.marker_table import TokenRow
from txmq.xa.two_phase.resource_ports import (
    Bqual,
    Ended,
    ListedXid,
    PrepareUnknownError,
    UsedXAConnection,
    encode_bqual,
    listed_xid,
)
from txmq.xid import FORMAT_ID, TxId, Xid

MARKER, IDENTITY, TOKEN, TOUCH = "txmq_marker", "txmq_marker_identity", "txmq_marker_token", "txmq_touch"
COMMITTED = "committed"
_GONE_TRIES = 400  # looks at the processlist until a killed session has ended


class SimulatedXAConnection:
    """The session as the body of a block sees it: the first error dooms the branch."""

    def __init__(self, session: SimulatedSession, guard: Guard) -> None:
        self._session, self._guard = session, guard

    def insert(self, table: str, key: object, value: object = None) -> None:
        """INSERT one row."""
        self._guard.call(self._session.insert, table, key, value)

    def remove(self, table: str, key: object) -> None:
        """DELETE one row, if it is there."""
        self._guard.call(self._session.remove, table, key)

    def read(self, table: str, key: object) -> object:
        """A row's value; None without one."""
        return self._guard.call(self._session.read, table, key)


class SimulatedXAResource:
    """See ``xa.two_phase.resource_ports.XAResource``.

    Args:
        uuid: what ``install`` writes into a database without an identity, 32 hex digits.
        now_ms: the database's clock.
        marker: see ``MySQLResource``.
    """

    def __init__(
        self, name: str, database: SimulatedXADatabase, uuid: str, now_ms: Callable[[], int], *, marker: bool = True
    ) -> None:
        self.name, self.database, self.now_ms, self.has_marker = name, database, now_ms, marker
        self.uuid: str | None = None
        self._new_uuid = uuid

    def install(self, _client: Any = None) -> None:
        """Write the identity if there is none."""
        session = self.database.connect(autocommit=True)
        with suppress(SimulatedError):
            session.insert(IDENTITY, 1, (self.name, self._new_uuid))
        self._identify(session)
        session.close()

    def using(self, connection: SimulatedSession) -> UsedXAConnection:
        """This resource with a session of the caller's."""
        return UsedXAConnection(self, connection)

    def enlist(self, cluster: str, txid: str, timeout_s: float, connection: Any = None) -> SimulatedXABranch:
        """See ``XAResource``. Raises ``SimulatedError`` if the database is away."""
        TxId.parse(txid)
        session: SimulatedSession = connection or self.database.connect()
        if session.autocommit or session.is_in_transaction:
            raise TransactionStateError(f"resource {self.name!r}: cannot begin on this connection")
        self._identify(session)
        session.rollback()
        deadline_ms = self.now_ms() + int(timeout_s * 1000)
        return SimulatedXABranch(self, session, txid, deadline_ms, is_own=connection is None)

    def open_recovery(self, cluster: str) -> SimulatedXARecovery:
        """See ``XAResource``. Raises ``SimulatedError`` if the database is away."""
        session = self.database.connect(autocommit=True)
        self._identify(session)
        return SimulatedXARecovery(self, session, int(cluster, 16))

    def new_token(self) -> str:
        """See ``XAResource``."""
        return f"{next(self.database.numbers):032x}"

    def close(self) -> None:
        """Nothing is kept."""

    def _identify(self, session: SimulatedSession) -> None:
        identity = session.read(IDENTITY, 1)
        if not isinstance(identity, tuple):
            raise ConfigError(f"resource {self.name!r} is not installed: call install() once")
        if identity[0] != self.name or self.uuid not in (None, identity[1]):
            raise ConfigError(f"resource {self.name!r}: another database answers: {identity}")
        self.uuid = identity[1]


class SimulatedXABranch:
    """See ``xa.two_phase.resource_ports.XABranch``."""

    def __init__(
        self, resource: SimulatedXAResource, session: SimulatedSession, txid: str, deadline_ms: int, *, is_own: bool
    ) -> None:
        self.resource, self._is_own, self.deadline_ms = resource, is_own, deadline_ms
        self._session, self._txid, self._guard = session, txid, Guard()
        self.connection: Any = SimulatedXAConnection(session, self._guard)
        self.xid = Xid(
            FORMAT_ID, txid.encode("ascii"), encode_bqual(Bqual(resource.uuid or "", deadline_ms, session.number))
        )
        self._wrote, self._has_ended, self.ended_by_body = True, False, False
        session.xa_start(self.xid)

    def details(self) -> dict[str, Any]:
        """The details of the branch in ``decide``."""
        return {
            "bqual": self.xid.bqual.decode("ascii"),
            "connection": self._session.number,
            "wrote": self._wrote,
            "marker": self.resource.has_marker,
            "table": MARKER,
        }

    def end_body(self) -> None:
        """See ``XABranch``."""
        self._guard.end()
        if self._guard.error is not None:
            raise RolledBackError(f"a statement failed: {self._guard.error}", self._txid) from self._guard.error
        if not self.resource.has_marker:
            self._wrote = self._session.branch is not None and self._session.branch.has_written

    def prepare(self) -> None:
        """See ``XABranch``. The session is lost in the middle of what goes in one packet: nothing is known."""
        is_marked = True
        try:
            if self.resource.has_marker:
                is_marked = self._insert_marker()
            self._session.xa_end(self.xid)
            if not self._wrote:
                self._end_unwritten()
                return
            self._session.xa_prepare(self.xid)
        except SimulatedError as error:
            if error.code != LOST:
                raise RolledBackError(f"the branch could not be ended and prepared: {error}", self._txid) from error
            raise PrepareUnknownError(f"may be prepared: {error}", self._txid) from error
        if not is_marked:
            late = TransactionTimeoutError("the deadline has passed on the database's clock", self._txid)
            raise PrepareUnknownError("prepared without its marker", self._txid) from late

    def _end_unwritten(self) -> None:
        with suppress(SimulatedError):
            self._session.xa_rollback(self.xid)
        self._has_ended = True
        self.finish()

    def commit(self) -> bool:
        """See ``XABranch``."""
        if self._has_ended:
            return True
        try:
            self._session.xa_commit(self.xid)
        except SimulatedError:
            self.abandon()
            return False
        self._has_ended = True
        self.finish()
        return True

    def roll_back(self, prepared: bool) -> bool:
        """See ``XABranch``."""
        self._guard.end()
        if self._has_ended:
            return True
        with suppress(SimulatedError):
            self._session.xa_end(self.xid)
        try:
            self._end_rolled_back()
            if prepared:
                self._session.touch()
        except SimulatedError:
            self._has_ended = not prepared
            self.abandon()
            return self._has_ended
        self._has_ended = True
        self.finish()
        return True

    def _end_rolled_back(self) -> None:
        try:
            self._session.xa_rollback(self.xid)
        except SimulatedError as error:
            if error.code not in (NOTA, RB_ROLLBACK):
                raise

    def finish(self) -> None:
        """See ``XABranch``: sessions are not pooled here."""
        self._guard.end()
        if self._is_own:
            self._session.close()

    def abandon(self) -> None:
        """See ``XABranch``."""
        self._guard.end()
        self._session.close()

    def _insert_marker(self) -> bool:
        identity = self._session.read(IDENTITY, 1)
        if self.resource.now_ms() >= self.deadline_ms or identity != (self.resource.name, self.resource.uuid):
            return False
        self._session.insert(MARKER, self._txid, (COMMITTED, self.resource.now_ms()))
        return True


class SimulatedXARecovery:
    """See ``xa.two_phase.resource_ports.Recovery``."""

    def __init__(self, resource: SimulatedXAResource, session: SimulatedSession, cluster: int) -> None:
        self.uuid, self.limit = resource.uuid or "", CallLimit()
        self._resource, self._session, self._cluster = resource, session, cluster

    def prepared(self) -> list[ListedXid]:
        """See ``Recovery``."""
        found = (listed_xid(xid) for xid in self._session.xa_recover())
        return [
            item for item in found if item is not None and item.uuid == self.uuid and item.txid.cluster == self._cluster
        ]

    def commit(self, xid: Xid) -> Ended:
        """See ``Recovery``, and ``MySQLRecovery``: DONE only when the branch has let go of its marker row."""
        ended = _ended(lambda: self._session.xa_commit(xid))
        if ended is Ended.DONE:
            self._session.read_locked(MARKER, xid.gtrid.decode("ascii"))
        return ended

    def rollback(self, xid: Xid) -> Ended:
        """See ``Recovery``."""
        return _ended(lambda: self._session.xa_rollback(xid))

    def force(self) -> None:
        """See ``Recovery``."""
        self._session.touch()

    def marker_outcome(self, txid: str) -> str | None:
        """See ``Recovery``."""
        row = self._session.read_locked(MARKER, txid)
        self._session.touch()  # what was seen is durable before it is told
        return str(row[0]) if isinstance(row, tuple) else None

    def token_row(self, home: str) -> TokenRow:
        """See ``Recovery``."""
        row = self._session.read(TOKEN, home)
        return row if isinstance(row, TokenRow) else TokenRow()

    def draw_token(self, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()) -> bool:
        """See ``Recovery``."""
        assert not rolled_back, "an XA branch leaves no rolled-back marker"
        return self._session.replace(TOKEN, home, None if before == TokenRow() else before, after)

    def committed_before(self, age_ms: int, after: str, limit: int) -> list[str]:
        """See ``Markers``."""
        latest = self.now_ms() - age_ms
        rows = self._resource.database.committed.items()
        old = [(row[1], str(key)) for (table, key), row in rows if table == MARKER and isinstance(row, tuple)]
        return sorted(txid for written_ms, txid in old if written_ms < latest and txid > after)[:limit]

    def delete_committed(self, txids: Sequence[str]) -> None:
        """See ``Recovery``."""
        for txid in txids:
            self._session.remove(MARKER, txid)

    def kill(self, connection: int) -> bool:
        """See ``Recovery``."""
        if connection == self._session.number or not self._resource.database.is_in_transaction(connection):
            return False
        if not self._resource.database.kill(connection):
            return False
        for _ in range(_GONE_TRIES):
            if not self._session.sees(connection):
                break
        return True

    def now_ms(self) -> int:
        """See ``Recovery``."""
        return self._resource.now_ms()

    def close(self) -> None:
        """See ``Recovery``."""
        self._session.close()


def _ended(call: Callable[[], None]) -> Ended:
    try:
        call()
    except SimulatedError as error:
        if error.code == NOTA:
            return Ended.NOT_KNOWN
        if error.code == RB_ROLLBACK:
            return Ended.ROLLED_BACK
        raise
    return Ended.DONE
