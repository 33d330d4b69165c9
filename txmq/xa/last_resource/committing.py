"""COMMIT of a branch on MySQL and MariaDB, with all that stands before and behind it, sent to the server at once.

Theory of operation. The savepoint's release, the outbox's rows, the marker, COMMIT AND CHAIN and the next block's
savepoint are up to six statements. As one packet the server parses each, and sends six answers, each of which wakes
this process. MariaDB prepares all of them as one compound statement, for as long as the connection lives: it parses one
EXECUTE, and sends one answer. With 8 threads that is 144 us of processor time in place of 216 for a row, its message
and their marker, client and server together; 125 in place of 162 for the marker of a last resource (bare statements, 28
November 2026). A server that does not prepare compound statements (MySQL; MariaDB before 10.6.2), that has too many
prepared ones, or has forgotten this one, is sent the packet.

The error of a compound statement is all that says how far it came. Behind an error that is of names, privileges, values
or a lock nothing is committed. Behind any other the decision is not known: it is looked up.

Sources: MariaDB 10.11, "PREPARE Statement" (10.6.2: all statements), "BEGIN END", error codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b
from typing import Final

from txmq.xa.database.installation import DatabaseSession
from txmq.xa.database.mysql_server import KEPT_OUT, code_of, commit, is_answer_of_server, send
from txmq.xa.database.statement import Statement

SAVEPOINT: Final = "txmq_body"
COMPOUNDS_MAX: Final = 8  # of a connection; the server has a limit for all (max_prepared_stmt_count, 16,382)
LITERALS_MAX: Final = 64
_NAME_BYTES: Final = 16
_RELEASE: Final = f"RELEASE SAVEPOINT {SAVEPOINT}"
_NOT_PREPARED: Final = frozenset({1210, 1243})  # EXECUTE of what the connection does not know (any more)
# Of access, names, values, sizes, locks and read-only servers: of what stands before COMMIT, or of one that rolls back.
_NOT_COMMITTED: Final = KEPT_OUT | {
    1020, 1036, 1044, 1054, 1062, 1114, 1142, 1143, 1146, 1153, 1205, 1206, 1213, 1223, 1226, 1227, 1264, 1265, 1267,
    1290, 1364, 1366, 1406, 1412, 1665, 1792, 1836,
}  # fmt: skip


class Found(Enum):
    """What became of the transaction."""

    COMMITTED = "committed"
    NO_SAVEPOINT = "the body had ended the transaction: nothing was done, as far as is known"
    KEPT_OUT = "the marker was kept out: the transaction is open, and the statements before it were done"
    REFUSED = "it is not committed: a statement failed"
    UNKNOWN = "COMMIT failed, or gave no answer"


def commit_behind(
    session: DatabaseSession, statements: Sequence[Statement], *, is_own: bool
) -> tuple[Found, Exception | None]:
    """Release the savepoint, do these statements, of which the marker is the last one, and commit.

    Args:
        is_own: a connection of the resource's: the next transaction is begun on it.
    """
    chain = f"COMMIT AND CHAIN; SAVEPOINT {SAVEPOINT}" if is_own else "COMMIT"
    name = _prepared(session, statements, chain)
    if name is not None:
        literals = ", ".join([literal for one in statements for literal in one.literals])
        _, error = commit(session.connection, (f"EXECUTE {name} USING {literals}",))
        if error is None or code_of(error) not in _NOT_PREPARED:
            session.is_answer_owed = False
            return _judged(session, error)
        session.compounds.are_refused = True
    packet = (_RELEASE, *[one.text for one in statements], chain)
    ahead = 1 + len(statements)
    done, error = commit(session.connection, packet, ahead=ahead)
    session.is_answer_owed = True
    if error is None:
        return Found.COMMITTED, None
    if done == ahead or not _is_answer(session, error):
        return Found.UNKNOWN, error
    if done == 0:
        return Found.NO_SAVEPOINT, error
    is_kept_out = done == len(statements) and code_of(error) in KEPT_OUT
    return Found.KEPT_OUT if is_kept_out else Found.REFUSED, error


def _judged(session: DatabaseSession, error: Exception | None) -> tuple[Found, Exception | None]:
    """The same of a compound statement, by its error alone."""
    if error is None:
        return Found.COMMITTED, None
    code = code_of(error)
    if not _is_answer(session, error):
        return Found.UNKNOWN, error
    if session.table.dialect.has_no_savepoint(error):
        return Found.NO_SAVEPOINT, error
    if code in KEPT_OUT:
        return Found.KEPT_OUT, error
    return Found.REFUSED if code in _NOT_COMMITTED else Found.UNKNOWN, error


def _is_answer(session: DatabaseSession, error: Exception) -> bool:
    return is_answer_of_server(error) and not session.table.dialect.is_lost(session.connection, error)


def _prepared(session: DatabaseSession, statements: Sequence[Statement], chain: str) -> str | None:
    """The name of the compound statement of these on the connection, prepared now if need be; None if there is none."""
    compounds = session.compounds
    if compounds.are_refused:
        return None
    key = (chain, *[one.template for one in statements])
    name = compounds.names.get(key)
    if name is not None:
        return name
    count = sum([len(one.literals) for one in statements])
    if len(compounds.names) == COMPOUNDS_MAX or count > LITERALS_MAX:
        return None
    body = "; ".join((_RELEASE, *[one.template.replace("%s", "?") for one in statements], chain))
    # Behind a proxy another client's connection may be the same: of one name there is one statement.
    name = f"txmq_{blake2b(body.encode(), digest_size=_NAME_BYTES).hexdigest()}"
    quoted = body.replace("'", "''")
    prepare = f"PREPARE {name} FROM 'BEGIN NOT ATOMIC {quoted}; END'"
    _, error = send(session.connection, (prepare,), in_one_packet=True)
    if error is None:
        compounds.names[key] = name
        return name
    if not _is_answer(session, error):
        raise error
    compounds.are_refused = True
    return None
