"""A broker in memory that follows docs/protocol.md as far as these tests need it, and breaks when it is told to.

``ScriptedBroker.connect`` stands in for ``txmq.runtime.net.connect``; what it gives out behaves as ``net.TcpStream``.
Nothing sleeps: a wait with nothing to read turns the clock.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from txmq.client.transport.connection import Connection
from txmq.client.transport.reconnecting import AnyBroker, ReconnectingConnection
from txmq.errors import BrokerError, FencedError, OtherSessionError, SequenceError, UnknownTopicError
from txmq.log.batch import HEADER, stamp
from txmq.model import TopicConfig
from txmq.protocol import answers
from txmq.protocol.requests import ByteBudget, Limits, Request, RequestReader, Violation
from txmq.registry.topics import Topic
from txmq.runtime import net
from txmq.runtime.ports import Buffer

TOPIC_ID = 7
CONNECT_TIMEOUT_S = 5.0


class TurnedClock:
    """A clock that moves when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def now_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        os.sched_yield()  # a thread that is waited for may be the one to run


class ScriptedStream:
    """One conversation with the broker."""

    server_certificate = None

    def __init__(self, broker: ScriptedBroker) -> None:
        self._broker = broker
        self._reader = RequestReader(Limits(), ByteBudget(64 << 20))
        self.inbound = bytearray()
        self.is_over = self.is_closed = False
        self.takes: deque[int] = deque()  # how many bytes each send takes; all, where it is empty
        self.session: int | None = None
        self.reads: deque[int] = deque()  # how many bytes each receive gives; all, where it is empty

    def send(self, buffers: Sequence[Buffer]) -> int:
        if self.is_over:
            raise ConnectionResetError("over")
        whole = b"".join(bytes(buffer) for buffer in buffers)
        taken = whole[: self.takes.popleft()] if self.takes else whole
        for item in self._reader.feed(taken):
            assert not isinstance(item, Violation), item
            self._broker.serve(self, item)
        return len(taken)

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        if not self.inbound:
            if self.is_over:
                return memoryview(b"")
            self._broker.clock.now += timeout
            return None
        size = self.reads.popleft() if self.reads else len(self.inbound)
        data, self.inbound = self.inbound[:size], self.inbound[size:]
        return memoryview(bytes(data))

    def wait(self, timeout: float, *, writable: bool) -> bool:
        if self.inbound or self.is_over or writable:
            return True
        self._broker.clock.now += timeout
        return False

    def wait_writable(self, timeout: float) -> bool:
        return True

    def is_quiet(self) -> bool:
        return not self.inbound and not self.is_over

    def shut_down(self) -> None:
        self.is_over = True

    def close(self) -> None:
        self.is_closed = True


def scripted_broker(monkeypatch: pytest.MonkeyPatch) -> ScriptedBroker:
    """A broker that every connection made in this test ends up at."""
    scripted = ScriptedBroker()
    monkeypatch.setattr(net, "connect", scripted.connect)
    return scripted


Fault = Callable[[ScriptedStream], None] | BrokerError


