"""A door for TLS between a socket that is not there and a client's side of the conversation."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tools.simulated.clock import SimClock
from txmq.broker.shell.answer_budget import AnswerBudget
from txmq.broker.shell.connection import RECEIVE_SIZE_BYTES
from txmq.broker.shell.throttle import Admission, Throttle
from txmq.broker.shell.tls_transport import TlsTransport
from txmq.config import BrokerSettings
from txmq.protocol.requests import ByteBudget
from txmq.runtime.tls import ServerTls, TlsSession

from ..support import node


class Socket:
    """The transport of a socket."""

    def __init__(self) -> None:
        self.sent, self.is_read, self.is_closed, self.is_aborted = b"", True, False, False
        self.protocol: object = None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def set_protocol(self, protocol: object) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return SimpleNamespace(setsockopt=lambda *_: None) if name == "socket" else ("10.0.0.7", 40001)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.sent += data

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def taken(self) -> bytes:
        """What was sent since the last time."""
        sent, self.sent = self.sent, b""
        return sent


class World:
    """A door, the socket in front of it, and the client's side of a conversation.

    Attributes:
        served: how often the connection was given answers.
    """

    def __init__(self, server: ServerTls, client: TlsSession, *, takes_plaintext: bool) -> None:
        core = node().core
        self.host: Any = SimpleNamespace(
            core=core, context=core.context, settings=BrokerSettings(pipeline_requests_max=100_000), clock=SimClock(),
            budget=ByteBudget(1 << 24), answers=AnswerBudget(1 << 20), connections=set(), paused=False,
            admission=Admission(BrokerSettings()), throttle=Throttle(core.state.principals),
            received=self._answer, fail=self._failed,
        )  # fmt: skip
        self.client, self._server, self._takes_plaintext = client, server, takes_plaintext
        self.meet()

    def meet(self) -> None:
        """A connection comes."""
        self.served = 0
        self.socket = Socket()
        self.door = TlsTransport(self.host, self._server.session(), takes_plaintext=self._takes_plaintext)
        self.door.connection_made(cast(asyncio.Transport, self.socket))
        [self.connection] = self.host.connections

    def _answer(self) -> None:
        for client in self.host.core.take_ready():
            self.served += 1
            client.shell.send()

    def _failed(self, error: BaseException) -> None:
        raise AssertionError("the broker would stop") from error

    def receive(self, data: bytes) -> None:
        """Bytes come from the network."""
        for at in range(0, len(data), RECEIVE_SIZE_BYTES):
            piece = data[at : at + RECEIVE_SIZE_BYTES]
            receiver = self.socket.protocol or self.door
            receiver.get_buffer(0)[: len(piece)] = piece  # type: ignore[attr-defined]
            receiver.buffer_updated(len(piece))  # type: ignore[attr-defined]

    def shake(self) -> None:
        """Let both shake hands."""
        while not self.client.shake():
            self.receive(self.client.take())
            self.client.feed(self.socket.taken())
        self.receive(self.client.take())
        assert self.socket.taken() == b""

    def say(self, data: bytes) -> None:
        self.receive(self.client.encrypt(data))

    def answers(self) -> bytes:
        """What the broker has answered, read by the client."""
        self.client.feed(self.socket.taken())
        buffer, read = memoryview(bytearray(1 << 20)), b""
        while size := self.client.read_into(buffer):
            read += buffer[:size]
        return read

    def leave(self) -> None:
        self.door.connection_lost(None)
