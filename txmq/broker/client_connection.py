"""The core's view of one connection: its session, its unanswered requests and its replies."""

from __future__ import annotations

from typing import Final

from txmq.broker.state.principals import Permissions
from txmq.broker.state.session import BrokerSession
from txmq.protocol.answers import Reply
from txmq.protocol.requests import Request
from txmq.protocol.scram import ScramLogin

MEMBERS_OVER_MAX: Final = 64  # departed members that are kept, beyond the number of present ones


class ClientConnection:
    """One connection. The core appends replies to ``out`` and lists the connection in ``Context.ready``; the shell
    encodes them in the protocol that the connection speaks.

    Attributes:
        number: unique in this broker's incarnation; for logs.
        session: the one that ``hello`` bound it to.
        txid_head: the first part of the ids of that session's transactions.
        out: opaque and reply of each answer to be written, in that order.
        given_bytes: answers that were made for it in this turn of its connection.
        unanswered: opaque tokens of requests whose answer is still owed.
        members: (group, member, its incarnation) of the consumers whose heartbeats come over it, and of some that are
            no more. ``members_bound``: with so many it is looked which are.
        user: the user that it has logged in as; empty: nobody.
        permissions: what that user may do (``verbs/access/authorizer.py``); None: there are no users, and nothing is
            asked.
        login: a login that waits for the client's final message.
        binding: what a login over TLS is bound to (the hash of the broker's certificate, RFC 5929); None without TLS.
        certificates: names of the client certificate that it has shown (``CN=shop``, ``DNS:shop.example.org``).
        certificate: which one that is, for logs; empty: none.
        held: True while the broker does not read it, although it may send: too many of its requests are in work, or its
            next one waits for room for the answer.
        reads_copies: it has said that it may be told what a replica has, which may lag (``hello replica``).
        waiting: its request that waits for the registry, or a failed login whose answer waits; nothing more is taken in
            meanwhile.
        closing: True once nothing more is read from it; it is closed after ``out`` was written.
        gone: True once the connection is lost; answers to it are dropped.
    """

    __slots__ = (
        "address", "binding", "certificate", "certificates", "closing", "given_bytes", "gone", "held", "login",
        "members", "members_bound", "name", "number", "out", "permissions", "reads_copies", "ready", "session", "shell",
        "txid_head", "unanswered", "user", "waiting",
    )  # fmt: skip

    def __init__(self, number: int, address: str = "") -> None:
        self.number, self.address, self.name = number, address, ""
        self.session: BrokerSession | None = None
        self.txid_head = b""
        self.out: list[tuple[bytes, Reply]] = []
        self.given_bytes = 0
        self.unanswered: set[bytes] = set()
        self.members: set[tuple[str, str, str]] = set()
        self.members_bound = MEMBERS_OVER_MAX
        self.waiting: Request | None = None
        self.user = ""
        self.permissions: Permissions | None = None
        self.login: ScramLogin | None = None
        self.binding: bytes | None = None
        self.certificates: frozenset[str] = frozenset()
        self.certificate = ""
        self.closing = self.gone = self.held = self.ready = self.reads_copies = False
        self.shell: object = None  # the transport's side; the core never looks at it
