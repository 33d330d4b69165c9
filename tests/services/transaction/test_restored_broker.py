"""A broker restored from an older copy: what it committed since is lost, and whoever has the proof says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import txmq
from tests.crash_points import at_moment, crash_at
from tests.logged import said
from tests.older_copy import older_copy
from tests.services.loop_client import Connect
from tests.services.sqlite_shop import INSERT, SQLiteShop
from txmq.runtime.clocks import OSClock
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource
from txmq.xa.database.marker_sweep import MarkerSweep
from txmq.xa.resolver_ports import SWEEP_AGE_MS, cluster_of


@pytest.fixture
def shop(broker: BrokerProcess, tmp_path: Path, connect: Connect) -> Iterator[SQLiteShop]:
    with SQLiteShop.installed(broker, tmp_path / "shop.db", connect) as shop:
        yield shop


def _markers(shop: SQLiteShop) -> dict[str, str]:
    with closing(shop.connect()) as connection:
        return dict(connection.execute("SELECT txid, outcome FROM txmq_marker"))


def _sweep(broker: BrokerProcess, shop: SQLiteShop) -> None:
    """Ten minutes later another process looks at the markers that are there."""
    with closing(shop.connect()) as connection, connection:
        connection.execute("UPDATE txmq_marker SET written_ms = written_ms - ?", (SWEEP_AGE_MS + 1,))
    resource = LastResource("shop", connect=shop.connect)
    with txmq.connect(broker.address) as client:
        (home,) = client.routes.links()
        home.look()
        with closing(resource.open_for_resolver(cluster_of(home))) as database:
            MarkerSweep(home, OSClock(), client.routes, name="shop").keep(lambda: database)


def test_owner_hears_that_a_restored_broker_lost_its_messages(
    shop: SQLiteShop, broker: BrokerProcess, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    history = ExitStack()
    history.enter_context(older_copy(broker))
    owner = SQLiteShop(broker, shop.path, connect)  # its session is issued after the copy

    def restore() -> None:
        history.close()
        broker.start()

    caplog.clear()
    block = owner.producer.transaction(owner.resource, timeout=30.0)
    with at_moment("client.tx.db_committed", restore), block as tx:
        tx.connection(owner.resource).execute(INSERT, (b"lost",))
        tx.send("orders", b"lost", key=b"k")
    assert tx.outcome is txmq.Outcome.COMMITTED
    with pytest.raises(txmq.HeuristicError, match="send them again"):
        tx.results  # noqa: B018
    assert [(line["level"], line["txid"]) for line in said(caplog) if "heuristic" in line["event"]] == [
        ("error", tx.txid)
    ]
    _sweep(broker, owner)
    assert _markers(owner) == {tx.txid: "committed"}
    assert (owner.rows(), owner.messages()) == ([b"lost"], [])
    owner.die()


@pytest.mark.threads
def test_loss_in_session_of_the_copy_is_kept_for_operator(
    shop: SQLiteShop, broker: BrokerProcess, connect: Connect
) -> None:
    """Its owner has died, and its session, which the copy has, will end: then nothing else would tell."""
    owner = SQLiteShop(broker, shop.path, connect)
    owner.order(b"kept")
    with older_copy(broker):
        with crash_at("client.tx.db_committed"), pytest.raises(SimulatedCrash):
            owner.order(b"lost")
        owner.die()
    broker.start()
    lost = max(_markers(shop))
    _sweep(broker, shop)
    (listed,) = shop.client.transactions.list(state="heuristic")
    (fact,) = listed["heuristics"]
    assert (listed["txid"], fact["resource"], fact["what"]) == (lost, "shop", "heuristic-hazard")
    assert "the rows are committed" in fact["reason"]
    _sweep(broker, shop)
    assert lost in _markers(shop)
    assert (shop.rows(), shop.messages()) == ([b"kept", b"lost"], [b"kept"])
