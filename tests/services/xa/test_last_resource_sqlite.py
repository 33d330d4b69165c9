"""Last-resource transactions over SQLite at a real broker, with the resolver in its thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import txmq
from tests.crash_points import at_moment, crash_at
from tests.services.loop_client import Connect, inside
from tests.services.sqlite_shop import SQLiteShop
from txmq.cli import tx_explain
from txmq.client.transaction.background_resolver import resolver_of
from txmq.errors import OffsetOutOfRangeError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource

RESOLVED_WITHIN_S = 60.0  # far above the promise of 2 s: a loaded machine must not turn it red


@pytest.fixture
def shop(broker: BrokerProcess, tmp_path: Path, connect: Connect) -> Iterator[SQLiteShop]:
    with SQLiteShop.installed(broker, tmp_path / "shop.db", connect) as shop:
        yield shop


def test_rows_and_messages_of_threads_are_equal_and_in_order(shop: SQLiteShop) -> None:
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(shop.order, [b"%d" % number for number in range(100)]))
    assert set(outcomes) == {txmq.Outcome.COMMITTED}
    assert len(shop.rows()) == 100
    assert shop.messages() == shop.rows()


@pytest.mark.parametrize("point", ["client.tx.prepared", "client.tx.db_committed"])
def test_what_dead_client_left_is_settled_by_thread_of_another(
    shop: SQLiteShop, broker: BrokerProcess, point: str, connect: Connect
) -> None:
    with crash_at(point), pytest.raises(SimulatedCrash):
        shop.order(b"left")
    shop.die()
    other = SQLiteShop(broker, shop.path, connect)
    assert other.order(b"next") is txmq.Outcome.COMMITTED  # starts the thread; waits for the earlier one of its key
    expected = [b"left", b"next"] if point == "client.tx.db_committed" else [b"next"]
    assert other.rows() == expected
    found = other.client.fetch("orders", 0, len(expected) - 1, timeout=RESOLVED_WITHIN_S)
    assert [message.value for message in found] == [b"next"]
    assert other.messages() == expected
    assert list(other.client.transactions.list(state="in-doubt")) == []
    other.die()


def test_a_broker_that_is_restarted_meanwhile_is_told_later(shop: SQLiteShop, broker: BrokerProcess) -> None:
    shop.order(b"1")
    # So long it tries to tell a broker that is gone; and so long a busy machine may take to come there.
    block = shop.producer.transaction(shop.resource, timeout=4.0)
    with at_moment("client.tx.db_committed", broker.kill), block as tx:
        tx.connection(shop.resource).execute("INSERT INTO orders (value) VALUES (x'32')")
        tx.send("orders", b"2", key=b"k")
    assert tx.outcome is txmq.Outcome.COMMITTED
    # What was written to a broker that is gone is found out by whoever reads the connection: perhaps the resolver.
    eventually(lambda: tx.pending == ("broker",), "the client knows that the broker was not told")
    broker.start()
    inside(shop.client, lambda client: resolver_of(client).wake())
    try:
        found = shop.client.fetch("orders", 0, 1, timeout=RESOLVED_WITHIN_S)
    except OffsetOutOfRangeError:
        found = []
    assert [message.value for message in found] == [b"2"]
    assert shop.messages() == shop.rows()


@pytest.mark.parametrize("point", ["client.tx.prepared", "client.tx.db_committed"])
def test_sql_of_show_asks_only_the_resources_own_table(shop: SQLiteShop, tmp_path: Path, point: str) -> None:
    """Two resources in one schema: the INSERT went to the other's table, and a committed message was given up."""
    shop.resource = LastResource("depot", connect=shop.connect, table="depot_marker")
    inside(shop.client, shop.resource.install)
    elsewhere = LastResource("depot", connect=lambda: sqlite3.connect(tmp_path / "else.db"), table="depot_marker")
    inside(shop.client, elsewhere.install)
    with crash_at(point), pytest.raises(SimulatedCrash):
        shop.order(b"left")
    for connection in shop.opened:
        connection.close()
    [row] = shop.client.transactions.list(state="in-doubt")
    select, insert = (line for line in tx_explain.sql(row) if not line.startswith("--"))
    with closing(sqlite3.connect(shop.path)) as database, closing(sqlite3.connect(tmp_path / "else.db")) as other:
        assert other.execute(insert).rowcount == 0
        if point == "client.tx.db_committed":
            assert database.execute(select).fetchall() == [("committed",)]
            with pytest.raises(sqlite3.IntegrityError):
                database.execute(insert)
        else:
            assert (database.execute(select).fetchall(), database.execute(insert).rowcount) == ([], 1)
            assert database.execute(select).fetchall() == [("rolled-back",)]
        assert database.execute("SELECT * FROM txmq_marker").fetchall() == []


def test_a_clean_end_of_the_client_leaves_no_markers(shop: SQLiteShop) -> None:
    for value in (b"1", b"2", b"3"):
        assert shop.order(value) is txmq.Outcome.COMMITTED
    shop.client.close()
    with closing(sqlite3.connect(shop.path)) as database:
        assert database.execute("SELECT * FROM txmq_marker").fetchall() == []
