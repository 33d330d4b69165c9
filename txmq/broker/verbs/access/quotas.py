"""Quotas: the verb ``quota`` sets, removes and lists limits of users and topics; and what a fair share is.

``shell/throttle`` holds users to their limits.

*A fair share.* Of what there may be so many (groups, partitions, queries, outboxes, databases), one user makes half at
most. Administrators are not counted: they make what all use, and raise the setting. What there was before there were
users is nobody's. With a registry each home counts what it was asked for.

Invariant: what a user made counts until it is deleted, whoever deletes it, through restarts (``Principals.made``).
"""

from __future__ import annotations

from typing import Any, Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.principals import Entry
from txmq.broker.verbs.access.access_changes import Plan, Work, carry_out, check_name
from txmq.broker.verbs.access.authorizer import permissions_of
from txmq.errors import BadRequestError, OverloadedError
from txmq.protocol.grants import ALL
from txmq.protocol.requests import Request, RequestFields
from txmq.redo import entries

QUOTAS_MAX: Final = 10_000
_OF_ALL: Final = ("bytes_per_s", "requests_per_s")
LIMITS: Final = {"user": (*_OF_ALL, "connections_max", "unsettled_max"), "topic": _OF_ALL}
TOPIC_SHARE: Final = "topic"  # counted by partitions
GROUP_SHARE: Final = "group"
QUERY_SHARE: Final = "query"
DATABASE_SHARE: Final = "database"
OUTBOX_SHARE: Final = "outbox"


def quota(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action, and say which quotas there are of the kind and name."""
    _, arguments, extensions, _body, _opaque = request
    action, kind, name = (word.decode() for word in arguments)
    if kind not in LIMITS and not (kind == ALL and action == "list"):
        raise BadRequestError(f"quota of {kind[:40]!r}: expected one of {', '.join(LIMITS)}")
    limits: dict[str, int] = {}
    if action == "set":
        limits = _limits(kind, extensions)
    elif extensions or action not in ("remove", "list"):
        raise BadRequestError(f"quota {action[:40]}: expected set with limits, or remove or list without")
    is_list = action == "list"
    if not is_list:
        check_name(kind, name)

    def plan() -> Plan:
        told = ",".join(f"{limit}={value}" for limit, value in limits.items()) or "none"
        made = [] if is_list else _set(context, kind, name, limits)
        return Plan(made, "quota changed", {"kind": kind, "name": name, "limits": told})

    carry_out(context, Work(client, request, plan, lambda: _described(context, kind, name), is_list=is_list))


def _described(context: Context, kind: str, name: str) -> dict[str, Any]:
    rows = [
        {"kind": of[0], "name": of[1], "limits": limits}
        for of, limits in context.state.principals.quotas.items()
        if kind in (ALL, of[0]) and name in (ALL, of[1])
    ]
    return {"quotas": rows}


def _limits(kind: str, extensions: RequestFields) -> dict[str, int]:
    stated = {name.decode(): int(value) for name, value in (extensions or {}).items()}
    unknown = [name for name in stated if name not in LIMITS[kind]]
    if unknown:
        raise BadRequestError(f"quota: a {kind} has no {unknown[0]}, but {', '.join(LIMITS[kind])}")
    if not stated or 0 in stated.values():
        raise BadRequestError("quota set: one limit or more, each from 1 on; quota remove takes them away")
    return stated


def _set(context: Context, kind: str, name: str, limits: dict[str, int]) -> list[Entry]:
    """What makes the change; nothing if all is so already."""
    principals = context.state.principals
    if kind == "user" and limits:
        principals.known(name)
    if principals.quotas.get((kind, name), {}) == limits:
        return []
    if (kind, name) not in principals.quotas and len(principals.quotas) >= QUOTAS_MAX:
        raise OverloadedError(f"{QUOTAS_MAX} quotas are kept: remove those that are not needed")
    return [(entries.QUOTA_SET, {"kind": kind, "name": name, "limits": limits})]


def refuse_over_half(
    context: Context, client: ClientConnection, kind: str, limit: int, setting: str, *, more: int = 1, unsaved: int = 0
) -> None:
    """Refuse to make more of a kind.

    Args:
        limit: how many there may be of all users.
        setting: its name.
        more: how many will be made.
        unsaved: how many of the user's there are that ``note_made`` was not told of.

    Raises:
        OverloadedError: the user has half of them.
    """
    user = counted_user(context, client)
    known = context.state.principals.made_sizes.get((kind, user), 0) + unsaved
    if user and more > 0 and known + more > max(1, limit // 2):
        raise OverloadedError(
            f"{user} has made {known} of {setting} {limit}, half of which is one user's at most: delete some, or have "
            "an administrator make them"
        )


def note_made(context: Context, client: ClientConnection, kind: str, name: str, size: int = 1) -> None:
    """Journal that the connection's user has made it, or that it counts for ``size`` from now on."""
    by, _ = context.state.principals.made.get((kind, name), ("", 0))
    journal_made(context, by or counted_user(context, client), kind, name, size)


def journal_made(context: Context, user: str, kind: str, name: str, size: int = 1) -> None:
    """The same for a named user; without a name nothing is noted."""
    if user:
        fields = {"kind": kind, "name": name, "user": user, "size": size}
        context.group.add_entry(entries.json_entry(entries.MADE, fields))
        context.state.principals.fold(entries.MADE, fields)


def counted_user(context: Context, client: ClientConnection) -> str:
    """The connection's user; empty for nobody and for administrators, whose things are not counted."""
    known = permissions_of(context, client)
    return "" if known is None or known.is_administrator else known.user
