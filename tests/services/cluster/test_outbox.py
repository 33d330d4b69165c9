"""An outbox in front of two homes: one dies, and the application takes orders; each home gets its own, in order."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.crash_points import at_moment, crash_at
from txmq import Outcome
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble
from txmq.xa import LastResource
from txmq.xa.last_resource.outbox import OutboxOptions

from .conftest import NUMBERS

PARTITIONS = 2


class Shop:
    """Orders in a database, and a message for each, to partitions of two homes."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self.cluster, self._path = cluster, path
        self._opened: list[txmq.Client] = []
        self.client, self.resource = self.process()
        eventually(lambda: len(self.client.routes.all_links()) == len(cluster.brokers), "both homes are known")
        self.topic = f"orders-{next(NUMBERS)}"
        self.client.topics.create(self.topic, partitions=PARTITIONS)
        with closing(self.connect()) as connection:
            connection.execute("CREATE TABLE sold (place INTEGER PRIMARY KEY, pieces INTEGER)")
            connection.executemany("INSERT INTO sold VALUES (?, 0)", [(place,) for place in range(PARTITIONS)])
            connection.commit()
        self.resource.install(self.client)

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=30.0, check_same_thread=False)

    def process(self) -> tuple[txmq.Client, LastResource]:
        """One more, as far as brokers and database can tell."""
        client = txmq.connect(self.cluster.address, timeout=3.0, lazy=True)
        self._opened.append(client)
        return client, LastResource("shop", connect=self.connect, outbox=OutboxOptions(away_after_ms=300))

    def order(self, *places: int, process: tuple[txmq.Client, LastResource] | None = None) -> txmq.Transaction:
        """One piece in each of these places, and its number as a message for the partition."""
        client, resource = process or (self.client, self.resource)
        with client.producer().transaction(resource, timeout=60.0) as tx:
            connection = tx.connection(resource)
            for place in places:
                connection.execute("UPDATE sold SET pieces = pieces + 1 WHERE place = ?", (place,))
                ((pieces,),) = connection.execute("SELECT pieces FROM sold WHERE place = ?", (place,)).fetchall()
                tx.send(self.topic, str(pieces).encode(), key=b"k%d" % place, partition=place)
        assert tx.outcome is Outcome.COMMITTED
        return tx

    def away(self, place: int) -> BrokerProcess:
        """The broker of a partition."""
        homes = self.client.routes.homes_of(self.topic)
        assert homes is not None
        link = self.client.routes.link_of_home(homes[place])
        leader = link.address
        if leader is None:
            link.control.call("ping", timeout=3.0)
            leader = link.address
        assert leader is not None
        (found,) = [broker for broker in self.cluster.brokers if broker.port == leader[1]]
        return found

    def waiting(self) -> list[str]:
        """The home of each row in the outbox."""
        return [str(home) for (home,) in self.run("SELECT home FROM txmq_marker_outbox ORDER BY seq")]

    def run(self, statement: str) -> list[Any]:
        with closing(self.connect()) as connection:
            return connection.execute(statement).fetchall()

    def values(self, place: int) -> list[int]:
        """What readers of a partition see."""
        end = self.client.offsets(self.topic, place).end
        found = list[int]()
        while len(found) < end:
            found += [int(m.value or b"") for m in self.client.fetch(self.topic, place, len(found))]
        return found

    def check(self) -> None:
        """Each piece is a message, once, in order; nothing waits in the database or at a home."""
        for place, pieces in self.run("SELECT place, pieces FROM sold"):
            expected = list(range(1, int(pieces) + 1))
            eventually(partial(self._has, int(place), expected), f"partition {place} has its messages")
        eventually(lambda: not self.waiting(), "the outbox is empty")
        eventually(lambda: not list(self.client.transactions.list(state="in-doubt")), "nothing is in doubt")

    def _has(self, place: int, expected: list[int]) -> bool:
        return self.values(place) == expected

    def close(self) -> None:
        for client in self._opened:
            client.close()


@pytest.fixture(scope="module")
def two_homes(tmp_path_factory: pytest.TempPathFactory, ensemble: Ensemble) -> Iterator[Cluster]:
    settings = {"registry_session_timeout_ms": 1000}
    with Cluster(tmp_path_factory.mktemp("outbox"), ensemble, chroot="/outbox", size=2, settings=settings) as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path, two_homes: Cluster) -> Iterator[Shop]:
    made = Shop(two_homes.start(), tmp_path / "shop.db")
    yield made
    made.close()


def test_home_that_is_away_holds_up_no_other(shop: Shop) -> None:
    for places in ((0,), (1,), (0, 1)):
        assert shop.order(*places).pending == ()
    assert shop.waiting() == []
    lost = shop.away(1)
    lost.kill()
    both = shop.order(0, 1)
    assert both.pending == ("broker",)
    assert shop.order(1).pending == ("broker",)
    eventually(lambda: shop.values(0) == [1, 2, 3], "the home that is there has its part")
    eventually(lambda: len(shop.waiting()) == 2, "the other one's wait")
    tx = shop.order(0)
    assert [result.offset for result in tx.results] == [3]
    assert shop.client.outcome(both.txid) is Outcome.COMMITTED
    lost.start()
    both.wait_visible(30.0)
    shop.check()
    eventually(lambda: shop.order(0, 1).pending == (), "blocks go to both brokers again")


@pytest.mark.parametrize("point", ["client.homes.prepare_sent", "client.tx.prepare_sent", "client.tx.prepared"])
def test_home_that_dies_at_a_prepare_leaves_nothing(shop: Shop, point: str) -> None:
    shop.order(0, 1)
    lost = shop.away(1)
    with at_moment(point, lost.kill):
        shop.order(0, 1)
    lost.start()
    shop.check()


@pytest.mark.parametrize("point", ["client.outbox.filled", "client.outbox.committed"])
def test_client_that_dies_at_its_outbox_leaves_all_or_nothing(shop: Shop, point: str) -> None:
    shop.order(0, 1)
    lost = shop.away(1)
    lost.kill()
    with pytest.raises(SimulatedCrash), crash_at(point):
        shop.order(0, 1)
    lost.start()
    shop.check()


def test_service_starts_while_both_homes_are_away(shop: Shop) -> None:
    shop.order(0, 1)
    for broker in shop.cluster.brokers:
        broker.kill()
    process = shop.process()
    process[1].install(process[0])
    assert shop.order(0, 1, process=process).pending == ("broker",)
    assert shop.order(1, process=process).pending == ("broker",)
    assert len(set(shop.waiting())) == 2
    shop.cluster.start()
    shop.check()
