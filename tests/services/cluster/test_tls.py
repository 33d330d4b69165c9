"""Two brokers and their ZooKeeper, all over TLS with certificates of both sides: nothing is said in plaintext."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import txmq
from tests.services.broker.wire import Wire
from txmq.client.admin.cluster import Users
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

from .asking import asked, described, placed
from .branches import Home, OverTwoHomes, values


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """One server with a secure port."""
    files = CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca").issue("everybody")
    with Ensemble(tmp_path_factory.mktemp("zookeeper"), tls=files) as servers:
        yield servers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, secure: Ensemble) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with Cluster(directory, secure, chroot="/tls", size=2, tls=secure.tls) as made:
        code, body = asked(made.brokers[0], "topic", "create", "orders", "partitions=4")
        assert code == 200, body
        eventually(lambda: all(_knows(broker) for broker in made.brokers), "both have the topic")
        yield made


def _knows(broker: BrokerProcess) -> bool:
    return asked(broker, "topic", "describe", "orders")[0] == 200


def _own(broker: BrokerProcess) -> int:
    """A partition of its home."""
    return placed(broker, "orders").index(described(broker)["home"])


def _is_settled(broker: BrokerProcess) -> bool:
    with Wire(broker) as wire:
        return b"in_doubt 0\n" in wire.ask(b"stats transactions 1\r\n")[1]


def test_brokers_with_users_know_each_other_over_tls(tmp_path: Path, secure: Ensemble) -> None:
    login = ("ops", "pencil")
    with Cluster(tmp_path, secure, chroot="/users", size=2, tls=secure.tls, credentials="brokers:secret") as made:
        with txmq.connect(made.registry) as client:
            client.topics.create("orders", partitions=2)
            eventually(lambda: all(_knows(broker) for broker in made.brokers), "both have the topic")
            sides = [(broker, _own(broker)) for broker in made.brokers]
            Users(client.control, client.timeout).add(*login)
        for broker in made.brokers:
            eventually(partial(_lets_in, broker, login), "every home knows the user")
        homes = [Home(*side, login) for side in sides]
        decided = OverTwoHomes.prepared(homes[0], homes[1], b"decided there")
        decided.decide(b"decided here")
        for home in homes:
            home.close()
        there = sides[1][0].restart()
        eventually(lambda: b"decided there" in values(there, sides[1][1], login), "the branch asked, and was told")
        assert '"user": ".home-' in sides[0][0].logs()
        with txmq.connect(made.registry_of("ops"), password="pencil") as client:
            assert {message.value for message in client.browse("orders")} == {b"decided here", b"decided there"}


def _lets_in(broker: BrokerProcess, login: tuple[str, str]) -> bool:
    with Wire(broker) as wire:
        return wire.log_in(*login) == 200


def test_client_finds_the_brokers_by_zks(cluster: Cluster) -> None:
    with txmq.connect(cluster.registry) as client, client.producer() as producer:
        for number in range(8):
            with producer.transaction() as tx:
                for partition in range(4):
                    tx.send("orders", b"%d" % number, partition=partition)
        assert tx.outcome is txmq.Outcome.COMMITTED
        tx.wait_visible(60.0)
        assert len(list(client.browse("orders"))) == 32


def test_brokers_settle_over_tls_what_a_client_left(cluster: Cluster) -> None:
    here, there = cluster.brokers
    mine, theirs = _own(here), _own(there)
    homes = Home(here, mine), Home(there, theirs)
    decided = OverTwoHomes.prepared(*homes, b"decided there")
    decided.decide(b"decided here")
    for home in homes:
        home.close()
    there.restart()
    eventually(lambda: b"decided there" in values(there, theirs), "the branch asked the home that decided")
    for broker in cluster.brokers:
        eventually(partial(_is_settled, broker), "nothing is in doubt")
    assert b"decided here" in values(here, mine)
