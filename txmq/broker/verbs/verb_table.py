"""The table of verbs: which function carries out which verb."""

from __future__ import annotations

from collections.abc import Callable

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs import (
    check_backs,
    decide,
    fast_path,
    get,
    hello,
    prepare_commit,
    recover,
    stats,
    topic,
)
from txmq.broker.verbs import group_coordinator as groups
from txmq.broker.verbs.access.auth import auth
from txmq.broker.verbs.access.users import acl, quota, user
from txmq.broker.verbs.cluster import cluster
from txmq.broker.verbs.fencing import token
from txmq.broker.verbs.outbox import outbox
from txmq.broker.verbs.put import put
from txmq.broker.verbs.query import query
from txmq.broker.verbs.recover import parts
from txmq.broker.verbs.resource import resource
from txmq.errors import (
    FencedError,
    OtherTokenError,
    OutboxConflictError,
    TransactionConflictError,
    UnavailableError,
    UnknownQueryError,
    UnknownTransactionError,
    UnknownUserError,
    UserExistsError,
)
from txmq.protocol.requests import Request

Verb = Callable[[Context, ClientConnection, Request], None]
VERBS: dict[bytes, Verb] = {
    b"put": put,
    b"get": get.get,
    b"offset": get.offset,
    b"meta": get.meta,
    b"hello": hello.hello,
    b"end": hello.end,
    b"prepare": fast_path.prepare,
    b"commit": fast_path.commit,
    b"rollback": prepare_commit.rollback,
    b"outcome": prepare_commit.outcome,
    b"decide": fast_path.decide,
    b"complete": fast_path.complete,
    b"forget": decide.forget,
    b"token": token,
    b"outbox": outbox,
    b"recover": recover.recover,
    b"parts": parts,
    b"checks": check_backs.checks,
    b"group": groups.group,
    b"query": query,
    b"resource": resource,
    b"topic": topic.topic,
    b"cluster": cluster,
    b"auth": auth,
    b"user": user,
    b"acl": acl,
    b"quota": quota,
    b"stats": stats.stats,
    b"ping": hello.ping,
    b"version": hello.version,
    b"help": hello.help_,
    b"quit": hello.quit_,
}
_SERVED_BEFORE_LEADING = frozenset({b"hello", b"ping", b"stats", b"version", b"help", b"quit", b"cluster"})


def _waits_for_registry(_context: Context, _client: ClientConnection, _request: Request) -> None:
    raise UnavailableError(hello.WAITS_FOR_REGISTRY)


VERBS_BEFORE_LEADING = {
    name: verb if name in _SERVED_BEFORE_LEADING else _waits_for_registry for name, verb in VERBS.items()
}
LONG_ANSWERS = frozenset(
    {
        b"get", b"meta", b"recover", b"parts", b"checks", b"group", b"query", b"resource", b"topic", b"cluster",
        b"stats", b"help", b"user", b"acl", b"quota",
    }
)  # fmt: skip
TELL_A_STATE = (
    TransactionConflictError, UnknownTransactionError, UnknownQueryError, FencedError, UserExistsError,
    UnknownUserError, OtherTokenError, OutboxConflictError,
)  # fmt: skip
