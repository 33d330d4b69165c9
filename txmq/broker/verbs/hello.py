"""The verbs of a conversation: ``hello``, ``end``, ``ping``, ``version``, ``help``, ``quit``."""

from __future__ import annotations

import json
from hmac import compare_digest

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.session import EPOCH_MAX, BrokerSession
from txmq.broker.verbs.access.authorizer import permissions_of, refuse_nobody
from txmq.broker.verbs.partition_lookup import not_leading
from txmq.broker.verbs.prepare_commit import owner_gone
from txmq.broker.verbs.resource import reporter_of
from txmq.broker.verbs.session_expiry import close, make_room
from txmq.broker.verbs.transaction_checks import no_session
from txmq.errors import (
    BadRequestError,
    FencedError,
    ForbiddenError,
    InvariantError,
    NotOwnerError,
    OtherSessionError,
    UnavailableError,
)
from txmq.protocol import grammar
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.runtime.build import VERSION

PROTOCOL = 1
_SECRET_BITS = 128
WAITS_FOR_REGISTRY = "the broker waits for the registry to say that it leads its home"


def hello(context: Context, client: ClientConnection, request: Request) -> None:
    """Introduce a client; make or resume its session."""
    _, arguments, extensions, _body, opaque = request
    if int(arguments[0]) != PROTOCOL:
        raise BadRequestError(f"protocol {int(arguments[0])} is not spoken here; this broker speaks {PROTOCOL}")
    stated = extensions or {}
    refuse_other_home(context, stated.get(b"home"))
    client.reads_copies = b"replica" in stated
    wish = stated.get(b"session", b"none")
    if wish != b"none" and not context.is_serving:
        if context.leads_never:
            raise not_leading(context)
        raise UnavailableError(WAITS_FOR_REGISTRY)
    known = permissions_of(context, client)
    if wish != b"none" and known is not None:
        refuse_nobody(known)
    if wish == b"new":
        session: BrokerSession | None = _new_session(context, arguments[1].decode("ascii", "replace"), client.user)
    elif wish == b"none":
        session = None
    else:
        session = _resumed(context, client, wish)
    client.name = arguments[1].decode("ascii", "replace")
    _bind(context, client, session)
    context.answer_from_state(client, opaque, _introduction(context, session))


def refuse_other_home(context: Context, wanted: bytes | None) -> None:
    """An address may be another broker's by now, and its sessions have the same numbers."""
    if wanted is None or int(wanted, 16) == context.identity.node:
        return
    home = int(wanted, 16)
    leader = (context.cluster.leader(home) if context.cluster is not None else None) or "-"
    raise NotOwnerError(f"leader={leader} home={home:016x} is not led here, but home {context.identity.node:016x}")


