"""The verb ``token``: a database's fencing token, accepted as the successor of the one before.

Invariants:
    * a token is answered 200 when its record is durable, and while it is the newest one;
    * of one that is not the successor nothing is journaled.
"""

from __future__ import annotations

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state import fencing_tokens
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import INSTALL, RESOURCE, SETTLE, permissions_of, require
from txmq.broker.verbs.access.fair_shares import DATABASE_SHARE, note_made, refuse_over_half
from txmq.errors import BadRequestError, OtherTokenError, OverloadedError
from txmq.protocol.grammar import is_hex32
from txmq.protocol.requests import Request
from txmq.redo import entries


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
