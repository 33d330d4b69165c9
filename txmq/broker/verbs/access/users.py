"""The verbs ``user``, ``acl`` and ``quota``: users, what they may do, and their limits.

``user`` adds, changes, removes and lists users; ``acl`` grants, revokes and lists what they may do; ``quota`` sets,
removes and lists limits of users and topics, to which ``shell/throttle`` holds them. Each plans its change;
``access_changes`` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.principals import Entry, User, user_record
from txmq.broker.verbs.access.access_changes import SECRET_BITS, Plan, Work, carry_out, check_name, chosen, journal
from txmq.errors import BadRequestError, OverloadedError, UserExistsError
from txmq.protocol.grants import ADMINISTRATOR, ALL, CLUSTER, Grant, read_grants
from txmq.protocol.json_text import read_json
from txmq.protocol.requests import Request, RequestFields
from txmq.protocol.scram import ScramKeys
from txmq.redo import entries
from txmq.registry.cluster_metadata import Record

USERS_MAX: Final = 10_000
CERTIFICATE_LENGTH_MAX: Final = 500
Body = bytes | bytearray
GRANTS_MAX: Final = 1000  # of one user
_KINDS: Final = (b"topic", b"group", b"resource", b"broker")
_GRANT_EVENTS: Final = {"grant": "granted", "revoke": "revoked"}
QUOTAS_MAX: Final = 10_000
_OF_ALL: Final = ("bytes_per_s", "requests_per_s")
LIMITS: Final = {"user": (*_OF_ALL, "connections_max", "unsettled_max"), "topic": _OF_ALL}


# --- user ------------------------------------------------------------------------------------------------------------


def user(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action, and describe the user, or all."""
    _, arguments, _extensions, body, _opaque = request
    action, name = arguments[0].decode(), arguments[1].decode()
    change, removed = _USER_CHANGES.get(action), list[dict[str, Any]]()
    if change is not None:
        check_name("user", name)
    elif action != "list":
        raise BadRequestError(f"user {action[:40]}: expected one of {', '.join(_USER_CHANGES)}, list")

    def plan() -> Plan:
        if change is None:
            return Plan()
        if action == "remove":
            removed[:] = [_described_user(context, one) for one in chosen(context, name)]
        return Plan(change(context, name, body or b""), _USER_EVENTS[action], {"whom": name})

    def describe() -> dict[str, Any]:
        return {"users": removed or [_described_user(context, known) for known in chosen(context, name)]}

    carry_out(context, Work(client, request, plan, describe, is_list=change is None))


def add_first(context: Context, name: str, body: Body) -> None:
    """Make the first user, before anybody is served. Raises BrokerError: the name or the body is none."""
    check_name("user", name)
    for kind, fields in _add(context, name, body):
        journal(context, kind, fields)
    context.group.needs_sync = True


def first_record(name: str, body: Body) -> Record:
    """The first user of a cluster, as the registry has it. Raises BrokerError: the name or the body is none."""
    check_name("user", name)
    return user_record(*_read(body), [ADMINISTRATOR])


def _add(context: Context, name: str, body: Body) -> list[Entry]:
    principals = context.state.principals
    if name in principals.users:
        raise UserExistsError(f"{name}: change the password with txmq user passwd, or take another name")
    if len(principals.users) >= USERS_MAX:
        raise OverloadedError(f"{USERS_MAX} users exist: remove those that are not needed")
    fields = _fields(name, *_credentials_of(context, name, body))
    if principals.users:
        return [(entries.USER, fields)]
    if context.cluster is None:  # else the registry has it
        fields["secret"] = f"{context.random.bits(SECRET_BITS):064x}"
    # In the same record: nobody else could grant it.
    return [(entries.USER, fields), (entries.GRANTED, {"user": name, "grants": [ADMINISTRATOR]})]


def _passwd(context: Context, name: str, body: Body) -> list[Entry]:
    known = context.state.principals.known(name)
    keys, certificate = _credentials_of(context, name, body)
    return [(entries.USER, _fields(name, keys or known.keys, certificate or known.certificate))]


def _remove(context: Context, name: str, body: Body) -> list[Entry]:
    known = context.state.principals.known(name)
    if body:
        raise BadRequestError("user remove: takes no body")
    refuse_last_administrator(context, known)
    return [(entries.USER_REMOVED, {"user": name})]


_USER_CHANGES: Final[dict[str, Callable[[Context, str, Body], list[Entry]]]] = {
    "add": _add, "passwd": _passwd, "remove": _remove,
}  # fmt: skip

_USER_EVENTS: Final = {"add": "user added", "passwd": "user changed", "remove": "user removed"}


def refuse_last_administrator(context: Context, known: User) -> None:
    """Refuse what would leave nobody who may change anything."""
    if context.state.principals.is_last_administrator(known):
        raise BadRequestError(
            f"{known.name} is the last administrator: make another one first, txmq acl add USER --administrator"
        )


