"""Spark's tasks that read from a replica, as an executor runs them: what it has, and the rest from the leader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import txmq
from tests.services.broker.wire import Wire
from txmq.spark.source.batch_reader import BatchReader
from txmq.spark.source.options import parse
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster

COUNT = 2000


@pytest.fixture
def followed(alone: Cluster) -> Iterator[tuple[Cluster, BrokerProcess]]:
    """A cluster of one broker with messages, and a replica that has them all."""
    alone.start()
    with ExitStack() as stack:
        replica = stack.enter_context(alone.broker("replica", settings={"replica_of": "broker-0"}))
        client = stack.enter_context(txmq.connect(alone.address))
        client.topics.create("orders", partitions=1)
        _send(client, range(COUNT))
        eventually(lambda: client.topics.describe("orders") is not None and _is_ready(alone, replica), "it has them")
        yield alone, replica


def _send(client: txmq.Client, numbers: range) -> None:
    with client.producer() as producer:
        for number in numbers:
            producer.send("orders", b"%d" % number + b" " * 2000)


def _is_ready(cluster: Cluster, replica: BrokerProcess) -> bool:
    """Whether clients are told of the replica, and it has all messages."""
    with Wire(cluster.brokers[0]) as wire:
        is_told = json.loads(wire.ask(b"cluster homes 1\r\n")[1])["homes"][0].get("replicas") is not None
    with Wire(replica) as wire:
        wire.ask(b"hello 1 test replica 1\r\n")
        code, body = wire.ask(b"offset orders 0 latest 2\r\n")
    return is_told and code == 200 and body.split()[0] == b"%d" % COUNT


def _gets(broker: BrokerProcess) -> int:
    with Wire(broker) as wire:
        return int(json.loads(wire.ask(b"stats json 1\r\n")[1])["broker"]["get_requests"])


def _read(cluster: Cluster, between: Callable[[], object] = lambda: None) -> list[int]:
    """The values of all messages, in order; something may happen after the plan."""
    options = {"bootstrap": cluster.address, "topic": "orders", "readFrom": "replica", "minPartitions": "1"}
    reader = BatchReader(parse(options, is_stream=False), ("value",))
    parts = reader.partitions()
    between()
    batches = [batch.to_pydict()["value"] for part in parts for batch in reader.read(part)]
    return [int(value) for values in batches for value in values]


def test_tasks_read_from_the_replica_alone(followed: tuple[Cluster, BrokerProcess]) -> None:
    cluster, replica = followed
    before = _gets(cluster.brokers[0]), _gets(replica)
    assert _read(cluster) == [*range(COUNT)]
    assert _gets(cluster.brokers[0]) == before[0]
    assert _gets(replica) > before[1]


def test_tasks_read_from_the_leader_where_no_replica_is(followed: tuple[Cluster, BrokerProcess]) -> None:
    cluster, replica = followed
    before = _gets(cluster.brokers[0])
    assert _read(cluster, replica.kill) == [*range(COUNT)]
    assert _gets(cluster.brokers[0]) > before


def test_tasks_go_on_at_a_leader_that_has_started_anew(followed: tuple[Cluster, BrokerProcess]) -> None:
    """The plan's offsets count in the log of the life before: a copy of another one is not asked."""
    cluster, _replica = followed

    def restart() -> None:
        cluster.brokers[0].kill()
        cluster.brokers[0].start()

    assert _read(cluster, restart) == [*range(COUNT)]
