"""A raw generator: precomputed requests through one blocking socket, so that the client costs next to nothing.

Answers are counted, not parsed: every answer begins with ``result``, every good one with ``result 200``, and no body of
what is sent here holds either word.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import Self

from txmq.addresses import TlsFiles, parse_bootstrap, parse_tls
from txmq.errors import TxmqError
from txmq.log.records import encode_values
from txmq.runtime.tls import ClientTls

RECEIVE_SIZE_BYTES = 1 << 18
_GOOD = b"result 200 "


class BadAnswerError(TxmqError):
    """The broker refused something."""


def batch_of(value_size_bytes: int) -> bytes:
    """One record batch of one message: 61 bytes of header, and 7 to 11 besides the value."""
    return bytes(encode_values([(None, b"x" * value_size_bytes)], 1_700_000_000_000))


def message_of(size_bytes: int) -> bytes:
    """One record batch of one message that is ``size_bytes`` on the wire in all."""
    value_size = size_bytes - 70
    while len(batch := batch_of(value_size)) < size_bytes:
        value_size += 1
    return batch


def put_requests(
    topic: str, batch: bytes, count: int, partitions: Sequence[int], per_chunk: int
) -> list[tuple[bytes, int]]:
    """``count`` puts over the partitions in turn, in chunks of whole requests: (bytes, how many)."""
    name, turn = topic.encode(), cycle(partitions)
    return chunked(
        (b"put %b %d %d %x\r\n%b" % (name, next(turn), len(batch), n, batch) for n in range(count)), per_chunk
    )


def chunked(requests: Iterable[bytes], per_chunk: int) -> list[tuple[bytes, int]]:
    """Join requests by ``per_chunk``: (bytes, how many)."""
    iterator, chunks = iter(requests), []
    while piece := list(islice(iterator, per_chunk)):
        chunks.append((b"".join(piece), len(piece)))
    return chunks


class RawConnection:
    """One blocking connection to a broker."""

    def __init__(self, host: str, port: int, tls: TlsFiles | None = None) -> None:
        self._socket = socket.create_connection((host, port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._socket = ClientTls(tls).context.wrap_socket(self._socket, server_hostname=host)
        self._tail = b""

    @classmethod
    def to(cls, address: str) -> Self:
        """Connect to ``txmq://HOST[:PORT]`` or ``txmqs://...``; the first one if there are several."""
        return cls(*parse_bootstrap(address)[0], parse_tls(address))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: bytes) -> bytes:
        """Send one request, take one answer that fits one read."""
        self._socket.sendall(request)
        answer = self._socket.recv(RECEIVE_SIZE_BYTES)
        if not answer.startswith(_GOOD):
            raise BadAnswerError(answer[:200].decode("ascii", "replace"))
        return answer

    def create_topic(self, name: str, partitions: int) -> None:
        """Create a topic."""
        self.ask(b"topic create %b partitions=%d 1\r\n" % (name.encode(), partitions))

    def pipeline(self, chunks: Sequence[tuple[bytes, int]], outstanding: int) -> float:
        """Send all chunks, keeping at most ``outstanding`` requests unanswered; returns the seconds it took."""
        total, sent, answered, following = sum(count for _, count in chunks), 0, 0, 0
        started = time.perf_counter()
        while answered < total:
            while following < len(chunks) and sent - answered + chunks[following][1] <= outstanding:
                data, count = chunks[following]
                self._socket.sendall(data)
                sent, following = sent + count, following + 1
            answered += self._count()
        return time.perf_counter() - started

    def _count(self) -> int:
        """Good answers in what the next read brings; a word that is cut in two counts with its second half."""
        received = self._socket.recv(RECEIVE_SIZE_BYTES)
        text = self._tail + received
        if not received or b"result 4" in text or b"result 5" in text:
            raise BadAnswerError(text[-200:].decode("ascii", "replace") or "the broker closed the connection")
        self._tail = text[1 - len(_GOOD) :]
        return text.count(_GOOD)

    def one_by_one(self, request: bytes, count: int) -> list[float]:
        """Send one request ``count`` times, each after the answer to the one before; returns seconds, sorted."""
        send, receive, clock = self._socket.sendall, self._socket.recv, time.perf_counter
        taken = []
        for _ in range(count):
            started = clock()
            send(request)
            answer = receive(256)
            taken.append(clock() - started)
            if not answer.startswith(_GOOD):
                raise BadAnswerError(answer.decode("ascii", "replace"))
        return sorted(taken)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values; nearest rank."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
