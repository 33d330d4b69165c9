"""Connections that say the wrong thing: what they send, in which pieces, and how they leave."""

from __future__ import annotations

import random
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from tools.fuzz.probes import PROBES
from txmq.runtime.tls import ClientTls, TlsSession

REQUESTS = (
    b"hello 1 fuzz session=new 1\r\n", b"ping 1\r\n", b"version 1\r\n", b"stats json 1\r\n", b"help\r\n",
    b"meta * 1\r\n", b"get t 0 0 65536 1\r\n", b"put t 0 raw 5 1\r\nhello", b"offset t 0 latest 1\r\n",
    b"group list 1\r\n", b"recover 1\r\n",
)  # fmt: skip
_PIECES_MAX = 8
_ANSWER_S = 0.02  # some wait for what comes back, most do not
_RESET = struct.pack("ii", 1, 0)


class Strangers:
    """One after another, drawn from a seed.

    Args:
        tls: to shake hands with; without a certificate of its own it comes as far as strangers do.
    """

    def __init__(self, host: str, port: int, tls: Sequence[ClientTls], rng: random.Random) -> None:
        self._address, self._tls, self._rng = (host, port), tls, rng

    def comes(self) -> str:
        """One connection, from its first byte to its end; what kind it was."""
        kind = self._rng.choice(self.kinds)
        with socket.create_connection(self._address, 10) as connection, suppress(OSError):
            connection.settimeout(_ANSWER_S)
            kind(self, connection)
            self._leave(connection)
        return kind.__name__

    # --- kinds -------------------------------------------------------------------------------------------------------

    def says_anything(self, connection: socket.socket) -> None:
        """Random bytes; some look like the beginning of TLS."""
        first = self._rng.choice((b"", b"\x16", b"\x16\x03\x01", b"\x15\x03\x03", b"\x80"))
        self._send(connection, first + self._rng.randbytes(self._size()))

    def probes(self, connection: socket.socket) -> None:
        """What port scanners send, altered or not."""
        self._send(connection, self._maybe_altered(self._rng.choice([*PROBES.values()])))

    def begins_a_handshake(self, connection: socket.socket) -> None:
        """A client's first message, altered, cut, doubled; a second one after it."""
        data = self._maybe_altered(self._hello())
        self._send(connection, data * self._rng.choice((1, 1, 2)))

    def begins_requests(self, connection: socket.socket) -> None:
        """Requests in plaintext, altered."""
        self._send(connection, self._requests())

    def speaks_within(self, connection: socket.socket) -> None:
        """A handshake to its end, then altered requests in sound records, or altered records."""
        session = self._session()
        connection.settimeout(10)
        try:
            while not session.shake():
                connection.sendall(session.take())
                session.feed(connection.recv(1 << 16) or b"\0\0\0\0\0")
            connection.sendall(session.take())
            data = session.encrypt(self._requests())
        except ssl.SSLError:
            return
        finally:
            connection.settimeout(_ANSWER_S)
        self._send(connection, data if self._rng.random() < 0.5 else self._maybe_altered(data))

    # --- what they are made of ---------------------------------------------------------------------------------------

    def _size(self) -> int:
        return int(2 ** self._rng.uniform(0, 16))

    def _session(self) -> TlsSession:
        return self._rng.choice(self._tls).session("localhost")

    def _hello(self) -> bytes:
        session = self._session()
        session.shake()
        return session.take()

    def _requests(self) -> bytes:
        return self._maybe_altered(b"".join(self._rng.choices(REQUESTS, k=self._rng.randint(1, 6))))

    def _maybe_altered(self, data: bytes) -> bytes:
        made, rng = bytearray(data), self._rng
        for _ in range(rng.choice((0, 1, 1, 2, 8))):
            at = rng.randrange(len(made) + 1)
            match rng.randrange(5):
                case 0:
                    made[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    made[at:at] = rng.randbytes(rng.randint(1, 16))
                case 2:
                    del made[at : at + rng.randint(1, 16)]
                case 3:
                    del made[at:]
                case _:
                    made[at : at + 2] = rng.choice((b"\0\0", b"\xff\xff", b"\r\n", b"  "))
        return bytes(made)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        """In one piece, or in a few."""
        rng = self._rng
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, rng.randrange(_PIECES_MAX)))))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            connection.sendall(data[start:end])

    def _leave(self, connection: socket.socket) -> None:
        """With a reset, with half a close, after an answer, or at once."""
        way = self._rng.randrange(4)
        if way == 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        elif way == 1:
            connection.shutdown(socket.SHUT_WR)
        if way in (1, 2):
            connection.recv(1 << 16)

    kinds: Final[tuple[Callable[[Strangers, socket.socket], None], ...]] = (
        says_anything, probes, begins_a_handshake, begins_requests, speaks_within,
    )  # fmt: skip
