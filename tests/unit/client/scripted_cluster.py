"""Several scripted brokers with a registry, as docs/protocol.md says: each at an address, one home each.

``ScriptedCluster.connect`` stands in for ``txmq.runtime.net.connect``: home n is led at ``("host", n)`` at first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import pytest

from tests.unit.client.scripted import TOPIC_ID, ScriptedBroker, ScriptedStream, TurnedClock
from txmq.client.client import Client
from txmq.errors import FencedError, NotOwnerError, UnavailableError, UnknownTopicError
from txmq.model import TopicConfig
from txmq.protocol import answers
from txmq.protocol.requests import Request
from txmq.registry.topics import Topic
from txmq.runtime import net

Address = tuple[str, int]


class ScriptedHome(ScriptedBroker):
    """The broker that leads one home.

    Attributes:
        waits_for_registry: whether it answers 503 to all that needs a home that is led.
        taken_over: how many of its partitions it knows already.
        changes: what was asked of ``topic``.
        in_doubt: rows of ``recover``.
        completed: the words of ``complete``.
        outcome_told: the answer to ``outcome``; None for 410.
    """

    def __init__(self, cluster: ScriptedCluster, number: int) -> None:
        super().__init__()
        self.cluster, self.number, self.clock = cluster, number, cluster.clock
        self.told = {"home": f"{number:016x}", "registry": True}
        self.waits_for_registry = False
        self.taken_over = 100
        self.changes: list[str] = []
        self.in_doubt: list[dict[str, object]] = []
        self.completed: list[dict[bytes, str]] = []
        self.outcome_told: bytes | None = b"unknown"

    def serve(self, stream: ScriptedStream, request: Request) -> None:
        if self.waits_for_registry and request[0] not in (b"hello", b"ping", b"cluster"):
            stream.inbound += answers.error(UnavailableError("waits for the registry"), request[4])
            return
        super().serve(stream, request)

    def _hello(self, stream: ScriptedStream, request: Request) -> bytes:
        wanted = (request[2] or {}).get(b"home")
        if wanted is not None and int(wanted, 16) != self.number:
            raise NotOwnerError(f"leader=- home={wanted.decode()} is not led here")
        return super()._hello(stream, request)

    def _meta(self, _stream: ScriptedStream, request: Request) -> bytes:
        name = request[1][0].decode()
        homes = self.cluster.topics.get(name)
        if homes is None:
            raise UnknownTopicError(f"no topic {name}")
        topic = Topic(self.topic_id, TopicConfig(name, partitions=len(homes))).to_json()
        placed = {"homes": [f"{home:016x}" for home in homes], "version": self.cluster.version}
        told = {"topics": [topic | placed], "leaders": self.cluster.led(), "map_version": self.cluster.version}
        return answers.result(200, request[4], json.dumps(told).encode())

    def _cluster(self, _stream: ScriptedStream, request: Request) -> bytes:
        rows = [
            {"home": home, "name": f"b{int(home, 16)}", "epoch": 1, "leader": leader}
            for home, leader in self.cluster.led().items()
        ]
        told = {"cluster": "00000000000000c1", "map_version": self.cluster.version, "homes": rows}
        return answers.result(200, request[4], json.dumps(told).encode())

    def _topic(self, _stream: ScriptedStream, request: Request) -> bytes:
        action, name = (word.decode() for word in request[1])
        self.changes.append(f"{action} {name}")
        if action in ("create", "alter"):
            self.cluster.topics[name] = [self.number]
        if action == "delete":
            del self.cluster.topics[name]
        owned = [number for number, home in enumerate(self.cluster.topics.get(name, ())) if home == self.number]
        config = TopicConfig(name, partitions=len(self.cluster.topics.get(name, "?")))
        rows = [
            {"partition": number, "start": 0, "end": self.ends.get(number, 0), "bytes": 0}
            for number in owned[: self.taken_over]
        ]
        told = {**Topic(TOPIC_ID, config).to_json(), "watermarks": rows}
        return answers.result(200, request[4], json.dumps(told).encode())

    def _recover(self, _stream: ScriptedStream, request: Request) -> bytes:
        told = {"transactions": self.in_doubt, "next": None}
        return answers.result(200, request[4], json.dumps(told).encode())

    def _resource(self, _stream: ScriptedStream, request: Request) -> bytes:
        told = {"resources": [{"resource": f"db of {self.number}"}]}
        return answers.result(200, request[4], json.dumps(told).encode())

    def _complete(self, _stream: ScriptedStream, request: Request) -> bytes:
        self.completed.append({key: (value or b"").decode() for key, value in (request[2] or {}).items()})
        return answers.result(200, request[4], b"")

    def _outcome(self, _stream: ScriptedStream, request: Request) -> bytes:
        if self.outcome_told is None:
            raise FencedError("no longer kept")
        return answers.result(200, request[4], self.outcome_told)

    def _stats(self, _stream: ScriptedStream, request: Request) -> bytes:
        text = f'{{"puts": {self.number}}}' if b"json" in request[1] else f"puts {self.number}\n"
        return answers.result(200, request[4], text.encode())

    def _put(self, stream: ScriptedStream, request: Request) -> bytes:
        self._check_owner(request)
        return super()._put(stream, request)

    def _get(self, stream: ScriptedStream, request: Request) -> bytes:
        self._check_owner(request)
        return super()._get(stream, request)

    def _offset(self, stream: ScriptedStream, request: Request) -> bytes:
        self._check_owner(request)
        return super()._offset(stream, request)

    def _check_owner(self, request: Request) -> None:
        homes = self.cluster.topics.get(request[1][0].decode(), ())
        partition = int(request[1][1])
        if partition >= len(homes):
            raise UnknownTopicError(f"no partition {partition}")
        if homes[partition] != self.number:
            raise NotOwnerError(f"leader=- home={homes[partition]:016x} owns partition {partition}")


class ScriptedCluster:
    """See the module's docstring.

    Attributes:
        homes: by id, the brokers.
        leaders: by home, where its broker listens; None while it is away.
        topics: by name, the home of each partition.
        dialled: the addresses that were connected to, or tried.
    """

    def __init__(self, *numbers: int) -> None:
        self.clock = TurnedClock()
        self.homes = {number: ScriptedHome(self, number) for number in numbers}
        self.leaders: dict[int, Address | None] = {number: ("host", number) for number in numbers}
        self.topics: dict[str, Sequence[int]] = {"t": numbers}
        self.version = 1
        self.dialled: list[int] = []

    def led(self) -> dict[str, str | None]:
        """As ``meta`` tells it."""
        told = {home: None if where is None else f"{where[0]}:{where[1]}" for home, where in self.leaders.items()}
        return {f"{home:016x}": where for home, where in told.items()}

    def connect(self, host: str, port: int, timeout: float) -> ScriptedStream:
        self.dialled.append(port)
        for home, where in self.leaders.items():
            if where == (host, port):
                return self.homes[home].connect(host, port, timeout)
        raise ConnectionRefusedError(f"{host}:{port} refused")

    def kill(self, home: int) -> None:
        """A broker is away."""
        self.leaders[home] = None
        self.homes[home].cut()

    def client(self, *ports: int) -> Client:
        """A client with these ports as its bootstrap."""
        return Client([("host", port) for port in ports], clock=self.clock)


def scripted_cluster(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> ScriptedCluster:
    """A cluster that every connection made in this test ends up at."""
    cluster = ScriptedCluster(*numbers)
    monkeypatch.setattr(net, "connect", partial(ScriptedCluster.connect, cluster))
    return cluster