def _new_session(context: Context, name: str, user: str) -> BrokerSession:
    sessions, most = context.state.sessions, context.settings.sessions_max
    own_max = max(1, most // 2)
    if user and context.state.principals.sessions.get(user, 0) >= own_max:
        make_room(context, user, f"{user} has {own_max} sessions, half of sessions_max at most, and none can be ended")
    elif len(sessions) >= most:
        make_room(context, "", f"sessions_max {most} sessions exist and none can be ended")
    secret = f"{context.random.bits(_SECRET_BITS):032x}"
    number = max(context.ids.new_session_number(), context.sessions_from)
    session = BrokerSession(number, 0, name, context.now_ms, secret, user)
    if session.number in sessions:
        raise InvariantError(f"session number {session.number} is in use")
    fields = {"session": session.number, "epoch": 0, "name": name, "time_ms": context.now_ms, "secret": secret}
    if user:
        fields["user"] = user
    context.group.add_entry(entries.json_entry(entries.SESSION, fields))
    context.group.needs_sync = True
    context.state.put_session(session)
    return session


def _resumed(context: Context, client: ClientConnection, wish: bytes) -> BrokerSession:
    """The session that the client resumes with its secret; a higher epoch takes it over.

    One that is nobody's, because it was made before there were users, is the user's from then on.

    Raises:
        FencedError: it has ended, the secret is another one, it was taken over since, or its user is no more.
        NeverIssuedError: there was no such session.
        ForbiddenError: it is another user's.
    """
    number, epoch, secret = int(wish.split(b".")[0], 16), int(wish.split(b".")[1]), wish.split(b".")[2]
    session = context.state.sessions.get(number)
    if session is None:
        raise no_session(context, number, f"session {number:x}")
    if not compare_digest(session.secret.encode(), secret):
        raise FencedError(f"session {number:x} has another secret, or has ended")
    if session.user not in ("", client.user):
        if session.user not in context.state.principals.users:
            raise FencedError(f"session {number:x} is that of a user who was removed: nobody resumes it")
        raise ForbiddenError(f"session {number:x} is another user's: take one of your own (hello session=new)")
    if epoch < session.epoch:
        raise FencedError(f"session {number:x} was taken over: epoch {session.epoch} has it, {epoch} is fenced")
    if epoch > session.epoch or session.user != client.user:
        _take_over(context, session, epoch, client.user)
    return session


def _take_over(context: Context, session: BrokerSession, epoch: int, user: str) -> None:
    if epoch > EPOCH_MAX:
        raise BadRequestError(f"epoch {epoch}: at most {EPOCH_MAX}")
    is_nobodys, former = session.user != user, session.epoch
    fields = {"session": session.number, "epoch": epoch, **({"user": user} if is_nobodys else {})}
    context.group.add_entry(entries.json_entry(entries.SESSION_TAKEN, fields))
    context.group.needs_sync = True
    context.state.take_session(session.number, epoch, user if is_nobodys else "")
    if epoch > former:
        owner_gone(context, session)  # only the older holder could go on with its streams


def let_go(context: Context, client: ClientConnection) -> None:
    """The connection speaks for its session no more: as if it had been lost."""
    session = client.session
    if session is not None:
        context.resources.disconnected(reporter_of(client))
        client.session, session.bound = None, None
        session.gone_ms = context.now_ms
        owner_gone(context, session)


def end(context: Context, client: ClientConnection, request: Request) -> None:
    """The client is done with its session, in order."""
    _, arguments, _extensions, _body, opaque = request
    session = client.session
    if session is None:
        raise OtherSessionError("this connection speaks for no session: say hello first, or another one has taken it")
    let_go(context, client)
    close(context, session, int(arguments[0]))
    context.answer_from_state(client, opaque, b"")


def _bind(context: Context, client: ClientConnection, session: BrokerSession | None) -> None:
    """One connection speaks for a session: an older one is closed, so that two can never race."""
    if client.session is not session:
        let_go(context, client)
    client.session = session
    if session is None:
        return
    client.txid_head = b"%016x-%016x-%x-" % (context.identity.cluster, context.identity.node, session.number)
    if session.bound is not None and session.bound != client.number:
        other = context.clients.get(session.bound)
        if other is not None:
            other.session = None
            context.close(other)
    session.bound = client.number
    # Order of use: the first in the table has been away longest. After a start, when all are away, it is of numbers.
    context.state.sessions[session.number] = context.state.sessions.pop(session.number)


def _introduction(context: Context, session: BrokerSession | None) -> bytes:
    identity, settings = context.identity, context.settings
    told = {
        "cluster": f"{identity.cluster:016x}",
        "home": f"{identity.node:016x}",
        "broker": identity.name,
        "version": VERSION,
        "protocol": PROTOCOL,
        "session": None if session is None else f"{session.number:x}",
        "epoch": 0 if session is None else session.epoch,
        "secret": None if session is None else session.secret,
        "in_flight_max": settings.in_flight_max,
        "request_size_bytes_max": settings.request_size_bytes_max,
        "outcomes_kept": settings.outcomes_kept,
        "compression": ["gzip", "lz4", "zstd"],
        "time_ms": context.now_ms,
        "database_fences": True,
    }
    if context.cluster is not None:
        told["registry"] = True
    if context.leads_never:
        told["replica"] = True
    if context.state.principals.quotas:
        told["quotas"] = True
    return json.dumps(told).encode()


def ping(context: Context, client: ClientConnection, request: Request) -> None:
    """Answer at once: the broker lives."""
    _, _arguments, _extensions, _body, opaque = request
    context.answer(client, opaque, b"pong")


def version(context: Context, client: ClientConnection, request: Request) -> None:
    """Name and version."""
    _, _arguments, _extensions, _body, opaque = request
    context.answer(client, opaque, f"txmq {VERSION} protocol {PROTOCOL}\n".encode())


def help_(context: Context, client: ClientConnection, request: Request) -> None:
    """Teach the verbs."""
    _, arguments, _extensions, _body, opaque = request
    text = grammar.help_text(arguments[0].decode("ascii", "replace") if arguments else None)
    context.answer(client, opaque, text.encode())


def quit_(context: Context, client: ClientConnection, request: Request) -> None:
    """Say good-bye; the connection closes when everything before it is answered."""
    _, _arguments, _extensions, _body, opaque = request
    context.answer(client, opaque, b"bye\n")
    client.closing = True
