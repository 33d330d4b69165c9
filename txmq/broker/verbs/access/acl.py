"""The verb ``acl``: grant, revoke, list what users may do."""

from __future__ import annotations

from typing import Any, Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.principals import Entry
from txmq.broker.verbs.access.access_changes import Plan, Work, carry_out, chosen
from txmq.broker.verbs.access.users import refuse_last_administrator
from txmq.errors import BadRequestError, OverloadedError
from txmq.protocol.grants import ADMINISTRATOR, CLUSTER, Grant, read_grants
from txmq.protocol.requests import Request, RequestFields
from txmq.redo import entries

GRANTS_MAX: Final = 1000  # of one user
_KINDS: Final = (b"topic", b"group", b"resource", b"broker")
_TOLD: Final = {"grant": "granted", "revoke": "revoked"}


def acl(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action, and say what the user may, or all users."""
    _, arguments, extensions, _body, _opaque = request
    action, name = arguments[0].decode(), arguments[1].decode()
    stated: list[Grant] = []
    if action in _TOLD:
        stated = _grants_of(extensions)
    elif action != "list" or extensions:
        raise BadRequestError(f"acl {action[:40]}: expected grant or revoke with grants, or list without")

    def plan() -> Plan:
        if not stated:
            return Plan()
        may, (_, kind, thing) = ",".join(grant.may for grant in stated), stated[0]
        made = _change(context, name, stated, is_grant=action == "grant")
        return Plan(made, _TOLD[action], {"whom": name, "may": may, "kind": kind, "name": thing})

    def describe() -> dict[str, Any]:
        return {"users": [{"user": one, "grants": _described(context, one)} for one in chosen(context, name)]}

    carry_out(context, Work(client, request, plan, describe, is_list=not stated))


def _grants_of(extensions: RequestFields) -> list[Grant]:
    given = extensions or {}
    if given.keys() == {b"cluster"}:
        return [ADMINISTRATOR]
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) != 1 or given.keys() != {b"may", kinds[0]}:
        raise BadRequestError(f"acl: expected may= and one of topic=, group=, resource=, broker=; or {CLUSTER} alone")
    return read_grants(given[b"may"].decode(), kinds[0].decode(), given[kinds[0]].decode())


def _change(context: Context, name: str, stated: list[Grant], *, is_grant: bool) -> list[Entry]:
    """What makes the change; nothing if all is so already."""
    known = context.state.principals.known(name)
    if is_grant:
        after = [*known.grants, *(grant for grant in stated if grant not in known.grants)]
    else:
        after = [grant for grant in known.grants if grant not in stated]
    if len(after) > GRANTS_MAX:
        raise OverloadedError(f"{name} would have {len(after)} grants, at most {GRANTS_MAX}: use names that end with *")
    if ADMINISTRATOR not in after:
        refuse_last_administrator(context, known)
    if after == list(known.grants):
        return []
    return [(entries.GRANTED, {"user": name, "grants": after})]


def _described(context: Context, name: str) -> list[dict[str, Any]]:
    return [grant._asdict() for grant in context.state.principals.users[name].grants]
