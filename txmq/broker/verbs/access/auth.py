"""The verb ``auth``: a connection says whose it is, and proves it.

Invariants:
    * whatever is wrong, the answer is the same, and so is the work before it;
    * failed logins of an address make its next ones wait. Not who shows a user's certificate, nor a broker of the
      cluster: nobody guesses these, so a removed user's service that tries for ever keeps neither out;
    * a login ends with its second message, right or wrong: a message serves once.
"""

from __future__ import annotations

from typing import NoReturn

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.access.failed_logins import FailedLogins
from txmq.broker.verbs.access.audit import LOGIN_FAILED, audit
from txmq.broker.verbs.hello import let_go
from txmq.errors import BadRequestError, OverloadedError, UnauthenticatedError
from txmq.model import is_valid_name
from txmq.protocol.peers import home_of, is_peer, peer_keys
from txmq.protocol.requests import Request
from txmq.protocol.scram import REFUSED, ScramKeys, ScramLogin, has_password, mock_keys

_NONCE_BITS = 192


def auth(context: Context, client: ClientConnection, request: Request) -> None:
    """Take one message of a login."""
    _, arguments, _extensions, body, opaque = request
    mechanism, message = arguments[0], bytes(body or b"")
    if client.user in context.state.principals.users or not context.state.principals.users:
        raise BadRequestError("auth: there are no users here, or the connection has logged in")
    if mechanism == b"scram-sha-256":
        if not _is_peers(client, message):
            _wait(context, client, context.failed_logins)
        context.answer(client, opaque, _scram(context, client, message))
    elif mechanism == b"plain":
        _wait(context, client, context.failed_logins)
        _plain(context, client, message)
        context.answer(client, opaque, b"")
    elif mechanism == b"external":
        _external(context, client, message.decode("utf-8", "replace"))
        context.answer(client, opaque, b"")
    else:
        raise BadRequestError("auth: expected scram-sha-256, plain or external")


def _wait(context: Context, client: ClientConnection, failed: FailedLogins) -> None:
    wait_ms = failed.wait_ms(client.address, context.now_ms)
    if wait_ms:
        raise OverloadedError(f"auth: too many logins from this address failed; try again in {wait_ms} ms")


def _is_peers(client: ClientConnection, message: bytes) -> bool:
    """Whether a broker logs in, or who says that he is one; the final message counts by the name of the first."""
    if client.login is not None:
        return is_peer(client.login.user)
    name = message.split(b",", 3)[2:3]
    return bool(name) and is_peer(name[0].removeprefix(b"n=").decode("utf-8", "replace"))


def _scram(context: Context, client: ClientConnection, message: bytes) -> bytes:
    login, client.login = client.login, None
    try:
        if login is None:
            nonce = f"{context.random.bits(_NONCE_BITS):048x}"
            login = ScramLogin(lambda name: _keys(context, name), nonce, client.binding)
            told = login.first(message)
            client.login = login
            return told
        told = login.final(message)
    except UnauthenticatedError:
        _failed(context, client, "scram-sha-256", "" if login is None else login.user)
    is_known = context.state.principals.speaker(login.user) is not None
    if not is_known or _keys(context, login.user) != login.keys:  # removed, or given another password, meanwhile
        _failed(context, client, "scram-sha-256", login.user)
    _succeeded(context, client, "scram-sha-256", login.user)
    return told


def _keys(context: Context, name: str) -> ScramKeys:
    principals = context.state.principals
    mock = mock_keys(principals.secret, name)  # always: so it costs the same
    home = home_of(name)
    if (
        home is not None
        and context.cluster is not None
        and home in context.cluster.homes
        and principals.between_brokers
    ):
        return peer_keys(principals.between_brokers, home, context.state.home)
    known = principals.users.get(name)
    return mock if known is None or known.keys is None else known.keys


def _plain(context: Context, client: ClientConnection, message: bytes) -> None:
    if client.binding is None:
        raise BadRequestError("auth plain: over TLS only; use scram-sha-256")
    words = message.decode("utf-8", "replace").split("\0")
    if len(words) != 3 or words[0]:
        raise BadRequestError("auth plain: expected \\0<user>\\0<password>")
    if not has_password(_keys(context, words[1]), words[2]):
        _failed(context, client, "plain", words[1])
    _succeeded(context, client, "plain", words[1])


def _external(context: Context, client: ClientConnection, wished: str) -> None:
    users = context.state.principals.users.values()
    names = [user.name for user in users if user.certificate in client.certificates]
    if len(names) != 1 or wished not in ("", names[0]):
        _wait(context, client, context.failed_certificates)
        _failed(context, client, "external", wished)
    _succeeded(context, client, "external", names[0])


def _succeeded(context: Context, client: ClientConnection, mechanism: str, name: str) -> None:
    most = context.state.principals.quotas.get(("user", name), {}).get("connections_max")
    if most is not None and sum(other.user == name for other in context.clients.values()) >= most:
        raise OverloadedError(f"auth: connections_max {most} of user {name} is reached: close some of its connections")
    if client.session is not None and client.session.user != name:
        let_go(context, client)  # it was another user's, who is no more
    client.user = name
    context.counters.logins += 1
    audit(context, client, "login", mechanism=mechanism)


def _failed(context: Context, client: ClientConnection, mechanism: str, name: str) -> NoReturn:
    if mechanism == "external":
        context.failed_certificates.failed(client.address, context.now_ms)
    elif not is_peer(name):  # whose password nobody guesses; a home that has just come is not known yet
        context.failed_logins.failed(client.address, context.now_ms)
    context.counters.logins_failed += 1
    tried = name if is_valid_name(name) else "-"  # a stranger's text: no user has such a name
    audit(context, client, LOGIN_FAILED, mechanism=mechanism, tried=tried)
    raise UnauthenticatedError(REFUSED)