def _fields(name: str, keys: ScramKeys | None, certificate: str | None) -> dict[str, Any]:
    return {"user": name, "keys": keys, "certificate": certificate}


def _credentials_of(context: Context, name: str, body: Body) -> tuple[ScramKeys | None, str | None]:
    """As ``_read``; nobody else has the certificate."""
    keys, certificate = _read(body)
    for other in context.state.principals.users.values():
        if certificate is not None and other.certificate == certificate and other.name != name:
            raise BadRequestError(f"user: the certificate is {other.name}'s")
    return keys, certificate


def _read(body: Body) -> tuple[ScramKeys | None, str | None]:
    """Keys and certificate as a request states them; no error tells them."""
    stated = read_json(body)
    if not isinstance(stated, dict) or stated.keys() != {"keys", "certificate"}:
        raise BadRequestError("user: expected a JSON object of keys and certificate")
    certificate = stated["certificate"]
    if certificate is not None:
        _check_certificate(certificate)
    keys = None if stated["keys"] is None else ScramKeys.from_json(stated["keys"])
    if keys is None and certificate is None:
        raise BadRequestError("user: keys of a password, or a certificate's name, or both")
    return keys, certificate


def _check_certificate(certificate: object) -> None:
    is_text = isinstance(certificate, str) and certificate.isprintable() and certificate.isascii()
    if not is_text or not 0 < len(str(certificate)) <= CERTIFICATE_LENGTH_MAX:
        raise BadRequestError(f"user: certificate is 1 to {CERTIFICATE_LENGTH_MAX} printable characters")


def _described_user(context: Context, name: str) -> dict[str, Any]:
    known = context.state.principals.users[name]
    return {
        "user": name, "password": known.keys is not None, "certificate": known.certificate,
        "administrator": known.is_administrator, "grants": len(known.grants),
    }  # fmt: skip


# --- acl -------------------------------------------------------------------------------------------------------------


def acl(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action, and say what the user may, or all users."""
    _, arguments, extensions, _body, _opaque = request
    action, name = arguments[0].decode(), arguments[1].decode()
    stated: list[Grant] = []
    if action in _GRANT_EVENTS:
        stated = _grants_of(extensions)
    elif action != "list" or extensions:
        raise BadRequestError(f"acl {action[:40]}: expected grant or revoke with grants, or list without")

    def plan() -> Plan:
        if not stated:
            return Plan()
        may, (_, kind, thing) = ",".join(grant.may for grant in stated), stated[0]
        made = _changed_grants(context, name, stated, is_grant=action == "grant")
        return Plan(made, _GRANT_EVENTS[action], {"whom": name, "may": may, "kind": kind, "name": thing})

    def describe() -> dict[str, Any]:
        return {"users": [{"user": one, "grants": _described_grants(context, one)} for one in chosen(context, name)]}

    carry_out(context, Work(client, request, plan, describe, is_list=not stated))


def _grants_of(extensions: RequestFields) -> list[Grant]:
    given = extensions or {}
    if given.keys() == {b"cluster"}:
        return [ADMINISTRATOR]
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) != 1 or given.keys() != {b"may", kinds[0]}:
        raise BadRequestError(f"acl: expected may= and one of topic=, group=, resource=, broker=; or {CLUSTER} alone")
    return read_grants(given[b"may"].decode(), kinds[0].decode(), given[kinds[0]].decode())


def _changed_grants(context: Context, name: str, stated: list[Grant], *, is_grant: bool) -> list[Entry]:
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


def _described_grants(context: Context, name: str) -> list[dict[str, Any]]:
    return [grant._asdict() for grant in context.state.principals.users[name].grants]


# --- quota -----------------------------------------------------------------------------------------------------------


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
        made = [] if is_list else _set_quota(context, kind, name, limits)
        return Plan(made, "quota changed", {"kind": kind, "name": name, "limits": told})

    carry_out(context, Work(client, request, plan, lambda: _described_quotas(context, kind, name), is_list=is_list))


def _described_quotas(context: Context, kind: str, name: str) -> dict[str, Any]:
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


def _set_quota(context: Context, kind: str, name: str, limits: dict[str, int]) -> list[Entry]:
    """What makes the change; nothing if all is so already."""
    principals = context.state.principals
    if kind == "user" and limits:
        principals.known(name)
    if principals.quotas.get((kind, name), {}) == limits:
        return []
    if (kind, name) not in principals.quotas and len(principals.quotas) >= QUOTAS_MAX:
        raise OverloadedError(f"{QUOTAS_MAX} quotas are kept: remove those that are not needed")
    return [(entries.QUOTA_SET, {"kind": kind, "name": name, "limits": limits})]
