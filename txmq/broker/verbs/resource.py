"""The verb ``resource``: resolvers report what they see in databases, operators list it."""

from __future__ import annotations

import json

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.resolver_reports import Branch, Reporter, Sighting
from txmq.broker.verbs.access.authorizer import RESOURCE, SETTLE, is_administrator, require, require_any, sees
from txmq.errors import BadRequestError, InvalidNameError
from txmq.model import TransactionKind, is_valid_name
from txmq.protocol.json_text import Fields, is_whole, read_json
from txmq.protocol.requests import Request
from txmq.xid import TxId, is_bqual_text

BRANCHES_LISTED_MAX = 20
TEXT_LENGTH_MAX = 500
_AGE_MS_MAX = 1 << 53
_KINDS = (TransactionKind.XA.value, TransactionKind.LAST_RESOURCE.value)


def resource(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action."""
    _, arguments, _extensions, body, opaque = request
    action, name = arguments[0].decode(), arguments[1].decode()
    if action == "list":
        rows = [row for row in shown_rows(context, client) if name in ("*", row["resource"])]
        answer: Fields = {"resources": rows}
    elif action == "report":
        context.alarms += context.resources.report(_sighting(context, client, name, read_json(body or b"")))
        answer = {}
    else:
        raise BadRequestError(f"resource {action[:40]}: expected report or list")
    context.answer_from_state(client, opaque, json.dumps(answer).encode())


def shown_rows(context: Context, client: ClientConnection) -> list[Fields]:
    """What resolvers reported of databases that the connection's user may do something with."""
    rows = context.resources.rows(context.now_ms)
    if is_administrator(context, client):
        return rows
    return [row for row in rows if row["uuid"] is not None and sees(context, client, RESOURCE, row["uuid"])]


def reporter_of(client: ClientConnection) -> Reporter:
    """The reporter of a connection: its session, which outlives it, or the connection itself."""
    return ("connection", client.number) if client.session is None else ("session", client.session.number)


def _sighting(context: Context, client: ClientConnection, name: str, found: object) -> Sighting:
    if not is_valid_name(name):
        raise InvalidNameError(f"resource {name[:80]!r}: 1 to 200 of A-Z a-z 0-9 . _ -")
    fields = found if isinstance(found, dict) else {}
    kind, is_reachable = fields.get("kind"), fields.get("reachable")
    if kind not in _KINDS or not isinstance(is_reachable, bool):
        raise _malformed("kind and reachable")
    uuid = _uuid(fields.get("uuid"))
    if uuid is None:
        require_any(context, client, SETTLE, RESOURCE)
    else:
        require(context, client, SETTLE, RESOURCE, uuid)
    reporter = reporter_of(client)
    oldest = fields.get("oldest", [])
    if not (isinstance(oldest, list) and len(oldest) <= BRANCHES_LISTED_MAX):
        raise _malformed(f"at most {BRANCHES_LISTED_MAX} oldest")
    why = fields.get("why")
    since_ms = context.now_ms if is_reachable else context.resources.since_ms((kind, name), reporter, context.now_ms)
    return Sighting(
        kind, name, uuid, reporter, f"{client.name or 'somebody'} at {client.address or 'here'}",
        context.now_ms, is_reachable, None if why is None else _text(why), _number(fields.get("branches", 0)),
        _number(fields.get("age_ms", 0)), tuple(_branch(row) for row in oldest), since_ms,
    )  # fmt: skip


def _branch(row: object) -> Branch:
    if not (isinstance(row, list) and len(row) == 4):
        raise _malformed("oldest as [txid, bqual, age ms, why]")
    try:
        txid = str(TxId.parse(_text(row[0])))
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    bqual = _text(row[1])
    if not is_bqual_text(bqual):
        raise _malformed("a bqual of at most 64 printable ASCII characters")
    return Branch(txid, bqual, _number(row[2]), _text(row[3]))


def _uuid(value: object) -> str | None:
    if value is None:
        return None
    text = _text(value)
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise _malformed("uuid of 32 hex digits, or null")
    return text


def _text(value: object) -> str:
    if not (isinstance(value, str) and len(value) <= TEXT_LENGTH_MAX and is_whole(value)):
        raise _malformed(f"texts of at most {TEXT_LENGTH_MAX} characters")
    return value


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _AGE_MS_MAX:
        raise _malformed("numbers from 0")
    return value


def _malformed(expected: str) -> BadRequestError:
    return BadRequestError(f"resource report: expected a JSON object with {expected}")
