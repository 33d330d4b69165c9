"""Scripted brokers with a registry that know the sink's requests: queries with one anchor each, prepared parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from tests.unit.client.scripted import ScriptedStream
from tests.unit.client.scripted_cluster import ScriptedCluster, ScriptedHome
from txmq.client.client import Client
from txmq.errors import FencedError, NotOwnerError, TransactionConflictError, UnknownQueryError
from txmq.log import records
from txmq.protocol import answers
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import parse_parts
from txmq.runtime import net
from txmq.spark.sink import queries, task
from txmq.spark.sink.digest import Attempt
from txmq.spark.sink.options import SinkOptions, parse_options
from txmq.spark.sink.queries import Opened
from txmq.spark.sink.task import Written


class Part(NamedTuple):
    """One part of a prepared transaction."""

    topic: str
    partition: int
    values: tuple[bytes | None, ...]
    keys: frozenset[int] | None
    topic_id: int
    txids: frozenset[str | None]


class Prepared(NamedTuple):
    """A transaction as it was prepared."""

    kind: str
    stated: dict[str, str]
    parts: tuple[Part, ...]


class SinkHome(ScriptedHome):
    """A home that keeps queries.

    Attributes:
        prepared: by id, what is in doubt.
        ended: by id, "committed" or "rolled-back".
    """

    cluster: SinkCluster

    def __init__(self, cluster: SinkCluster, number: int) -> None:
        super().__init__(cluster, number)
        self.prepared: dict[str, Prepared] = {}
        self.ended: dict[str, str] = {}

    def _query(self, _stream: ScriptedStream, request: Request) -> bytes:
        action, name = (word.decode() for word in request[1])
        self.cluster.note(self.number, f"query {action}")
        stated = {word.decode(): int(number) for word, number in (request[2] or {}).items() if word != b"digest"}
        answer = getattr(self, f"_query_{action}")(name, stated, bytes(request[3] or b""))
        return answers.result(200, request[4], json.dumps(answer).encode())

    def _query_epoch(self, _name: str, _stated: dict[str, int], _body: bytes) -> dict[str, Any]:
        self.cluster.last_epoch += 1
        return {"epoch": self.cluster.last_epoch}

    def _query_open(self, name: str, stated: dict[str, int], _body: bytes) -> dict[str, Any]:
        anchor = self.cluster.anchors.setdefault(name, self.number)
        if anchor != self.number:
            raise NotOwnerError(f"leader=- home={anchor:016x} is the anchor of query {name}")
        if stated["epoch"] < self.cluster.epochs.get(name, 0):
            raise FencedError("a later driver writes")
        self.cluster.epochs[name] = stated["epoch"]
        newest = self.cluster.batches.get(name)
        return {"batch": newest, "committed": newest is not None and stated["batch"] <= newest, "digest": None}

    def _query_commit(self, name: str, stated: dict[str, int], body: bytes) -> dict[str, Any]:
        self._known(name)
        if stated["batch"] <= self.cluster.batches.get(name, -1):
            return {"already_committed": True}
        winners = body.decode().split()
        if any(txid not in self.prepared for txid in winners):
            raise TransactionConflictError("not prepared")
        self.cluster.batches[name] = stated["batch"]
        for txid in list(self.prepared):
            if self.prepared[txid].kind == "spark":
                self._over(txid, "committed" if txid in winners else "rolled-back")
        return {"already_committed": False}

    def _query_abort(self, _name: str, _stated: dict[str, int], _body: bytes) -> dict[str, Any]:
        doomed = [txid for txid, one in self.prepared.items() if one.kind == "spark"]
        for txid in doomed:
            self._over(txid, "rolled-back")
        return {"rolled_back": len(doomed)}

    def _query_delete(self, name: str, _stated: dict[str, int], _body: bytes) -> dict[str, Any]:
        self._known(name)
        del self.cluster.anchors[name], self.cluster.epochs[name]
        return {}

    def _known(self, name: str) -> None:
        if self.cluster.anchors.get(name) != self.number:
            raise UnknownQueryError(f"no query {name}")

    def _prepare(self, _stream: ScriptedStream, request: Request) -> bytes:
        txid, kind = (word.decode() for word in request[1][:2])
        self.cluster.note(self.number, f"prepare {kind}")
        stated = {word.decode(): (text or b"").decode() for word, text in (request[2] or {}).items()}
        if kind == "spark":
            self._known(stated["query"])
        if txid in self.ended:
            raise TransactionConflictError(f"{txid} is {self.ended[txid]}")
        parts = []
        for topic, partition, batch, keys, topic_id in parse_parts(request[3] or b""):
            messages = records.decode(bytes(batch), topic, partition)
            values = tuple(message.value for message in messages)
            txids = frozenset(message.txid for message in messages)
            parts.append(Part(topic, partition, values, keys, topic_id, txids))
        self.prepared[txid] = Prepared(kind, stated, tuple(parts))
        return answers.result(200, request[4], b"")

    def _commit(self, _stream: ScriptedStream, request: Request) -> bytes:
        self.cluster.note(self.number, "commit")
        self._over(request[1][0].decode(), "committed")
        return answers.result(200, request[4], b"")

    def _rollback(self, _stream: ScriptedStream, request: Request) -> bytes:
        self.cluster.note(self.number, "rollback")
        self._over(request[1][0].decode(), "rolled-back")
        return answers.result(200, request[4], b"")

    def _outcome(self, _stream: ScriptedStream, request: Request) -> bytes:
        self.cluster.note(self.number, "outcome")
        return answers.result(200, request[4], self.ended[request[1][0].decode()].encode() + b"\n")

    def _over(self, txid: str, word: str) -> None:
        before = self.ended.setdefault(txid, word)
        if before != word:
            raise TransactionConflictError(f"{txid} is {before}")
        self.prepared.pop(txid, None)


class SinkCluster(ScriptedCluster):
    """See the module's docstring.

    Attributes:
        anchors, epochs, batches: of each query.
        asked: home and request, in order.
    """

    homes: dict[int, SinkHome]  # type: ignore[assignment]

    def __init__(self, *numbers: int) -> None:
        super().__init__(*numbers)
        self.homes = {number: SinkHome(self, number) for number in numbers}
        self.anchors: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        self.batches: dict[str, int] = {}
        self.last_epoch = 0
        self.asked: list[tuple[int, str]] = []

    def note(self, home: int, text: str) -> None:
        """A request has come."""
        self.asked.append((home, text))

    def requests(self) -> list[tuple[int, str]]:
        """Those since the last look."""
        found, self.asked = self.asked, []
        return found


class Job:
    """A query's driver and its tasks, in one client."""

    def __init__(self, client: Client, topic: str | None = "t", query: str = "q") -> None:
        self.client, self.topic = client, topic
        options = {"bootstrap": "txmq://host:1", "timeout": "5"} | ({"topic": topic} if topic else {})
        self.options: SinkOptions = parse_options(options, is_streaming=False)
        self.at = Attempt(query, queries.new_epoch(client), 0, 0, 0)
        self.opened: Opened = queries.open_query(client, topic, query, self.at.epoch, 0)

    def write(self, *batches: Any, task_number: int = 0, attempt: int = 0, batch: int = 0) -> Written:
        """One attempt of a task."""
        at = self.at._replace(task=task_number, attempt=attempt, batch=batch)
        return task.write(self.client, self.options, at, iter(batches), self.opened.home)

    def commit(self, *written: Written, batch: int = 0) -> None:
        """The driver's commit."""
        winners = [winner for one in written for winner in one.transactions]
        queries.commit(self.client, self.opened.home, self.at._replace(batch=batch), winners)


def rows(*places: int, topics: Sequence[str] | None = None) -> Any:
    """One Arrow batch: a row for each partition, whose value is its number."""
    columns = {"value": pa.array([b"%d" % place for place in places], pa.binary())}
    columns["partition"] = pa.array(places, pa.int32())
    if topics is not None:
        columns["topic"] = pa.array(topics)
    return pa.record_batch(columns)


def lone_broker(monkeypatch: pytest.MonkeyPatch) -> SinkCluster:
    """One broker without a registry."""
    cluster = sink_cluster(monkeypatch, 1)
    del cluster.homes[1].told["registry"]
    return cluster


def sink_cluster(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> SinkCluster:
    """A cluster that every connection made in this test ends up at."""
    cluster = SinkCluster(*numbers)
    monkeypatch.setattr(net, "connect", partial(SinkCluster.connect, cluster))
    return cluster
