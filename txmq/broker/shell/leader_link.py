"""A replica's connection to the leader of its home: asks for the journal, piece after piece, and takes it in.

Theory of operation. One question is under way at a time. The leader answers when it has something, or after ``WAIT_MS``
with nothing, so silence means that it is away. What came is queued for the commit pipeline
(``FollowingCore.received``), and the next piece is asked for at once, unless too much is queued or the disk is full;
with each question the leader is told how far this replica has forced and folded. After a loss the replica goes on from
the last whole record that came, and states its CRC: the leader says whether it is its own.

Invariants:
    * what the leader sends can end the connection, and nothing else;
    * the replica ends if the leader's journal does not reach back to its own, or is another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from txmq.addresses import split_address
from txmq.broker.cluster.interbroker_conversation import HomeAnswer, InterbrokerConversation
from txmq.broker.commit.data_directory import Store
from txmq.broker.following_core import FollowingCore
from txmq.broker.replication.receiver import Receiver
from txmq.broker.shell.interbroker_connection import CONNECT_TIMEOUT_S, InterbrokerConnection
from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.broker.verbs.follow import HEAD
from txmq.errors import ConnectionLostError, DivergedError, JournalReleasedError, RemoteProtocolError, StorageError
from txmq.protocol.certificates import end_point
from txmq.redo.journal_reader import PIECE_SIZE_BYTES_MAX
from txmq.redo.record_format import FILE_HEADER_SIZE, FileHeader, unpack_file_header
from txmq.runtime.backoff import Backoff
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock, Random
from txmq.runtime.tls import ClientTls

log = get_logger()
WAIT_MS: Final = 1000
QUEUED_BYTES_MAX: Final = 8 << 20
ANSWER_SIZE_BYTES_MAX: Final = PIECE_SIZE_BYTES_MAX + 4096
AWAY_MS: Final = Backoff(100, 1000)
_OK: Final = 200


class FollowAsk(NamedTuple):
    """One question."""

    number: int
    arguments: tuple[str | int, ...]
    extensions: Mapping[str, str | None]
    verb: str = "follow"


_Link = InterbrokerConnection[FollowAsk]


class Peer(NamedTuple):
    """How the leader is reached.

    Attributes:
        address: None while nobody is known to lead the home.
        secret: what brokers of the cluster prove to each other; empty while there are no users.
    """

    address: str | None
    secret: str


class LeaderLink:
    """See the module's docstring. On the loop.

    Args:
        moved: called when something was received.
        failed: called with the reason if the replica cannot go on.
        tls: how the leader is spoken to; None: in plaintext.
    """

    def __init__(
        self, core: FollowingCore, store: Store, incarnation: int, clock: Clock, moved: Callable[[], None],
        failed: Callable[[Exception], None], tls: ClientTls | None,
    ) -> None:  # fmt: skip
        self.core, self.clock, self.tls = core, clock, tls
        self._store, self._incarnation, self._moved, self._failed = store, incarnation, moved, failed
        self.peer = Peer(None, "")
        core.recovered(store.journal.next_lsn)
        self._receiver = Receiver(store.journal, max(store.journal.found.highest_epoch, core.state.epoch))
        self._connection: _Link | None = None
        self._try_at, self._attempts, self._said = 0.0, 0, ""
        self._number = 0
        self._is_asked = self._is_known = self._is_closed = False

    def set_peer(self, peer: Peer) -> None:
        """The registry tells where the home is led."""
        if peer != self.peer:
            self.peer, self._try_at = peer, 0.0
            if self._connection is not None:
                self.lost(self._connection, "another process leads the home")

    def tick(self) -> None:
        """Time has passed, or something was forced or folded: ask on."""
        now = self.clock.monotonic()
        connection = self._connection
        if connection is None:
            if self.peer.address is not None and now >= self._try_at and not self._is_closed:
                self._is_asked = self._is_known = False
                self._connection = self._connect()
            return
        self._ask(connection)
        connection.tick()

    def _connect(self) -> _Link:
        context = self.core.context
        conversation: InterbrokerConversation[FollowAsk] = InterbrokerConversation(
            context.identity, context.identity.node, self.clock.monotonic(), context.random, self.peer.secret,
            ANSWER_SIZE_BYTES_MAX,
        )  # fmt: skip
        return InterbrokerConnection(self, conversation, self.peer.address)

    def _ask(self, connection: _Link) -> None:
        context = self.core.context
        if self._is_asked or context.disk_full or context.queued_bytes() > QUEUED_BYTES_MAX:
            return
        self._is_asked = True
        self._number += 1
        if not self._is_known:
            self._receiver.begin_anew()
        told = {
            "replica": f"{self._incarnation:032x}", "forced": str(self._store.journal.durable_lsn),
            "folded": str(context.folded_lsn), "wait": str(WAIT_MS),
        }  # fmt: skip
        if not self._is_known:
            told["chain"] = str(self._receiver.chain)
        arguments = (f"{context.identity.node:016x}", self._receiver.next_lsn)
        connection.conversation.ask(FollowAsk(self._number, arguments, told))
        connection.flush()

    def answered(self, connection: _Link, answers: list[HomeAnswer[FollowAsk]]) -> None:
        """The leader has answered."""
        try:
            self._take(answers)
        except (DivergedError, JournalReleasedError) as error:
            self.failed(error)
        except Exception as error:  # noqa: BLE001  whatever the leader sends ends this connection, and nothing else
            self.lost(connection, str(error) or type(error).__name__)

    def _take(self, answers: list[HomeAnswer[FollowAsk]]) -> None:
        for answer in answers:
            self._is_asked = False
            piece = _piece(answer)
            self._is_known, self._attempts = True, 0
            if self._said:
                self._said = ""
                log.info("follows its leader again", leader=self.peer.address)
            self.core.heard(self.clock.now_ms(), HEAD.unpack_from(piece)[0])
            for group in self._receiver.take(piece[HEAD.size :]):
                self.core.received(group)
        if answers:
            self._moved()

    def lost(self, connection: _Link, reason: str) -> None:
        """A connection ended, or none could be made."""
        if connection is not self._connection:
            return
        self._connection, self._is_asked = None, False
        self._attempts += 1
        self._try_at = self.clock.monotonic() + AWAY_MS.after(self._attempts - 1) / 1000
        if reason != self._said:
            self._said = reason
            log.warning("does not hear its leader", leader=self.peer.address, reason=reason)
        connection.close()

    def failed(self, error: Exception) -> None:
        """There is no way on."""
        self.close()
        self._failed(error)

    def close(self) -> None:
        """The replica ends."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _piece(answer: HomeAnswer[FollowAsk]) -> bytes:
    if answer.code == _OK and len(answer.body) >= HEAD.size:
        return answer.body
    text = answer.body.decode("utf-8", "replace").strip()
    name, _, reason = text.partition(" ")
    if name == JournalReleasedError.wire_name:
        raise JournalReleasedError(f"{reason}: begin this replica anew, with an empty directory, while it is there")
    if name == DivergedError.wire_name:
        raise DivergedError(f"{reason}: this directory is no copy of it; begin the replica anew, with an empty one")
    raise ConnectionLostError(f"the leader answers {answer.code} {text[:200]}")


