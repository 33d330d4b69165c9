"""COMMIT of a branch on MySQL and MariaDB, with all that stands before and after it, sent to the server at once.

Theory of operation. The savepoint's release, the marker, COMMIT AND CHAIN and the next block's savepoint are four
statements. As one packet the server parses each, and sends four answers, each of which wakes this process. MariaDB
prepares all of them as one compound statement, for as long as the connection lives: it parses one EXECUTE, and sends
one answer. With 8 threads that is 125 us of processor time in place of 162, client and server together (bare
statements, 28 November 2026). A server that does not prepare compound statements (MySQL; MariaDB before 10.6.2), that
has too many prepared ones, or has forgotten this one, is sent the packet.

A packet says how far it came. Of a compound statement a variable of the session does: it has the transaction's id when
COMMIT is next. After an error of what stands before COMMIT nothing is committed, whatever the error is. After one of
COMMIT itself the decision is not known: it is looked up (``Branch.outcome_after``).

Sources: MariaDB 10.11, "PREPARE Statement" (10.6.2: all statements), "BEGIN END", error codes.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from typing import Final

from txmq.xa.database.dbapi import run, text
from txmq.xa.database.dialects import code_of
from txmq.xa.database.installation import DatabaseSession
from txmq.xa.database.mysql_server import KEPT_OUT, commit, send
from txmq.xa.database.statement import Statement

SAVEPOINT: Final = "txmq_body"
_AHEAD: Final = 2  # statements before COMMIT
_NAME_BYTES: Final = 16
_RELEASE: Final = f"RELEASE SAVEPOINT {SAVEPOINT}"
_NOT_PREPARED: Final = frozenset({1210, 1243})  # EXECUTE of what the connection does not know (any more)
_NO_SAVEPOINT: Final = 1305
_AT_COMMIT: Final = "@txmq_at_commit"


class Found(Enum):
    """What became of the transaction."""

    COMMITTED = "committed"
    NO_SAVEPOINT = "the body had ended the transaction: nothing was done, as far as is known"
    KEPT_OUT = "the marker was kept out: the transaction is open"
    REFUSED = "it is not committed: a statement failed"
    UNKNOWN = "COMMIT failed, or gave no answer"


def commit_behind(
    session: DatabaseSession, txid: str, marker: Statement, *, is_own: bool
) -> tuple[Found, Exception | None]:
    """Release the savepoint, insert the marker, and commit.

    Args:
        is_own: a connection of the resource's: the next transaction is begun on it.
    """
    chain = f"COMMIT AND CHAIN; SAVEPOINT {SAVEPOINT}" if is_own else "COMMIT"
    name = _prepared(session, marker, chain)
    if name is not None:
        literals = ", ".join([*marker.literals, f"'{txid}'"])
        _, error = commit(session.connection, (f"EXECUTE {name} USING {literals}",))
        if error is None or code_of(error) not in _NOT_PREPARED:
            session.is_answer_owed = False
            return _judged(session, txid, error)
        session.compound.is_refused = True
    done, error = commit(session.connection, (_RELEASE, marker.text, chain), ahead=_AHEAD)
    session.is_answer_owed = True
    if error is None:
        return Found.COMMITTED, None
    if done == _AHEAD or not _is_answer(session, error):
        return Found.UNKNOWN, error
    if done == 0:
        return Found.NO_SAVEPOINT, error
    return Found.KEPT_OUT if code_of(error) in KEPT_OUT else Found.REFUSED, error


def _judged(session: DatabaseSession, txid: str, error: Exception | None) -> tuple[Found, Exception | None]:
    """The same of a compound statement."""
    if error is None:
        return Found.COMMITTED, None
    if not _is_answer(session, error) or _was_at_commit(session, txid):
        return Found.UNKNOWN, error
    code = code_of(error)
    if code == _NO_SAVEPOINT:
        return Found.NO_SAVEPOINT, error
    return Found.KEPT_OUT if code in KEPT_OUT else Found.REFUSED, error


def _was_at_commit(session: DatabaseSession, txid: str) -> bool:
    """Whether all before COMMIT was done, as far as is known."""
    try:
        ((found,),) = run(session.connection, f"SELECT {_AT_COMMIT}")[0]
    except Exception:  # noqa: BLE001  the session is lost meanwhile
        return True
    return found is not None and text(found) == txid


def _is_answer(session: DatabaseSession, error: Exception) -> bool:
    dialect = session.table.dialect
    return dialect.is_answer(error) and not dialect.is_lost(session.connection, error)


def _prepared(session: DatabaseSession, marker: Statement, chain: str) -> str | None:
    """The name of the compound statement on the connection, prepared now if need be; None if there is none."""
    compound = session.compound
    if compound.is_refused or compound.name is not None:
        return None if compound.is_refused else compound.name
    body = "; ".join((_RELEASE, marker.template.replace("%s", "?"), f"SET {_AT_COMMIT} = ?", chain))
    # Behind a proxy another client's connection may be the same: of one name there is one statement.
    name = f"txmq_{blake2b(body.encode(), digest_size=_NAME_BYTES).hexdigest()}"
    quoted = body.replace("'", "''")
    prepare = f"PREPARE {name} FROM 'BEGIN NOT ATOMIC {quoted}; END'"
    _, error = send(session.connection, (prepare,), in_one_packet=True)
    if error is None:
        compound.name = name
        return name
    if not _is_answer(session, error):
        raise error
    compound.is_refused = True
    return None
