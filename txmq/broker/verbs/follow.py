"""The verb ``follow``: a replica of this home asks for a piece of the journal, and says how far it has come.

The bytes come from the journal's files (``redo.journal_reader``), read by the shell (``shell/replica_feeds.py``).

Byte layout of the answer, little endian: the lsn up to which the journal is forced, u64; the leader's time in ms, u64;
then bytes of the journal, which may be none.
"""

from __future__ import annotations

import struct
from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.followers import Follow, Follower
from txmq.broker.verbs.hello import WAITS_FOR_REGISTRY, refuse_other_home
from txmq.errors import BadRequestError, OverloadedError, UnavailableError
from txmq.protocol.answers import Records
from txmq.protocol.grammar import is_hex16
from txmq.protocol.requests import Request

HEAD: Final = struct.Struct("<QQ")
WAIT_MS_MAX: Final = 5000
FOLLOWERS_MAX: Final = 100


def follow(context: Context, client: ClientConnection, request: Request) -> None:
    """Take the question in; ``answered`` has the answer."""
    _, arguments, extensions, _body, opaque = request
    home, given = arguments[0], extensions or {}
    if not is_hex16(home) or b"replica" not in given:
        raise BadRequestError("follow needs a home of 16 hexadecimal digits, and replica=, the incarnation of the copy")
    refuse_other_home(context, home)
    if not context.is_serving:
        raise UnavailableError(WAITS_FOR_REGISTRY)
    if any(waiting.client is client for waiting in context.followers.waiting):
        raise BadRequestError("one follow at a time: the one before has no answer yet")
    lsn, replica = int(arguments[1]), given[b"replica"].decode()
    forced, folded = int(given.get(b"forced", b"0")), int(given.get(b"folded", b"0"))
    known = context.followers.by_replica
    if replica not in known and len(known) >= FOLLOWERS_MAX:
        raise OverloadedError(f"{FOLLOWERS_MAX} replicas follow this home, or did ten minutes ago: no more are taken")
    if b"forced" in given:  # else it is none yet: it asks for the beginning
        known[replica] = Follower(client.address, min(forced, lsn), folded, context.now_ms)
    chain = int(given[b"chain"]) if b"chain" in given else None
    until_ms = context.now_ms + min(int(given.get(b"wait", b"0")), WAIT_MS_MAX)
    context.followers.waiting.append(Follow(client, opaque, lsn, chain, until_ms))


def answered(context: Context, follow: Follow, forced_lsn: int, piece: bytes) -> None:
    """A piece was read; empty if the time of the question is over."""
    context.answer(follow.client, follow.opaque, Records(HEAD.pack(forced_lsn, context.now_ms) + piece))
