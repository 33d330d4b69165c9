"""The relay of an outbox over two homes: a unit is at both or at none, whoever dies; one that is away holds up none."""

from __future__ import annotations

import itertools
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from tests.crash_points import at_moment
from tests.services.outbox.databases import connector_of
from tests.services.outbox.relaying import started
from txmq.client.partitioner import KeyHashSelector
from txmq.client.relay import broker_side as relay_broker
from txmq.client.relay.relay import Relay
from txmq.outbox.outbox import Outbox
from txmq.outbox.page import BEHIND
from txmq.outbox.relay_core import RelayRow
from txmq.outbox.tables import AWAY
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

DRAIN_S = 60.0
TOPICS = itertools.count(1)
KEYS = [b"k%d" % number for number in range(20)]


@pytest.fixture(scope="module")
def two_homes(tmp_path_factory: pytest.TempPathFactory, ensemble: Ensemble) -> Iterator[Cluster]:
    settings = {"registry_session_timeout_ms": 3000, "request_size_bytes_max": 1 << 20, "batch_size_bytes_max": 1 << 20}
    with Cluster(tmp_path_factory.mktemp("relay"), ensemble, chroot="/relay", size=2, settings=settings) as made:
        yield made


class Shop:
    """A database with an outbox; each unit has a message for each of two keys, at two homes."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self.cluster = cluster.start()
        self.client = txmq.connect(cluster.address, timeout=10.0)
        self.fields: dict[str, object] = {"kind": "sqlite", "where": str(path)}
        self.connect, self.outbox = connector_of(self.fields), Outbox("orders-db")
        self.connection: sqlite3.Connection = self.connect()
        self.outbox.install(self.connection)
        self.written = 0
        eventually(self._is_spread, "each home has a partition")

    def _is_spread(self) -> bool:
        self.topic = f"orders-{next(TOPICS)}"
        self.client.topics.create(self.topic, partitions=2)
        self.client.topics.describe(self.topic)
        self.homes = self.client.routes.homes_of(self.topic) or ()
        return len(set(self.homes)) == 2

    def keys_of(self, place: int) -> list[bytes]:
        """Keys whose messages go to a partition."""
        selector = KeyHashSelector()
        return [key for key in KEYS if selector.partition_of(key, 2) == place]

    def write(self, count: int, places: tuple[int, ...] = (0, 1), size: int = 0) -> None:
        """So many units."""
        for _ in range(count):
            value = b"%d " % self.written + b"x" * size
            self.outbox.send_many(self.connection, [(self.topic, value, self.keys_of(place)[0]) for place in places])
            self.connection.commit()
            self.written += 1

    def relay(self) -> Relay:
        """One more relay; the one that had the lease is gone."""
        self.connection.execute("UPDATE txmq_outbox_relay SET until_ms = 0")
        self.connection.commit()
        return Relay(self.client, self.outbox, self.connect)

    def values(self, place: int) -> list[int]:
        """What readers of a partition see."""
        end = self.client.offsets(self.topic, place).end
        found = list[int]()
        while len(found) < end:
            found += [int((m.value or b"").split()[0]) for m in self.client.fetch(self.topic, place, len(found))]
        return found

    def broker_of(self, place: int) -> BrokerProcess:
        """The broker of a partition."""
        link = self.client.routes.link_of_home(self.homes[place])
        link.control.call("ping", timeout=30.0)
        assert link.address is not None
        return next(broker for broker in self.cluster.brokers if broker.port == link.address[1])

    def anchor(self) -> int:
        """The home that keeps the outbox's chain; 0: none yet."""
        ((home,),) = self.connection.execute("SELECT home FROM txmq_outbox_relay").fetchall()
        return int(home[17:] or "0", 16)

    def check(self) -> None:
        """Each unit is at both homes, once, in order."""
        wanted = [list(range(self.written))] * 2
        eventually(lambda: [self.values(place) for place in range(2)] == wanted, "both partitions are whole")
        assert self.parked() == []

    def parked(self) -> list[str]:
        """Why rows are parked."""
        return [why for (why,) in self.connection.execute("SELECT why FROM txmq_outbox_parked ORDER BY id")]


@pytest.fixture
def shop(tmp_path: Path, two_homes: Cluster) -> Iterator[Shop]:
    made = Shop(two_homes, tmp_path / "shop.db")
    yield made
    made.connection.close()
    made.client.close()


