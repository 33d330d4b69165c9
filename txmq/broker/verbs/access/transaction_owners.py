"""Whose a transaction is, and who else may ask for it or settle it.

A session belongs to the user who made it, and so do its transactions. Another user needs ``settle`` on the database of
a transaction, or on the group of a half message or the name of a query; a transaction that has none of these
is settled by its user and by administrators.

The connection of the session itself is never asked: a grant that is revoked meanwhile breaks no promise.

A transaction that is over has no database any more. A user who settles for others may be second with one that was
listed to him: to him it looks forgotten (410), and neither log nor counter calls him refused. What was never there
looks alike.
"""

from __future__ import annotations

from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name
from txmq.broker.state.principals import Permissions
from txmq.broker.state.session import BrokerSession
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import GROUP, RESOURCE, SETTLE, permissions_of, refuse_nobody, require
from txmq.errors import FencedError, ForbiddenError
from txmq.model import TransactionKind

Thing = tuple[str, str, str]  # operation, kind, name: as ``require`` takes them
_OF_A_GROUP = (TransactionKind.HALF.value, TransactionKind.SPARK.value)


def is_owner(client: ClientConnection, session: BrokerSession) -> bool:
    """Whether a session is the connection's own, or its user's."""
    return client.session is session or (bool(session.user) and session.user == client.user)


def may_settle(context: Context, client: ClientConnection, name: Name) -> bool:
    """Whether the connection's user may know a transaction, and settle it."""
    known = permissions_of(context, client)
    if known is None or known.is_administrator:
        return True
    session = context.state.sessions.get(name[0])
    if session is not None and is_owner(client, session):
        return bool(known.user)
    return settles(context, known, name)


def settles(context: Context, known: Permissions, name: Name) -> bool:
    """Whether grants let their user settle a transaction of another one."""
    return known.is_administrator or any(known.may(*thing) for thing in _things(context, name))


def refuse_others(
    context: Context, client: ClientConnection, name: Name, uuid: str = "", *, is_end: bool = False
) -> None:
    """Refuse users who may not know of or settle a transaction.

    Args:
        uuid: of the branch that is meant, if it is one in a database; else any grant on the transaction will do.
        is_end: the request would end it, and may come second.

    Raises:
        UnauthenticatedError: the connection's user is no more.
        ForbiddenError: the text says which grants would do.
        FencedError: ``is_end``, nothing is left to end, and the user settles for others.
    """
    known = client.permissions
    if known is None:
        return
    session = context.state.sessions.get(name[0])
    if session is not None and is_owner(client, session):
        return
    if uuid:
        require(context, client, SETTLE, RESOURCE, uuid)
    elif not may_settle(context, client, name):
        refuse_nobody(known)
        if is_end and _settles_for_others(client) and not _is_left(context, name):
            raise FencedError(
                f"transaction {context.txid_of(name)} is over, or another user's: nothing of it is left to settle"
            )
        raise ForbiddenError(  # the same for one that never was: neither its existence nor its database is told
            f"transaction {context.txid_of(name)} is another user's: its user settles it, an administrator, or who "
            "has settle on its database, producer group or query (txmq acl add)"
        )


def _settles_for_others(client: ClientConnection) -> bool:
    """Whether the user may settle for some database, or check the half messages of some group."""
    known = client.permissions
    return known is not None and (known.has(SETTLE, RESOURCE) or known.has(SETTLE, GROUP))


def _is_left(context: Context, name: Name) -> bool:
    """Whether a transaction is open, prepared, or decided with a branch to come."""
    return name in context.state.transactions or name in context.state.decisions.incomplete


def _things(context: Context, name: Name) -> list[Thing]:
    """Each of what would do for another user."""
    found: list[Thing] = []
    state = context.state
    transaction, decided = state.transactions.get(name), state.decisions.incomplete.get(name)
    if transaction is not None and transaction.meta:
        meta = transaction.meta
        if meta["uuid"]:
            found.append((SETTLE, RESOURCE, meta["uuid"]))
        elif meta["kind"] in _OF_A_GROUP:
            found.append((SETTLE, GROUP, meta["resource"]))
    rows = [*(() if decided is None else decided.branches), *state.decisions.heuristics.get(name, ())]
    return found + [(SETTLE, RESOURCE, row["uuid"]) for row in rows if row.get("uuid")]


def audit_fact(context: Context, client: ClientConnection, name: Name, fact: dict[str, Any]) -> None:
    """Have it written that somebody settled a transaction by their word: who, which, why."""
    txid = context.txid_of(name)
    audit(context, client, "settled by hand", txid=txid, what=fact["what"], reason=fact["reason"])


def audit_fence(context: Context, client: ClientConnection, name: Name, **acting: str) -> None:
    """Have it written that somebody fenced another user's transaction; asked where there are users.

    Args:
        acting: for whom, if it is the broker of another home.
    """
    session = context.state.sessions.get(name[0])
    if client.permissions is not None and (session is None or not is_owner(client, session)):
        audit(context, client, "fenced", txid=context.txid_of(name), **acting)
