"""Consumers that read from a replica, and go on where it, or the leader, is away."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
from typer.testing import CliRunner

import txmq
from tests.services.broker.wire import Wire
from txmq.cli.main import app
from txmq.errors import ConnectionLostError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster


def _send(client: txmq.Client, numbers: range) -> None:
    with client.producer().transaction() as tx:
        for number in numbers:
            tx.send("orders", b"%d" % number)


def _take(consumer: txmq.Consumer, count: int) -> list[int]:
    """The next messages, acknowledged."""
    found = list[int]()

    def has_all() -> bool:
        for message in consumer.poll(timeout=0.1):
            found.append(int(message.value or b""))
            message.ack()
        return len(found) >= count

    eventually(has_all, f"{count} messages")
    return found


def _place(broker: BrokerProcess) -> str:
    return f"{broker.host}:{broker.port}"


def _reads_at(consumer: txmq.Consumer) -> str:
    """The address that a consumer fetches from."""
    [home] = consumer._homes._homes
    live = home.fetcher._connection.live
    return "" if live is None else live.address


def _is_known(replica: BrokerProcess, leader: BrokerProcess) -> bool:
    """Whether clients of the leader are told of the replica."""
    with Wire(leader) as wire:
        code, body = wire.ask(b"cluster homes 1\r\n")
    return code == 200 and json.loads(body)["homes"][0].get("replicas") == [_place(replica)]


def _has(replica: BrokerProcess, count: int) -> bool:
    """Whether readers of the replica see so many messages."""
    with Wire(replica) as wire:
        wire.ask(b"hello 1 test replica 1\r\n")
        code, body = wire.ask(b"offset orders 0 latest 2\r\n")
    return code == 200 and int(body.split()[0]) == count


def test_replica_is_no_broker_for_clients(alone: Cluster) -> None:
    alone.start()
    leader = alone.brokers[0]
    with alone.broker("replica", settings={"replica_of": "broker-0"}) as replica:
        with pytest.raises(ConnectionLostError, match=f"cannot connect to {_place(replica)}: a replica of home"):
            txmq.connect(replica.address)
        with txmq.connect(f"txmq://{_place(replica)},{_place(leader)}") as client:
            client.topics.create("orders", partitions=1)
        found = CliRunner().invoke(app, ["stats", "replication", "--bootstrap", replica.address])
        assert "role" in found.output, found
        assert "replica" in found.output


def test_consumer_of_a_replica_goes_to_its_leader_and_back(alone: Cluster) -> None:
    alone.start()
    leader = alone.brokers[0]
    replica = alone.broker("replica", settings={"replica_of": "broker-0"})
    with replica, ExitStack() as stack:
        eventually(lambda: _is_known(replica, leader), "clients are told of the replica")
        client = stack.enter_context(txmq.connect(alone.address))
        client.topics.create("orders", partitions=1)
        _send(client, range(100))
        options = txmq.ConsumerOptions(read_from="replica")
        with client.consumer("group", ["orders"], options=options) as consumer:
            assert _take(consumer, 100) == [*range(100)]
            eventually(lambda: _reads_at(consumer) == _place(replica), "it reads from the replica")
            _send(client, range(100, 200))
            assert _take(consumer, 100) == [*range(100, 200)]
            replica.kill()
            _send(client, range(200, 300))
            assert _take(consumer, 100) == [*range(200, 300)]
            eventually(lambda: _reads_at(consumer) == _place(leader), "it reads from the leader")
            replica.start()
            eventually(lambda: _reads_at(consumer) == _place(replica), "it reads from the replica again")
            replica.pause()
            _send(client, range(300, 400))
            assert _take(consumer, 100) == [*range(300, 400)]
            replica.resume()


def test_consumer_of_any_reads_on_without_its_leader(alone: Cluster) -> None:
    alone.start()
    leader = alone.brokers[0]
    settings = {"replica_of": "broker-0", "replica_reads_ms_max": 600_000}
    with alone.broker("replica", settings=settings) as replica, ExitStack() as stack:
        eventually(lambda: _is_known(replica, leader), "clients are told of the replica")
        client = stack.enter_context(txmq.connect(alone.address))
        client.topics.create("orders", partitions=1)
        for start in range(0, 3000, 100):
            with client.producer().transaction() as tx:
                for number in range(start, start + 100):
                    tx.send("orders", b"%d" % number + b" " * 1000)
        options = txmq.ConsumerOptions(read_from="any", buffer_size_bytes=64 << 10, session_timeout=600)
        with client.consumer("group", ["orders"], options=options) as consumer:
            first = _take(consumer, 100)
            eventually(lambda: _reads_at(consumer) == _place(leader), "it reads from the leader")
            eventually(lambda: _has(replica, 3000), "the replica has them all")
            leader.kill()
            rest = _take(consumer, 3000 - len(first))
            assert first + rest == [*range(3000)]
            eventually(lambda: _reads_at(consumer) == _place(replica), "it reads from the replica")
            leader.start()
            eventually(lambda: _reads_at(consumer) == _place(leader), "it reads from the leader again")
            _send(client, range(3000, 3100))
            assert _take(consumer, 100) == [*range(3000, 3100)]
