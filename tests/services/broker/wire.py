"""A connection that may say anything: bytes to a broker, by TLS where it has any, its answers taken apart."""

from __future__ import annotations

import secrets
import socket
import ssl
import struct
from types import TracebackType
from typing import NamedTuple, Self

from txmq.protocol.answers import AnswerReader
from txmq.protocol.certificates import end_point
from txmq.protocol.scram import ScramAttempt
from txmq.runtime.tls import ClientTls
from txmq.testing.processes.broker import BrokerProcess

TIMEOUT_S = 60.0


class Heard(NamedTuple):
    """What came back before the broker fell silent or closed."""

    answers: list[tuple[int, bytes, bytes]]  # code, opaque, body
    is_closed: bool

    @property
    def codes(self) -> list[int]:
        """The answers' codes."""
        return [code for code, _, _ in self.answers]


class Wire:
    """One raw connection."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.socket = socket.create_connection((broker.host, broker.port), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if broker.tls is not None:
            self.socket = ClientTls(broker.tls).context.wrap_socket(self.socket, server_hostname="localhost")
        self._reader = AnswerReader()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send; a connection that the broker closed meanwhile is what the answers will tell."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def hear(self, count: int) -> Heard:
        """Wait for ``count`` answers, or the end of the connection."""
        answers: list[tuple[int, bytes, bytes]] = []
        while len(answers) < count:
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionResetError:
                data = b""
            if not data:
                return Heard(answers, is_closed=True)
            for code, opaque, body, is_value in self._reader.feed(data):
                assert is_value or not body or body.endswith(b"\n"), body
                answers.append((code, opaque, body))
        return Heard(answers, is_closed=False)

    def ask(self, data: bytes) -> tuple[int, bytes]:
        """Send one request; its answer's code and body."""
        self.send(data)
        heard = self.hear(1)
        assert heard.answers, "the broker closed without an answer"
        return heard.answers[0][0], heard.answers[0][2]

    def log_in(self, user: str, password: str) -> int:
        """Log in by SCRAM; the code of the last answer."""
        shown = self.socket.getpeercert(binary_form=True) if isinstance(self.socket, ssl.SSLSocket) else None
        attempt = ScramAttempt(user, password, secrets.token_hex(16), None if shown is None else end_point(shown))
        code, first = self._authenticate(attempt.first())
        if code != 200:
            return code
        code, final = self._authenticate(attempt.final(first.removesuffix(b"\n")))
        if code == 200:
            attempt.verify(final.removesuffix(b"\n"))
        return code

    def _authenticate(self, message: bytes) -> tuple[int, bytes]:
        return self.ask(b"auth scram-sha-256 %d 1\r\n%b" % (len(message), message))

    def is_closed_by_broker(self) -> bool:
        """Whether the connection ends (with a deadline), whatever comes before."""
        try:
            while self.socket.recv(1 << 18):
                pass
        except ConnectionResetError:
            return True
        return True

    def finish(self) -> None:
        """Send no more."""
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
