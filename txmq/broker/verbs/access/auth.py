"""The verb ``auth``: a connection says whose it is, and proves it.

Invariants:
    * whatever is wrong, the answer is the same, and so is the work before it;
    * a right login is let in at once, whatever others at the address did; the answer to a wrong one waits, the longer
      the more logins of the address have failed (``FailedLogins``), brokers' and those by certificate, too;
    * no login costs the loop more than PLAIN_ITERATIONS_MAX, whatever iterations a user's keys have;
    * a login ends with its second message, right or wrong: a message serves once.
"""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.audit_log import LOGIN_FAILED, audit, refused
from txmq.broker.verbs.hello import let_go
from txmq.errors import BadRequestError, OverloadedError, UnauthenticatedError
from txmq.model import is_valid_name
from txmq.protocol.requests import Request
from txmq.protocol.scram import REFUSED, ScramKeys, ScramLogin, has_password, home_of, mock_keys, peer_keys

PLAIN_ITERATIONS_MAX: Final = 16_384  # some 8 ms of the loop; by SCRAM the client makes them
_NONCE_BITS = 192


class LateRefusal(NamedTuple):
    """The answer to a failed login, which waits; nothing more is taken in from its connection meanwhile."""

    client: ClientConnection
    opaque: bytes
    error: UnauthenticatedError

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it."""
        return self.client.gone


def auth(context: Context, client: ClientConnection, request: Request) -> None:
    """Take one message of a login."""
    _, arguments, _extensions, body, opaque = request
    mechanism, message = arguments[0], bytes(body or b"")
    if client.user in context.state.principals.users or not context.state.principals.users:
        raise BadRequestError("auth: there are no users here, or the connection has logged in")
    told = b""
    try:
        if mechanism == b"scram-sha-256":
            told = _scram(context, client, message)
        elif mechanism == b"plain":
            _plain(context, client, message)
        elif mechanism == b"external":
            _external(context, client, message.decode("utf-8", "replace"))
        else:
            raise BadRequestError("auth: expected scram-sha-256, plain or external")
    except UnauthenticatedError as error:
        pause_ms = min(
            context.failed_logins.failed(client.address, context.now_ms), context.settings.login_timeout_ms // 2
        )
        if not pause_ms:
            raise
        _refuse_late(context, client, request, error, pause_ms)
    else:
        context.answer(client, opaque, told)


def _refuse_late(
    context: Context, client: ClientConnection, request: Request, error: UnauthenticatedError, pause_ms: int
) -> None:
    context.counters.errors += 1
    refused(context, client, request[0], error)
    client.waiting = request
    client.given_bytes = 1 << 62  # ends the connection's turn, as a request does that waits for the registry
    late = LateRefusal(client, request[4], error.with_traceback(None))
    context.late_refusals.add(context.now_ms + pause_ms, late)


def tick(context: Context) -> list[ClientConnection]:
    """Answer the failed logins that have waited; the connections that can be read again."""
    due: list[LateRefusal] = context.late_refusals.take_due(context.now_ms)
    for late in due:
        late.client.waiting = None
        context.answer(late.client, late.opaque, late.error)
    return [late.client for late in due]


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
    keys, more = _keys(context, words[1]), dict[str, int]()
    if keys.iterations > PLAIN_ITERATIONS_MAX:  # the loop would make them, for whoever guesses
        keys, more = mock_keys(context.state.principals.secret, words[1]), {"iterations": keys.iterations}
    if not has_password(keys, words[2]):
        _failed(context, client, "plain", words[1], **more)
    _succeeded(context, client, "plain", words[1])


def _external(context: Context, client: ClientConnection, wished: str) -> None:
    users = context.state.principals.users.values()
    names = [user.name for user in users if user.certificate in client.certificates]
    if len(names) != 1 or wished not in ("", names[0]):
        _failed(context, client, "external", wished)
    _succeeded(context, client, "external", names[0])


def _succeeded(context: Context, client: ClientConnection, mechanism: str, name: str) -> None:
    most = context.state.principals.quotas.get(("user", name), {}).get("connections_max")
    if most is not None and sum(other.user == name for other in context.clients.values()) >= most:
        raise OverloadedError(f"auth: connections_max {most} of user {name} is reached: close some of its connections")
    if client.session is not None and client.session.user != name:
        let_go(context, client)  # it was that of another user, who is gone
    client.user = name
    context.counters.logins += 1
    audit(context, client, "login", mechanism=mechanism, **_shown(client))


def _shown(client: ClientConnection) -> dict[str, str]:
    return {"certificate": client.certificate} if client.certificate else {}


def _failed(context: Context, client: ClientConnection, mechanism: str, name: str, **more: int) -> NoReturn:
    context.counters.logins_failed += 1
    tried = name if is_valid_name(name) else "-"  # a stranger's text: no user has such a name
    audit(context, client, LOGIN_FAILED, mechanism=mechanism, tried=tried, **_shown(client), **more)
    raise UnauthenticatedError(REFUSED)
