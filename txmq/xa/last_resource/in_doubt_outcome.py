r"""How a transaction in doubt is resolved: the steps as a table, and the proof by the marker table.

```
 INSERT --INSERTED---------------------> REPORT_ROLLBACK --REPORTED--> RESOLVED
   |  \--DUPLICATE--> READ --ROLLED_BACK----^   |
   |                   | \---COMMITTED--> REPORT_COMMIT --REPORTED--> RESOLVED
   |                   |                        |
   +------FAILED-------+--------FAILED----------+--> UNDECIDED: again later
   |                   |
   +--HELD-----> HELD: again later
                       |
     READ_ELSEWHERE ---+--COMMITTED--> REPORT_COMMIT
```

READ_ELSEWHERE: here it begins without the newest fencing token: perhaps a copy of the database answers. A committed
    marker proves that the rows are committed wherever it is found; no other row, and no missing one, proves anything.

REPORT_ROLLBACK rests on a row that keeps the owner's out of this database. The one that reports it draws a fencing
token first, which makes it a proof (``xa/fencing.py``).

HELD: an open transaction has the row, uncommitted. Nobody waits for it, so that it keeps nobody else.

CONTRADICTED: the broker decided otherwise.

Invariants:
    * a lock that is held, a deadlock, a busy or lost database, a missing row: UNDECIDED, never a guess;
    * nothing is reported before the row that it rests on is durable (``marker_table``);
    * two resolvers of one transaction meet at the primary key and have the same result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from txmq.errors import BrokerError
from txmq.runtime.call_limits import CallLimit
from txmq.runtime.crashpoints import crash_point
from txmq.state_machine import next_step
from txmq.xa.database import marker_table
from txmq.xa.database.dbapi import is_integrity_error
from txmq.xa.database.marker_table import EXPIRED_SIZE, MarkerTable, TokenRow, TokenTable
from txmq.xa.database.strand_connection import close_connection


def _nothing(_error: BrokerError | None = None) -> None:
    """Do nothing."""


class Unresolved(NamedTuple):
    """A transaction of this process whose end has yet to reach the broker."""

    txid: str
    outcome: str | None  # COMMITTED or ROLLED_BACK of ``marker_table``; None: the table must be asked
    deadline_ms: int
    on_resolved: Callable[[], None] = _nothing
    of: str | None = None  # the transaction of whose marker it is a part at another home
    on_contrary: Callable[[BrokerError], None] = _nothing  # ahead of ``on_resolved``: the broker's refusal

    @property
    def marker(self) -> str:
        """The transaction whose marker proves the outcome."""
        return self.of or self.txid


class ResolvingConnection(NamedTuple):
    """A connection of a resolver."""

    connection: Any
    table: MarkerTable
    uuid: str
    limit: CallLimit = CallLimit()  # without effect

    def is_duplicate(self, error: Exception) -> bool:
        """Whether an INSERT failed because the row is there."""
        return is_integrity_error(error)

    def token_row(self, home: str) -> TokenRow:
        """See ``Drawn``."""
        return TokenTable(self.table).row(self.connection, home)

    def draw_token(self, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()) -> bool:
        """See ``Drawn``."""
        return TokenTable(self.table).draw(self.connection, home, before, after, rolled_back)

    def committed_before(self, age_ms: int, after: str, limit: int) -> list[str]:
        """See ``Markers``."""
        return self.table.committed_before(self.connection, age_ms, after, limit)

    def delete_committed(self, txids: Sequence[str]) -> None:
        """See ``Markers``."""
        self.table.delete_committed(self.connection, txids)

    def delete_expired(self) -> bool:
        """Remove some rolled-back markers that are old enough; whether more may be left."""
        return self.table.delete_expired_rolled_back(self.connection) >= EXPIRED_SIZE

    def close(self) -> None:
        """End the session."""
        self.limit.end()
        close_connection(self.connection)


class Step(enum.Enum):
    """The next step."""

    INSERT = "insert the rolled-back marker"
    READ = "read the marker, durably"
    READ_ELSEWHERE = "look for a committed marker where absence proves nothing"
    REPORT_COMMIT = "report the commit to the broker"
    REPORT_ROLLBACK = "report the rollback to the broker"
    RESOLVED = "resolved"
    UNDECIDED = "undecided"
    HELD = "held by an open transaction: not known yet"
    CONTRADICTED = "contradicted"


class Found(enum.Enum):
    """The result of a step."""

    INSERTED = "inserted"
    DUPLICATE = "duplicate"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    REPORTED = "reported"
    CONTRADICTED = "contradicted"
    HELD = "held by an open transaction"
    FAILED = "failed"


_S, _F = Step, Found
TRANSITIONS: dict[tuple[Step, Found], Step] = {
    (_S.INSERT, _F.INSERTED): _S.REPORT_ROLLBACK,
    (_S.INSERT, _F.DUPLICATE): _S.READ,
    (_S.INSERT, _F.HELD): _S.HELD,
    (_S.INSERT, _F.FAILED): _S.UNDECIDED,
    (_S.READ, _F.COMMITTED): _S.REPORT_COMMIT,
    (_S.READ, _F.ROLLED_BACK): _S.REPORT_ROLLBACK,
    (_S.READ, _F.HELD): _S.HELD,
    (_S.READ, _F.FAILED): _S.UNDECIDED,
    (_S.READ_ELSEWHERE, _F.COMMITTED): _S.REPORT_COMMIT,
    (_S.READ_ELSEWHERE, _F.HELD): _S.HELD,
    (_S.READ_ELSEWHERE, _F.FAILED): _S.UNDECIDED,
    (_S.REPORT_COMMIT, _F.REPORTED): _S.RESOLVED,
    (_S.REPORT_COMMIT, _F.CONTRADICTED): _S.CONTRADICTED,
    (_S.REPORT_COMMIT, _F.FAILED): _S.UNDECIDED,
    (_S.REPORT_ROLLBACK, _F.REPORTED): _S.RESOLVED,
    (_S.REPORT_ROLLBACK, _F.CONTRADICTED): _S.CONTRADICTED,
    (_S.REPORT_ROLLBACK, _F.FAILED): _S.UNDECIDED,
}


class _Sought(NamedTuple):
    """The transaction whose outcome is sought (``prove``)."""

    txid: str
    deadline_ms: int
    waits: bool


def prove(
    database: ResolvingConnection, txid: str, deadline_ms: int, *, has_token: bool = True, waits: bool = True
) -> tuple[Step, Exception | None]:
    """Resolve the outcome in the database.

    Args:
        deadline_ms: of the transaction; the rolled-back row is kept until long after it.
        has_token: the newest fencing token stands in the database.
        waits: a moment for an open transaction that holds the row; otherwise it is HELD.

    Returns:
        REPORT_COMMIT: proved and durable. REPORT_ROLLBACK: so is this, when a token is drawn after it. UNDECIDED, with
        what stood in the way: nothing is known, and the connection should be closed. HELD: nothing is known yet.
    """
    error: Exception | None = None
    step = Step.INSERT if has_token else Step.READ_ELSEWHERE
    sought = _Sought(txid, deadline_ms, waits)
    while step in _IN_DATABASE:
        try:
            if not waits:
                database.table.require_free(database.connection, txid)
            found = _IN_DATABASE[step](database, sought)
        except Exception as failure:  # noqa: BLE001  whatever a driver raises, nothing is known
            is_held = not waits and database.table.dialect.is_held(failure)
            error, found = failure, Found.HELD if is_held else Found.FAILED
        step = next_step(TRANSITIONS, step, found)
    return step, error


def _insert(database: ResolvingConnection, sought: _Sought) -> Found:
    try:
        is_in = database.table.insert_rolled_back(
            database.connection, sought.txid, database.uuid, sought.deadline_ms, waits=sought.waits
        )
    except Exception as error:
        if database.is_duplicate(error):
            return Found.DUPLICATE
        raise
    if not is_in:
        return Found.FAILED  # another database answers: unreachable
    crash_point("resolver.marker_inserted")
    return Found.INSERTED


def _read_elsewhere(database: ResolvingConnection, sought: _Sought) -> Found:
    outcome = database.table.read_durably(database.connection, sought.txid)
    return Found.COMMITTED if outcome == marker_table.COMMITTED else Found.FAILED


def _read(database: ResolvingConnection, sought: _Sought) -> Found:
    outcome = database.table.read_durably(database.connection, sought.txid)
    if outcome == marker_table.COMMITTED:
        crash_point("resolver.read_committed")
        return Found.COMMITTED
    # A row that has gone was removed by a resolver that had resolved the transaction: the broker says so next time.
    return Found.ROLLED_BACK if outcome == marker_table.ROLLED_BACK else Found.FAILED


_IN_DATABASE: dict[Step, Callable[[ResolvingConnection, _Sought], Found]] = {
    Step.INSERT: _insert,
    Step.READ: _read,
    Step.READ_ELSEWHERE: _read_elsewhere,
}
