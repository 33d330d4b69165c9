"""The verb ``user``: add, passwd, remove, list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.principals import Entry, User, user_record
from txmq.broker.verbs.access.access_changes import SECRET_BITS, Plan, Work, carry_out, check_name, chosen, journal
from txmq.errors import BadRequestError, OverloadedError, UserExistsError
from txmq.protocol.grants import ADMINISTRATOR
from txmq.protocol.json_text import read_json
from txmq.protocol.requests import Request
from txmq.protocol.scram import ScramKeys
from txmq.redo import entries
from txmq.registry.cluster_metadata import Record

USERS_MAX: Final = 10_000
CERTIFICATE_LENGTH_MAX: Final = 500
Body = bytes | bytearray


def user(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action, and describe the user, or all."""
    _, arguments, _extensions, body, _opaque = request
    action, name = arguments[0].decode(), arguments[1].decode()
    change, removed = _CHANGES.get(action), list[dict[str, Any]]()
    if change is not None:
        check_name("user", name)
    elif action != "list":
        raise BadRequestError(f"user {action[:40]}: expected one of {', '.join(_CHANGES)}, list")

    def plan() -> Plan:
        if change is None:
            return Plan()
        if action == "remove":
            removed[:] = [_described(context, one) for one in chosen(context, name)]
        return Plan(change(context, name, body or b""), _TOLD[action], {"whom": name})

    def describe() -> dict[str, Any]:
        return {"users": removed or [_described(context, known) for known in chosen(context, name)]}

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


_CHANGES: Final[dict[str, Callable[[Context, str, Body], list[Entry]]]] = {
    "add": _add, "passwd": _passwd, "remove": _remove,
}  # fmt: skip

_TOLD: Final = {"add": "user added", "passwd": "user changed", "remove": "user removed"}


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


def _described(context: Context, name: str) -> dict[str, Any]:
    known = context.state.principals.users[name]
    return {
        "user": name, "password": known.keys is not None, "certificate": known.certificate,
        "administrator": known.is_administrator, "grants": len(known.grants),
    }  # fmt: skip
