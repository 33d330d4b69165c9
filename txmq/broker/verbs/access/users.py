"""The verb ``user``: add, passwd, remove, list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.access.principals import User
from txmq.broker.verbs.access.asking import log_out, strangers_from_now_on
from txmq.broker.verbs.access.audit import audit
from txmq.broker.verbs.access.changes import check_name, chosen, journal, tell
from txmq.errors import BadRequestError, OverloadedError, UserExistsError
from txmq.protocol.grants import ADMINISTRATOR
from txmq.protocol.json_text import read_json
from txmq.protocol.requests import Request
from txmq.protocol.scram import ScramKeys
from txmq.redo import entries

USERS_MAX: Final = 10_000
CERTIFICATE_LENGTH_MAX: Final = 500
_SECRET_BITS: Final = 256
Body = bytes | bytearray


def user(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action, and describe the user, or all."""
    _, arguments, _extensions, body, opaque = request
    action, name = arguments[0].decode(), arguments[1].decode()
    change = _CHANGES.get(action)
    if change is not None:
        check_name("user", name)
        described = change(context, name, body or b"")
        audit(context, client, _TOLD[action], whom=name)
    elif action == "list":
        described = [_described(context, known) for known in chosen(context, name)]
    else:
        raise BadRequestError(f"user {action[:40]}: expected one of {', '.join(_CHANGES)}, list")
    tell(context, client, opaque, {"users": described}, is_new=change is not None)


def add_first(context: Context, name: str, body: Body) -> None:
    """Make the first user, before anybody is served. Raises BrokerError: the name or the body is none."""
    check_name("user", name)
    _add(context, name, body)
    context.group.needs_sync = True


def _add(context: Context, name: str, body: Body) -> list[dict[str, Any]]:
    principals = context.state.principals
    if name in principals.users:
        raise UserExistsError(f"{name}: change the password with txmq user passwd, or take another name")
    if len(principals.users) >= USERS_MAX:
        raise OverloadedError(f"{USERS_MAX} users exist: remove those that are not needed")
    keys, certificate = _read(context, name, body)
    fields = _fields(name, keys, certificate)
    is_first = not principals.users
    if is_first:
        fields["secret"] = f"{context.random.bits(_SECRET_BITS):064x}"
    journal(context, entries.USER, fields)
    if is_first:  # in the same record: nobody else could grant it
        journal(context, entries.GRANTED, {"user": name, "grants": [ADMINISTRATOR]})
        strangers_from_now_on(context)
    return [_described(context, name)]


def _passwd(context: Context, name: str, body: Body) -> list[dict[str, Any]]:
    known = context.state.principals.known(name)
    keys, certificate = _read(context, name, body)
    journal(context, entries.USER, _fields(name, keys or known.keys, certificate or known.certificate))
    return [_described(context, name)]


def _remove(context: Context, name: str, body: Body) -> list[dict[str, Any]]:
    known = context.state.principals.known(name)
    if body:
        raise BadRequestError("user remove: takes no body")
    refuse_last_administrator(context, known)
    described = [_described(context, name)]
    journal(context, entries.USER_REMOVED, {"user": name})
    log_out(context, name)
    return described


_CHANGES: Final[dict[str, Callable[[Context, str, Body], list[dict[str, Any]]]]] = {
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


def _read(context: Context, name: str, body: Body) -> tuple[ScramKeys | None, str | None]:
    """Keys and certificate as a request states them; no error tells them."""
    stated = read_json(body)
    if not isinstance(stated, dict) or stated.keys() != {"keys", "certificate"}:
        raise BadRequestError("user: expected a JSON object of keys and certificate")
    certificate = stated["certificate"]
    if certificate is not None:
        _check_certificate(context, name, certificate)
    keys = None if stated["keys"] is None else ScramKeys.from_json(stated["keys"])
    if keys is None and certificate is None:
        raise BadRequestError("user: keys of a password, or a certificate's name, or both")
    return keys, certificate


def _check_certificate(context: Context, name: str, certificate: object) -> None:
    is_text = isinstance(certificate, str) and certificate.isprintable() and certificate.isascii()
    if not is_text or not 0 < len(str(certificate)) <= CERTIFICATE_LENGTH_MAX:
        raise BadRequestError(f"user: certificate is 1 to {CERTIFICATE_LENGTH_MAX} printable characters")
    for other in context.state.principals.users.values():
        if other.certificate == certificate and other.name != name:
            raise BadRequestError(f"user: the certificate is {other.name}'s")


def _described(context: Context, name: str) -> dict[str, Any]:
    known = context.state.principals.users[name]
    return {
        "user": name, "password": known.keys is not None, "certificate": known.certificate,
        "administrator": known.is_administrator, "grants": len(known.grants),
    }  # fmt: skip
