"""``commit`` with ``outbox=``, a page of an outbox's rows, and the verb ``outbox``, which tells of the newest one.

A page is an ordinary transaction with one condition more: it is the successor of the newest page of its outbox
(``state/outbox_chains``). Rows, claim and what a relay concludes from a refusal are the database's side.

Invariants:
    * of a page that is not the successor nothing is journaled;
    * a page and its place in the chain are one record;
    * what is told of the chain is durable.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state import outbox_chains
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import INSTALL, RESOURCE, require, require_administrator, sees
from txmq.broker.verbs.access.fair_share import OUTBOX_SHARE, note_made, refuse_over_half
from txmq.errors import BadRequestError, OutboxConflictError, OverloadedError
from txmq.model import is_valid_name
from txmq.protocol.grammar import is_hex32
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point
from txmq.xid import TxId

OUTBOX = b"outbox"
_NO_PAGE = b"-"


class PageFields(NamedTuple):
    """What a commit says of its outbox.

    Attributes:
        after: the transaction of the page before; empty: it is the first one.
    """

    uuid: str
    name: str
    after: str


def page_of(context: Context, client: ClientConnection, given: dict[bytes, bytes]) -> PageFields | None:
    """The page that a ``commit`` is, if it may be the next one of its outbox; None: it is none.

    Raises:
        BadRequestError: something is missing or malformed.
        OutboxConflictError: another page than ``after=`` is the newest.
        OverloadedError: there are as many outboxes as may be.
        ForbiddenError: the connection's user may not write for this database.
    """
    if OUTBOX not in given:
        return None
    uuid, name, after = given[OUTBOX].decode(), given.get(b"name", b"").decode(), given.get(b"after", b"")
    if not is_valid_name(name) or not (after == _NO_PAGE or _is_txid(after)):
        raise BadRequestError("commit of an outbox's page has outbox=<32 hex>, name= and after=<txid, or ->")
    require(context, client, INSTALL, RESOURCE, uuid)
    page = PageFields(uuid, name, "" if after == _NO_PAGE else after.decode())
    last = context.state.outbox_chains.last(uuid)
    if last != page.after:
        raise OutboxConflictError(f"the newest page of outbox {name} is {last or 'none'}, not {page.after or 'none'}")
    if not last:
        _refuse_more(context, client)
    return page


def take(context: Context, client: ClientConnection, page: PageFields, txid: TxId) -> None:
    """Journal and fold that a transaction is the newest page, into the record of its decision. Cannot refuse."""
    fields = {"uuid": page.uuid, "name": page.name, "last": str(txid), "time_ms": context.now_ms}
    context.group.add_entry(entries.json_entry(entries.OUTBOX_CHAIN, fields))
    context.state.outbox_chains.fold(fields)
    if not page.after:
        note_made(context, client, OUTBOX_SHARE, page.uuid)
    context.counters.outbox_pages += 1
    crash_point("broker.outbox.page_taken")


def outbox(context: Context, client: ClientConnection, request: Request) -> None:
    """Tell the newest page of an outbox; with ``forget`` its chain is dropped."""
    _, arguments, extensions, _body, opaque = request
    if not is_hex32(arguments[0]):
        raise BadRequestError("outbox needs the uuid of an outbox: 32 hex")
    uuid, chains = arguments[0].decode(), context.state.outbox_chains
    if b"forget" not in (extensions or {}):
        require(context, client, INSTALL, RESOURCE, uuid)
        context.answer_from_state(client, opaque, json.dumps({"last": chains.last(uuid) or None}).encode())
        return
    require_administrator(context, client, "outbox forget")
    known = chains.newest.get(uuid)
    if known is None:
        context.answer_from_state(client, opaque, b"")
        return
    fields = {"uuid": uuid, "last": None}
    context.group.add_entry(entries.json_entry(entries.OUTBOX_CHAIN, fields))
    chains.fold(fields)
    context.state.principals.unmade(OUTBOX_SHARE, uuid)
    audit(context, client, "outbox forgotten", uuid=uuid, name=known.name, last=known.last)
    context.answer_when_durable(client, opaque)


def rows(context: Context, client: ClientConnection) -> list[dict[str, str | int]]:
    """Each outbox that an operator may see."""
    return [
        {"outbox": page.name, "uuid": uuid, "last": page.last, "last_ms_ago": max(0, context.now_ms - page.taken_ms)}
        for uuid, page in context.state.outbox_chains.newest.items()
        if sees(context, client, RESOURCE, uuid)
    ]


def _is_txid(text: bytes) -> bool:
    try:
        TxId.parse(text.decode())
    except ValueError:
        return False
    return True


def _refuse_more(context: Context, client: ClientConnection) -> None:
    most = outbox_chains.OUTBOXES_MAX
    refuse_over_half(context, client, OUTBOX_SHARE, most, "outboxes")
    if len(context.state.outbox_chains.newest) >= most:
        raise OverloadedError(
            f"{most} outboxes are known and none is dropped by itself: an administrator forgets one that is no more "
            "(outbox <uuid> forget)"
        )
