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
from typing import Final, NamedTuple, cast

from txmq.addresses import split_address
from txmq.broker.cluster.interbroker_conversation import HomeAnswer, InterbrokerConversation
from txmq.broker.commit.data_directory import Store
from txmq.broker.following_core import FollowingCore
from txmq.broker.replication.receiver import Receiver
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
CONNECT_TIMEOUT_S: Final = 1.5
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
        self._connection: _Connection | None = None
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
                self._connection = _Connection(self, self.peer)
            return
        self._ask(connection)
        connection.tick(now)

    def _ask(self, connection: _Connection) -> None:
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

    def answered(self, answers: list[HomeAnswer[FollowAsk]]) -> None:
        """The leader has answered.

        Raises:
            RemoteProtocolError: what it sent does not continue the journal.
            ConnectionLostError: it does not lead the home now.
            DivergedError, JournalReleasedError: there is no way on.
        """
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
        self._moved()

    def lost(self, connection: _Connection, reason: str) -> None:
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


class _Connection(asyncio.Protocol):
    """One connection, or the attempt to make one."""

    def __init__(self, link: LeaderLink, peer: Peer) -> None:
        self._link = link
        context = link.core.context
        self.conversation: InterbrokerConversation[FollowAsk] = InterbrokerConversation(
            context.identity, context.identity.node, link.clock.monotonic(), context.random, peer.secret,
            ANSWER_SIZE_BYTES_MAX,
        )  # fmt: skip
        self._transport: asyncio.Transport | None = None
        self._connecting = asyncio.get_running_loop().create_task(self._connect(peer.address or ""))

    async def _connect(self, address: str) -> None:
        try:
            host, port = split_address(address, "the leader's address")
            tls = self._link.tls
            connecting = asyncio.get_running_loop().create_connection(
                lambda: self, host, port, ssl=None if tls is None else tls.context
            )
            await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  such as a certificate whose names are no text
            self._link.lost(self, str(error) or type(error).__name__)

    def flush(self) -> None:
        """Hand over what must be sent."""
        if self._transport is not None and self.conversation.output:
            data, self.conversation.output = b"".join(self.conversation.output), []
            self._transport.write(data)

    def tick(self, now: float) -> None:
        """Cut off what stands still."""
        try:
            self.conversation.tick(now)
        except ConnectionLostError as error:
            self._link.lost(self, str(error))
        else:
            self.flush()

    def close(self) -> None:
        """End it; nothing more is told of it."""
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self.conversation.binding = end_point(tls.getpeercert(binary_form=True))
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            answers = self.conversation.received(data, self._link.clock.monotonic())
            self.flush()
            if answers:
                self._link.answered(answers)
        except (DivergedError, JournalReleasedError) as error:
            self._link.failed(error)
        except Exception as error:  # noqa: BLE001  whatever the other side sends ends this connection, and nothing else
            self._link.lost(self, str(error) or type(error).__name__)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended."""
        self._link.lost(self, str(error) if error is not None else "the connection was closed")


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