class ScriptedBroker:
    """See the module's docstring.

    Attributes:
        faults: per verb what befalls the next requests: an error to answer, or a function called instead of serving.
        lose_answer: per verb, how many of the next requests are executed and then the connection is cut.
        told: what its answers to ``hello`` say of it.
        hold: verbs whose answers are kept back until ``release``.
        ended_after: what was stated at the end of each session.
    """

    def __init__(self, partitions: int = 2) -> None:
        self.clock = TurnedClock()
        self.request_size_bytes_max = 1 << 20
        self.partitions, self.topic_id = partitions, TOPIC_ID
        self.streams: list[ScriptedStream] = []
        self.connections_refused = 0
        self.verbs: list[str] = []
        self.faults: dict[str, deque[Fault]] = {}
        self.lose_answer: dict[str, int] = {}
        self.hold: set[str] = set()
        self.held: list[tuple[ScriptedStream, bytes]] = []
        self.told: dict[str, object] = {"home": "00000000000000a1"}
        self.next_session = 1
        self.time_ms = 1
        self.fenced: set[int] = set()
        self.ended_after: list[int] = []
        self.logs: dict[int, bytearray] = {}
        self.ends: dict[int, int] = {}
        self.sequences: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        self.following: dict[tuple[int, int], int] = {}

    def connect(self, host: str, port: int, timeout: float) -> ScriptedStream:
        if self.connections_refused:
            self.connections_refused -= 1
            raise ConnectionRefusedError(f"{host}:{port} refused")
        stream = ScriptedStream(self)
        self.streams.append(stream)
        return stream

    def cut(self) -> None:
        """Every conversation ends."""
        for stream in self.streams:
            stream.is_over = True

    def release(self) -> None:
        """Send what was held back."""
        for stream, answer in self.held:
            stream.inbound += answer
        self.held.clear()

    def serve(self, stream: ScriptedStream, request: Request) -> None:
        verb = request[0].decode()
        self.verbs.append(verb)
        opaque = request[4]
        try:
            faults = self.faults.get(verb)
            fault = faults.popleft() if faults else None
            if isinstance(fault, BrokerError):
                raise fault
            if fault is not None:
                fault(stream)
                return
            answer = getattr(self, f"_{verb}")(stream, request)
        except BrokerError as error:
            answer = answers.error(error, opaque)
        if self.lose_answer.get(verb):
            self.lose_answer[verb] -= 1
            stream.is_over = True
        elif verb in self.hold:
            self.held.append((stream, answer))
        else:
            stream.inbound += answer

    def _hello(self, stream: ScriptedStream, request: Request) -> bytes:
        wish = (request[2] or {}).get(b"session", b"none").decode()
        if wish == "new":
            stream.session = self.next_session
            self.next_session += 1
        elif wish != "none":
            number = int(wish.partition(".")[0], 16)
            if number in self.fenced or number >= self.next_session:
                raise FencedError("unknown")
            stream.session = number
        fields = {
            "cluster": "00000000000000c1", "broker": "b", "version": "1", "protocol": 1,
            "session": None if stream.session is None else f"{stream.session:x}", "epoch": 0, "in_flight_max": 8,
            "secret": None if stream.session is None else f"{stream.session:032x}",
            "request_size_bytes_max": self.request_size_bytes_max, "outcomes_kept": 8, "compression": [],
            "time_ms": self.time_ms, **self.told,
        }  # fmt: skip
        return answers.result(200, request[4], json.dumps(fields).encode())

    def _end(self, stream: ScriptedStream, request: Request) -> bytes:
        if stream.session is None:
            raise OtherSessionError("no session")
        self.fenced.add(stream.session)
        for kept in (self.sequences, self.following):
            for key in [key for key in kept if key[0] == stream.session]:
                del kept[key]
        stream.session = None
        self.ended_after.append(int(request[1][0]))
        return answers.result(200, request[4], b"")

    def _ping(self, _stream: ScriptedStream, request: Request) -> bytes:
        return answers.result(200, request[4], b"pong")

    def _commit(self, _stream: ScriptedStream, request: Request) -> bytes:
        return answers.result(200, request[4], b"")

    def _meta(self, _stream: ScriptedStream, request: Request) -> bytes:
        name = request[1][0].decode()
        if name.startswith("no"):
            raise UnknownTopicError(f"no topic {name}")
        topic = Topic(self.topic_id, TopicConfig(name, partitions=self.partitions)).to_json()
        return answers.result(200, request[4], json.dumps({"topics": [topic | {"from": "the future"}]}).encode())

    def _put(self, stream: ScriptedStream, request: Request) -> bytes:
        partition, batch = int(request[1][1]), request[3]
        assert batch is not None
        fields = HEADER.unpack_from(batch)
        crc, producer, sequence, count = fields[4], fields[9], fields[11], fields[12]
        assert producer == stream.session
        key = (producer, partition)
        known = self.sequences.setdefault(key, {}).get(sequence)
        if known is not None and known[1] == crc:
            return answers.encode_all([(request[4], known[0])])
        if sequence != self.following.get(key, 0):
            raise SequenceError("gap")
        base = self.ends.get(partition, 0)
        stamp(batch, self.topic_id, partition, base, crc)
        self.logs.setdefault(partition, bytearray()).extend(batch)
        self.ends[partition] = base + count
        self.following[key] = sequence + count
        self.sequences[key][sequence] = (base, crc)
        return answers.encode_all([(request[4], base)])

    def _get(self, _stream: ScriptedStream, request: Request) -> bytes:
        body = bytes(self.logs.get(int(request[1][1]), b""))
        if int(request[1][2]) >= self.ends.get(int(request[1][1]), 0):
            body = b""
        return answers.value_header(len(body), request[4]) + body

    def _offset(self, _stream: ScriptedStream, request: Request) -> bytes:
        end = self.ends.get(int(request[1][1]), 0)
        return answers.result(200, request[4], f"{end} 0 {end}".encode())


def connection_to(broker: ScriptedBroker, addresses: int = 1) -> ReconnectingConnection:
    return ReconnectingConnection(
        AnyBroker([("host", number) for number in range(addresses)]), "test", broker.clock, CONNECT_TIMEOUT_S
    )


def link_of(connection: ReconnectingConnection, broker: ScriptedBroker) -> Connection:
    return connection.connect(broker.clock.now + 5)