@pytest.mark.parametrize("point", ["relay.page.prepared", "relay.page.sent", "relay.page.taken"])
def test_dead_relay_leaves_a_page_at_both_homes_or_none(shop: Shop, point: str) -> None:
    shop.write(5)
    dying = started(shop.cluster.address, shop.fields, f"{point}:2")
    try:
        while dying.poll() is None:
            shop.write(1)
    finally:
        dying.kill()
    assert dying.wait() == -signal.SIGKILL
    shop.write(5)
    with shop.relay() as relay:
        relay.drain(DRAIN_S)
        shop.check()


@pytest.mark.parametrize("point", ["relay.page.prepared", "relay.page.sent", "relay.page.taken"])
@pytest.mark.parametrize("place", [0, 1])
def test_home_that_dies_places_its_part_once(shop: Shop, place: int, point: str) -> None:
    with shop.relay() as relay:
        shop.write(5)
        relay.drain(DRAIN_S)
        lost = shop.broker_of(place)
        with at_moment(point, lost.kill):
            shop.write(5)
            eventually(lambda: not lost.is_running, "the home is dead")
        shop.write(5)
        lost.start()
        relay.drain(DRAIN_S)
        shop.check()


def test_home_that_is_away_holds_up_no_other(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_broker, "AWAY_S", 1.0)
    with shop.relay() as relay:
        eventually(shop.anchor, "the first page has chosen the anchor")
        here, there = sorted((0, 1), key=lambda place: shop.homes[place] != shop.anchor())
        shop.write(3, (here,))
        relay.drain(DRAIN_S)
        lost = shop.broker_of(there)
        lost.kill()
        shop.write(2)
        shop.write(2, (here,))
        eventually(lambda: len(shop.parked()) == 6, "units for it, and what must stay behind them, are parked")
        assert [why[: len(AWAY)] for why in shop.parked()] == [AWAY] * 4 + [BEHIND[: len(AWAY)]] * 2
        shop.outbox.send(shop.connection, shop.topic, b"7 of another key", shop.keys_of(here)[1])
        shop.connection.commit()
        eventually(lambda: relay.sent == 4, "others go on")
    with shop.relay() as relay:
        lost.start()
        eventually(lambda: relay.sent == 6, "they are released")
        relay.drain(DRAIN_S)
    assert shop.parked() == []
    assert shop.values(here) == [0, 1, 2, 7, 3, 4, 5, 6]
    assert shop.values(there) == [3, 4]


def test_unit_over_a_request_is_streamed_to_both_homes(shop: Shop) -> None:
    for place in (0, 1):
        with shop.relay() as relay:
            shop.write(1, places=(0, 1) * 6, size=300_000)
            lost = shop.broker_of(place)
            with at_moment("relay.page.part_sent", lost.kill):
                eventually(lambda: not lost.is_running, "the home is dead")  # noqa: B023
            lost.start()
            relay.drain(DRAIN_S)
    for place in (0, 1):
        assert shop.values(place) == [0] * 6 + [1] * 6
    assert shop.parked() == []


def test_lease_is_renewed_while_a_branch_is_streamed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.client.relay.relay._RENEW_EVERY_S", 0.0)
    renewed: list[RelayRow] = []
    with shop.relay() as relay:
        shop.write(1)
        relay.drain(DRAIN_S)
        monkeypatch.setattr(relay._database, "renew", renewed.append)
        there = next(place for place in (0, 1) if shop.homes[place] != shop.anchor())
        shop.write(1, places=(there,) * 6, size=300_000)
        relay.drain(DRAIN_S)
    assert len(renewed) > 1


def test_branch_home_may_forget_pages_that_are_told(shop: Shop) -> None:
    with shop.relay() as relay:
        for _ in range(3):
            shop.write(1)
            relay.drain(DRAIN_S)
        there = next(home for home in shop.homes if home != shop.anchor())
        session = shop.client.routes.link_of_home(there).session
        eventually(lambda: session.finished_through >= 2, "all but the last page are over there")


def test_relay_that_knows_no_broker_yet_finds_the_anchor(shop: Shop) -> None:
    addresses = [broker.address.removeprefix("txmq://") for broker in shop.cluster.brokers]
    with shop.relay() as relay:
        shop.write(1)
        relay.drain(DRAIN_S)
    for order in (addresses, addresses[::-1]):
        with txmq.connect("txmq://" + ",".join(order), lazy=True) as client:
            shop.write(1)
            with Relay(client, shop.outbox, shop.connect) as relay:
                relay.drain(DRAIN_S)
    shop.check()
