"""How a transaction in doubt is resolved: the steps as a table, and the proof by the marker table.

```
 INSERT --INSERTED---------------------> REPORT_ROLLBACK --REPORTED--> RESOLVED
   |  \\--DUPLICATE--> READ --ROLLED_BACK----^   |
   |                   | \\---COMMITTED--> REPORT_COMMIT --REPORTED--> RESOLVED
   |                   | \\---OUTBOXED---> REPORT_VOID ----REPORTED--> RESOLVED
   |                   |                        |
   +------FAILED-------+--------FAILED----------+--> UNDECIDED: again later
   |
   +--HELD-----> HELD: again later
   |
   +--STRANGE--> READ_ELSEWHERE --COMMITTED--> REPORT_COMMIT        (begins here where absence proves nothing)
   |                   | \\------OUTBOXED----> REPORT_VOID
   |                   \\--FAILED--> UNDECIDED
   |
   +--LATE-----> READ_LATE ------OUTBOXED----> REPORT_VOID
                       | \\------ROLLED_BACK--> REPORT_ROLLBACK
                       | \\------GONE--------> FORGOTTEN
                       \\--FAILED--> UNDECIDED
```

OUTBOXED: the rows are committed, and the messages wait in the outbox beside them. What the broker may have prepared is
    void, and is rolled back there.

LATE: the transaction went to an outbox, and its row may have left by now: its absence proves nothing any more.
    FORGOTTEN: it was asked for too late, and nothing can be known.

STRANGE: perhaps a copy of the database answers. A committed or outboxed marker proves that the rows are committed
    wherever it is found; no other row, and no missing one, proves anything there.

REPORT_ROLLBACK rests on a row that keeps the owner's out of this database. Whoever reports it draws a fencing token
first, which makes it a proof (``xa/fencing.py``); but for what went to an outbox, where the known server is asked.

HELD: an open transaction has the row, uncommitted. Nobody waits for it, so that it keeps nobody else.

CONTRADICTED: the broker decided otherwise.

Invariants:
    * a lock that is held, a deadlock, a busy or lost database, a missing row: UNDECIDED, never a guess;
    * nothing is reported before the row that it rests on is durable (``marker_table``);
    * two resolvers of one transaction meet at the primary key and come to the same end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from txmq.runtime.crashpoints import crash_point
from txmq.state_machine import next_step
from txmq.xa.database import marker_table
from txmq.xa.database.fingerprint import StrangeServerError


class Step(enum.Enum):
    """The next step."""

    INSERT = "insert the rolled-back marker"
    READ = "read the marker, durably"
    READ_LATE = "read the marker, which may have left"
    READ_ELSEWHERE = "look for a committed marker where absence proves nothing"
    REPORT_COMMIT = "report the commit to the broker"
    REPORT_ROLLBACK = "report the rollback to the broker"
    REPORT_VOID = "report to the broker that its part is void: the messages wait in the outbox"
    RESOLVED = "resolved"
    UNDECIDED = "undecided"
    HELD = "held by an open transaction: not known yet"
    CONTRADICTED = "contradicted"
    FORGOTTEN = "forgotten"


class Found(enum.Enum):
    """The result of a step."""

    INSERTED = "inserted"
    DUPLICATE = "duplicate"
    STRANGE = "not the known server"
    LATE = "too late to insert"
    GONE = "no row"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    OUTBOXED = "outboxed"
    REPORTED = "reported"
    CONTRADICTED = "contradicted"
    HELD = "held by an open transaction"
    FAILED = "failed"


_S, _F = Step, Found
TRANSITIONS: dict[tuple[Step, Found], Step] = {
    (_S.INSERT, _F.INSERTED): _S.REPORT_ROLLBACK,
    (_S.INSERT, _F.DUPLICATE): _S.READ,
    (_S.INSERT, _F.STRANGE): _S.READ_ELSEWHERE,
    (_S.INSERT, _F.LATE): _S.READ_LATE,
    (_S.INSERT, _F.HELD): _S.HELD,
    (_S.INSERT, _F.FAILED): _S.UNDECIDED,
    (_S.READ, _F.COMMITTED): _S.REPORT_COMMIT,
    (_S.READ, _F.ROLLED_BACK): _S.REPORT_ROLLBACK,
    (_S.READ, _F.OUTBOXED): _S.REPORT_VOID,
    (_S.READ, _F.HELD): _S.HELD,
    (_S.READ, _F.FAILED): _S.UNDECIDED,
    (_S.READ_LATE, _F.OUTBOXED): _S.REPORT_VOID,
    (_S.READ_LATE, _F.ROLLED_BACK): _S.REPORT_ROLLBACK,
    (_S.READ_LATE, _F.GONE): _S.FORGOTTEN,
    (_S.READ_LATE, _F.HELD): _S.HELD,
    (_S.READ_LATE, _F.FAILED): _S.UNDECIDED,
    (_S.READ_ELSEWHERE, _F.COMMITTED): _S.REPORT_COMMIT,
    (_S.READ_ELSEWHERE, _F.OUTBOXED): _S.REPORT_VOID,
    (_S.READ_ELSEWHERE, _F.HELD): _S.HELD,
    (_S.READ_ELSEWHERE, _F.FAILED): _S.UNDECIDED,
    (_S.REPORT_COMMIT, _F.REPORTED): _S.RESOLVED,
    (_S.REPORT_COMMIT, _F.CONTRADICTED): _S.CONTRADICTED,
    (_S.REPORT_COMMIT, _F.FAILED): _S.UNDECIDED,
    (_S.REPORT_ROLLBACK, _F.REPORTED): _S.RESOLVED,
    (_S.REPORT_ROLLBACK, _F.CONTRADICTED): _S.CONTRADICTED,
    (_S.REPORT_ROLLBACK, _F.FAILED): _S.UNDECIDED,
    (_S.REPORT_VOID, _F.REPORTED): _S.RESOLVED,
    (_S.REPORT_VOID, _F.CONTRADICTED): _S.CONTRADICTED,
    (_S.REPORT_VOID, _F.FAILED): _S.UNDECIDED,
}


class Prover(Protocol):
    """A database as a resolver sees it (``ResolvingConnection``)."""

    @property
    def connection(self) -> Any:
        """The DB-API connection."""

    @property
    def table(self) -> marker_table.MarkerTable:
        """Its tables."""

    @property
    def uuid(self) -> str:
        """Its identity."""

    def is_duplicate(self, error: Exception) -> bool:
        """Whether an INSERT failed because the row is there."""


class _Sought(NamedTuple):
    """The transaction whose outcome is sought (``prove``)."""

    txid: str
    deadline_ms: int
    until_ms: int | None
    waits: bool


def prove(
    database: Prover, txid: str, deadline_ms: int, proves_until_ms: int | None = None, *, has_token: bool = True,
    waits: bool = True,
) -> tuple[Step, Exception | None]:  # fmt: skip
    """Resolve the outcome in the database.

    Args:
        deadline_ms: of the transaction; the rolled-back row is kept until long after it.
        proves_until_ms: of one that went to an outbox: until then, by the database's clock, its row is there if it is
            committed.
        has_token: the newest fencing token stands in the database.
        waits: a moment for an open transaction that holds the row; otherwise it is HELD.

    Returns:
        REPORT_COMMIT or REPORT_VOID: proved and durable. REPORT_ROLLBACK: so is this, when a token is drawn after it.
        UNDECIDED, with what stood in the way: nothing is known, and the connection should be closed. HELD: nothing is
        known yet. FORGOTTEN: nothing will be.
    """
    error: Exception | None = None
    step = Step.INSERT if has_token else Step.READ_ELSEWHERE
    sought = _Sought(txid, deadline_ms, proves_until_ms, waits)
    while step in _IN_DATABASE:
        try:
            if not waits:
                database.table.require_free(database.connection, txid)
            found = _IN_DATABASE[step](database, sought)
        except StrangeServerError as failure:
            error, found = failure, Found.STRANGE
        except Exception as failure:  # noqa: BLE001  whatever a driver raises, nothing is known
            is_held = not waits and database.table.dialect.is_held(failure)
            error, found = failure, Found.HELD if is_held else Found.FAILED
        step = next_step(TRANSITIONS, step, found)
    return step, error


def _insert(database: Prover, sought: _Sought) -> Found:
    table, connection, until_ms = database.table, database.connection, sought.until_ms
    try:
        is_in = table.insert_rolled_back(
            connection, sought.txid, database.uuid, sought.deadline_ms, until_ms, waits=sought.waits
        )
    except Exception as error:
        if database.is_duplicate(error):
            return Found.DUPLICATE
        raise
    if not is_in:
        if until_ms is not None and table.now_ms(connection) >= until_ms:
            return Found.LATE
        return Found.FAILED  # another database answers: unreachable
    crash_point("resolver.marker_inserted")
    return Found.INSERTED


def _read_late(database: Prover, sought: _Sought) -> Found:
    outcome = database.table.read_durably(database.connection, sought.txid)
    if outcome is None:
        return Found.GONE
    return _LATE.get(outcome, Found.FAILED)


def _read_elsewhere(database: Prover, sought: _Sought) -> Found:
    return _COMMITS.get(database.table.read_durably(database.connection, sought.txid), Found.FAILED)


def _read(database: Prover, sought: _Sought) -> Found:
    outcome = database.table.read_durably(database.connection, sought.txid)
    if outcome in _COMMITS:
        crash_point("resolver.read_committed")
        return _COMMITS[outcome]
    # A row that has gone was removed by a resolver that had resolved the transaction: the broker says so next time.
    return Found.ROLLED_BACK if outcome == marker_table.ROLLED_BACK else Found.FAILED


_COMMITS: dict[str | None, Found] = {
    marker_table.COMMITTED: Found.COMMITTED,
    marker_table.OUTBOXED: Found.OUTBOXED,
    marker_table.ENCLOSED: Found.OUTBOXED,
}
_LATE = {
    marker_table.OUTBOXED: Found.OUTBOXED,
    marker_table.ENCLOSED: Found.OUTBOXED,
    marker_table.ROLLED_BACK: Found.ROLLED_BACK,
}
_IN_DATABASE: dict[Step, Callable[[Prover, _Sought], Found]] = {
    Step.INSERT: _insert,
    Step.READ: _read,
    Step.READ_LATE: _read_late,
    Step.READ_ELSEWHERE: _read_elsewhere,
}
