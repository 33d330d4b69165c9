"""Fencing: the verb ``token``, and fences of transactions for one database (``outcome uuid=``).

Theory of operation. ``token`` has a database's fencing token accepted, as the successor of the one before
(``state/fencing_tokens``).

A resolver with a user of its own finds a branch prepared in its database, of a transaction that this broker does not
know: its client died before it decided. Nothing here says that the transaction is of that database; so the fence that
``outcome uuid= fence`` makes is of no more than that. FENCED names session, counter and uuid, and from then on every
``decide`` with a branch in the database, and every ``prepare`` for it, is refused. Everything else of the transaction
stays its user's: a fence for a database that it is not of affects nobody.

```
 nothing here, a stream, or anything with      --uuid=--------> unknown, and the owner
 no branch in the database                     --uuid= fence--> FENCED forced, rolled-back
 fenced for the database, or rolled back       ---------------> rolled-back
 committed, and the branches are forgotten     ---------------> committed, without its places
 forgotten                                     ---------------> 410
```

Users who may settle the transaction anyway (its own, an administrator, one who may settle for a database that it is
known to be of) are answered by ``prepare_commit.outcome`` as if there were no ``uuid=``.

Invariants:
    * a token is answered 200 when its record is durable, and while it is the newest one;
    * of one that is not the successor nothing is journaled;
    * after ``rolled-back`` no decision with a branch in the database was or is accepted, through crashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state import fencing_tokens
from txmq.broker.state.decisions import Name
from txmq.broker.state.session import ROLLED_BACK, BrokerSession
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import INSTALL, RESOURCE, SETTLE, permissions_of, require
from txmq.broker.verbs.access.fair_share import DATABASE_SHARE, note_made, refuse_over_half
from txmq.broker.verbs.access.transaction_owners import audit_fence, may_settle
from txmq.broker.verbs.transaction_checks import owner_line
from txmq.errors import BadRequestError, FencedError, OtherTokenError, OverloadedError, TransactionConflictError
from txmq.protocol.grammar import is_hex32
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point
from txmq.xid import TxId

FENCES_OF_DATABASE_MAX: Final = 65_536  # of all sessions: one database takes no room from others


def token(context: Context, client: ClientConnection, request: Request) -> None:
    """Take the next token of a database."""
    _, arguments, extensions, _body, opaque = request
    given = extensions or {}
    is_adopted, after = b"adopted" in given, given.get(b"after", b"").decode()
    if not (is_hex32(arguments[0]) and is_hex32(arguments[1])) or (is_adopted and after):
        raise BadRequestError("token needs the resource's uuid and a token, 32 hex each, and after= or adopted")
    uuid, drawn = arguments[0].decode(), arguments[1].decode()
    _require(context, client, uuid, is_adopted=is_adopted)
    tokens = context.state.fencing_tokens
    known = tokens.newest.get(uuid)
    if known == drawn:
        context.answer_from_state(client, opaque, b"")
        return
    if not (is_adopted or tokens.follows(uuid, after)):
        raise OtherTokenError(f"the newest token of database {uuid} is {known or 'none'}, not {after or 'none'}")
    if known is None:
        _refuse_more(context, client)
    fields = {"uuid": uuid, "token": drawn}
    context.group.add_entry(entries.json_entry(entries.TOKEN_DRAWN, fields))
    tokens.drawn(uuid, drawn)
    if known is None:
        note_made(context, client, DATABASE_SHARE, uuid)
    if is_adopted:
        audit(context, client, "database adopted", uuid=uuid, token=drawn, before=known or "none")
    context.answer_when_durable(client, opaque)


def _require(context: Context, client: ClientConnection, uuid: str, *, is_adopted: bool) -> None:
    """A user who resolves may draw: with ``settle`` for anybody's transactions, with ``install`` for his own."""
    known = permissions_of(context, client)
    if is_adopted or known is None or not known.may(SETTLE, RESOURCE, uuid):
        require(context, client, INSTALL, RESOURCE, uuid)


def _refuse_more(context: Context, client: ClientConnection) -> None:
    most = fencing_tokens.TOKENS_MAX
    refuse_over_half(context, client, DATABASE_SHARE, most, "fencing tokens")
    if len(context.state.fencing_tokens.newest) >= most:
        raise OverloadedError(f"the fencing tokens of {most} databases are kept, and none is forgotten")


def is_for_a_database(context: Context, client: ClientConnection, name: Name) -> bool:
    """Whether the connection's user may settle the transaction for a database at most."""
    return client.permissions is not None and not may_settle(context, client, name)


def outcome_for_a_database(
    context: Context,
    client: ClientConnection,
    of: tuple[TxId, BrokerSession],
    given: dict[bytes, bytes],
    opaque: bytes,
) -> None:
    """Tell what becomes of the transaction's branch in a database; with ``fence``, see to it first.

    Raises:
        UnauthenticatedError, ForbiddenError: the connection's user may not settle for the database.
    """
    (txid, session), uuid = of, given[b"uuid"].decode()
    require(context, client, SETTLE, RESOURCE, uuid)
    counter = txid.counter
    outcome = _outcome_of(context, session, counter, uuid)
    if outcome == b"" and b"fence" in given:
        _fence(context, client, session, counter, uuid)
        context.answer_when_durable(client, opaque, b"rolled-back\n")
        return
    outcome = outcome or b"unknown\n"
    if b"owner" in given and outcome != b"committed\n":
        outcome += owner_line(context, session)
    context.answer_from_state(client, opaque, outcome)


def refuse_fenced(session: BrokerSession, txid: TxId, uuids: Iterable[str]) -> None:
    """Refuse a decision, or a prepare, that names a database for which the transaction is fenced.

    Raises:
        TransactionConflictError: its branch there is rolled back, or will be.
    """
    fenced = session.fences.get(txid.counter)
    if fenced and not set(fenced).isdisjoint(uuids):
        raise TransactionConflictError(f"transaction {txid} is rolled back: a resolver has fenced its branch")


def _outcome_of(context: Context, session: BrokerSession, counter: int, uuid: str) -> bytes:
    """What is known of the branch; empty: nothing, and a decision may still come."""
    if uuid in session.fences.get(counter, ()):
        return b"rolled-back\n"
    name = (session.number, counter)
    if name in context.state.transactions or name in context.state.decisions.incomplete:
        return b""  # none of the database's: else its user could settle it
    if counter <= session.floor:
        raise FencedError(f"the outcome of transaction {context.txid_of(name)} is no longer kept")
    if counter not in session.outcomes:
        return b""
    return b"rolled-back\n" if session.outcomes[counter] is ROLLED_BACK else b"committed\n"


def _fence(context: Context, client: ClientConnection, session: BrokerSession, counter: int, uuid: str) -> None:
    if context.state.fences_of[uuid] >= FENCES_OF_DATABASE_MAX:
        raise OverloadedError(f"{FENCES_OF_DATABASE_MAX} transactions are fenced for database {uuid}")
    audit_fence(context, client, (session.number, counter))
    fields = {"session": session.number, "counter": counter, "uuid": uuid}
    context.group.add_entry(entries.json_entry(entries.FENCED, fields))
    context.group.needs_sync = True
    context.state.fence(session.number, counter, uuid)
    crash_point("broker.database.fenced")
