"""Producers over three real brokers: one is killed and one is paused under load; nothing is lost, nothing is twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import txmq
from txmq.client.partitioner import KeyHashSelector
from txmq.errors import PartialResultError
from txmq.model import SendStatus
from txmq.runtime.threads import Signal, start_daemon
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

PARTITIONS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, ensemble: Ensemble) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("producers"), ensemble, chroot="/producers") as made:
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[txmq.Client]:
    with txmq.connect(cluster.address) as opened:
        eventually(lambda: len(opened.routes.all_links()) == len(cluster.brokers), "the client knows all homes")
        yield opened


class Load:
    """Sends one message after the other in a thread, each of another value, until it is stopped."""

    def __init__(self, send: Callable[[int, bytes], txmq.SendResult]) -> None:
        self.results: dict[bytes, txmq.SendResult] = {}
        self.unknown: set[bytes] = set()
        self._send = send
        self._stops, self._stopped = False, Signal()
        start_daemon("load", self._run)

    def _run(self) -> None:
        number = 0
        while not self._stops:
            value = b"%d" % number
            try:
                self.results[value] = self._send(number, value)
            except txmq.TxmqError:
                self.unknown.add(value)
            number += 1
        self._stopped.set()

    def goes_on(self, count: int = 200) -> None:
        """Wait until so many more are sent."""
        there = len(self.results)
        eventually(lambda: len(self.results) >= there + count, "messages are sent")

    def stop(self) -> None:
        """End, and wait for the last."""
        self._stops = True
        assert self._stopped.wait(60)


def owner_of(cluster: Cluster, client: txmq.Client, partition: int) -> BrokerProcess:
    """The broker that leads a partition's home."""
    address = client.routes.link_for("orders", partition).address
    assert address is not None
    return next(broker for broker in cluster.brokers if broker.port == address[1])


def browse(client: txmq.Client) -> list[txmq.Message]:
    """All that is there; a home that is back may be away for one connection or another for a moment."""
    found: list[txmq.Message] = []

    def is_whole() -> bool:
        try:
            found[:] = client.browse("orders")
        except PartialResultError:
            return False
        return True

    eventually(is_whole, "every home is there")
    return found


def test_a_home_is_killed_and_paused_under_load(cluster: Cluster, client: txmq.Client, tmp_path: Path) -> None:
    client.topics.create("orders", partitions=PARTITIONS)
    producer = client.producer(timeout=3.0)
    ordered = client.ordered_producer(
        KeyHashSelector(), spool=str(tmp_path / "spool"), options=txmq.OrderedOptions(timeout=3.0)
    )
    keyless = Load(lambda _, value: producer.send("orders", b"k" + value))
    keyed = Load(lambda number, value: ordered.send("orders", b"o" + value, b"%d" % (number % 20)))
    keyless.goes_on()
    victim = owner_of(cluster, client, 1)
    away = {number for number in range(PARTITIONS) if owner_of(cluster, client, number) is victim}
    victim.kill()
    keyless.goes_on()
    eventually(lambda: ordered.spooled > 0, "messages wait for the home that is away")
    with pytest.raises(txmq.TxmqError) as failure:
        producer.send_many("orders", [(b"%d" % number, b"m%d" % number) for number in range(200)], timeout=3.0)
    failed = failure.value.__notes__[0].partition("failed: ")[2].split(", ")
    assert {f"orders-{number}" for number in away} <= set(failed) < {f"orders-{n}" for n in range(PARTITIONS)}
    victim.start()
    eventually(lambda: not ordered.spooled, "the home that is back has its messages")
    eventually(lambda: producer.send("orders", b"back").partition in away, "messages without a key come back")
    victim.pause()
    keyless.goes_on()
    eventually(lambda: ordered.spooled > 0, "messages wait for the home that is paused")
    victim.resume()
    eventually(lambda: not ordered.spooled, "the home that goes on has its messages")
    keyless.stop()
    keyed.stop()
    ordered.flush()
    stored = browse(client)
    counts = Counter(message.value for message in stored)
    assert not [value for value in keyless.results if counts[b"k" + value] != 1]
    assert not [value for value in keyless.unknown if counts[b"k" + value] > 1]
    assert not [value for value in keyed.results if counts[b"o" + value] != 1]
    assert not keyed.unknown
    assert {result.status for result in keyed.results.values()} == {SendStatus.ACKNOWLEDGED, SendStatus.SPOOLED}
    for key in range(20):
        of_key = [int(m.value[1:]) for m in stored if m.key == b"%d" % key and m.value and m.value[:1] == b"o"]
        assert of_key == sorted(of_key)
