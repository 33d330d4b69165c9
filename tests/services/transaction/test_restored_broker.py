"""A broker restored from an older copy: what it committed since is lost, and whoever has the proof says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import txmq
from tests.crash_points import at_moment
from tests.logged import said
from tests.older_copy import older_copy
from tests.services.loop_client import Connect
from tests.services.sqlite_shop import INSERT, SQLiteShop
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource
from txmq.xa.broker_port import SWEEP_AGE_MS
from txmq.xa.resolver import Resolver


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
    with txmq.connect(broker.address) as client, closing(Resolver(client, [resource])) as resolver:
        for _ in range(2):  # the first one opens the database
            resolver.run_once()


def test_owner_hears_that_a_restored_broker_lost_its_messages(
    shop: SQLiteShop, broker: BrokerProcess, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    history = ExitStack()
    history.enter_context(older_copy(broker))
    owner = SQLiteShop(broker, shop.path, connect)  # its session is issued behind the copy

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