async def first_file(
    identity: BrokerIdentity, peer: Peer, random: Random, clock: Clock, tls: ClientTls | None
) -> FileHeader:
    """The header of the first file of the leader's journal: a copy begins with it.

    Raises:
        ConnectionLostError, OSError: the leader is away; try again.
        JournalReleasedError: its journal has no beginning any more.
        RemoteProtocolError, StorageError: it is no leader of that home, or its journal is damaged.
    """
    host, port = split_address(peer.address or "", "the leader's address")
    connecting = asyncio.open_connection(host, port, ssl=None if tls is None else tls.context)
    reader, writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
    try:
        conversation: InterbrokerConversation[FollowAsk] = InterbrokerConversation(
            identity, identity.node, clock.monotonic(), random, peer.secret, ANSWER_SIZE_BYTES_MAX
        )
        shown = writer.get_extra_info("ssl_object")
        if shown is not None:
            conversation.binding = end_point(shown.getpeercert(binary_form=True))
        conversation.ask(FollowAsk(1, (f"{identity.node:016x}", 0), {"replica": "0" * 32, "wait": "0"}))
        answers: list[HomeAnswer[FollowAsk]] = []
        while not answers:
            writer.writelines(conversation.output)
            conversation.output = []
            data = await asyncio.wait_for(reader.read(1 << 16), 5 * CONNECT_TIMEOUT_S)
            if not data:
                raise ConnectionLostError("the leader closed the connection")
            answers = conversation.received(data, clock.monotonic())
        header = unpack_file_header(_piece(answers[0])[HEAD.size :][:FILE_HEADER_SIZE])
    finally:
        writer.transport.abort()
    if header is None:
        raise StorageError("the first file of the leader's journal has a damaged header")
    if header.base_lsn or header.node_id != identity.node:
        raise RemoteProtocolError("what the leader has sent is not the beginning of its journal")
    return header
