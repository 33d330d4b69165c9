"""Consumer groups over three real brokers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

import txmq
from tests.services.loop_client import Connect
from txmq.testing.eventually import eventually
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

from .asking import described, placed

SESSION_S = 5.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, ensemble: Ensemble) -> Iterator[Cluster]:
    """Three brokers."""
    settings = {"registry_session_timeout_ms": 3000}
    with Cluster(tmp_path_factory.mktemp("cluster"), ensemble, chroot="/groups", settings=settings) as made:
        yield made


@pytest.fixture
def client(cluster: Cluster, connect: Connect) -> Iterator[txmq.Client]:
    with connect(cluster.address) as made:
        yield made


class Reader:
    """A consumer, and what it has consumed."""

    def __init__(self, client: txmq.Client, topic: str, strategy: str = "sticky", **given: str) -> None:
        options = txmq.ConsumerOptions(session_timeout=SESSION_S, heartbeat_interval=0.2, strategy=strategy)
        self.consumer = client.consumer("readers", [topic], options=options, **given)  # type: ignore[arg-type]
        self.values: list[bytes] = []

    def take(self) -> None:
        """Take and acknowledge what is there."""
        for message in self.consumer.poll(100, 0.05):
            self.values.append(message.value or b"")
            message.ack()

    @property
    def numbers(self) -> set[int]:
        """The partitions it has."""
        return {number for _, number in self.consumer.assignment}


def until(readers: Sequence[Reader], what: str, *values: bytes) -> None:
    """Read until these have come, to whichever reader."""

    def have_come() -> bool:
        for reader in readers:
            reader.take()
        return set(values) <= {value for reader in readers for value in reader.values}

    eventually(have_come, what)


def test_a_killed_home_costs_its_partitions_alone(cluster: Cluster, client: txmq.Client) -> None:
    client.topics.create("orders", partitions=6)
    send = client.producer().send
    sent = [send("orders", b"%d" % number, partition=number) for number in range(6)]
    assert [result.offset for result in sent] == [0] * 6
    readers = [Reader(client, "orders"), Reader(client, "orders")]
    until(readers, "all homes are read", *(b"%d" % number for number in range(6)))
    eventually(lambda: [len(reader.numbers) for reader in readers] == [3, 3], "each has half of it")
    killed = cluster.brokers[1]
    home = described(killed)["home"]
    gone = {number for number, owner in enumerate(placed(killed, "orders")) if owner == home}
    killed.kill()
    for number in set(range(6)) - gone:
        send("orders", b"beside-%d" % number, partition=number)
    until(readers, "the others are read", *(b"beside-%d" % number for number in set(range(6)) - gone))
    eventually(lambda: readers[0].numbers | readers[1].numbers == set(range(6)) - gone, "its partitions are given up")
    assert len(client.groups.describe("readers")["away"]) == 1
    with pytest.raises(txmq.errors.TxmqError):
        client.groups.reset("readers", [["orders", 0, 0]])
    killed.start()
    for number in gone:
        send("orders", b"back-%d" % number, partition=number, timeout=30.0)
    until(readers, "it is read again", *(b"back-%d" % number for number in gone))
    for reader in readers:
        reader.consumer.close()
    assert {row["lag"] for row in client.groups.describe("readers")["partitions"]} == {0}
    client.groups.delete("readers")
    client.topics.delete("orders")


def test_one_has_everything_and_a_later_partition_is_whole(client: txmq.Client) -> None:
    client.topics.create("events", partitions=2)
    one = Reader(client, "events", "exclusive", start="latest")
    eventually(lambda: one.numbers == {0, 1}, "it has everything")
    two = Reader(client, "events", "exclusive", start="latest")
    client.producer().send("events", b"first", partition=1)
    until([one], "the first one reads", b"first")
    one.consumer.close()
    client.topics.alter("events", partitions=3)
    client.producer().send("events", b"later", partition=2)
    until([two], "its successor reads the added partition whole", b"later")
    assert (two.numbers, two.values) == ({0, 1, 2}, [b"later"])
    two.consumer.close()
    client.groups.delete("readers")
    client.topics.delete("events")
