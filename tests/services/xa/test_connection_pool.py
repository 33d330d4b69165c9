"""The idle connections of a last resource on a real MariaDB: one pool a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.unit.xa.support import quiet_resolver
from tools.simulated.broker import SimulatedBroker
from txmq.client.transaction.block import Transaction
from txmq.testing.eventually import eventually
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource
from txmq.xa.database import resource

from .mysql_orders import MySQLOrders


class PooledOrders(MySQLOrders):
    """A database of its own, and a home broker in memory for each thread."""

    def __init__(self, server: MariaDB) -> None:
        super().__init__(server)
        self.last = LastResource("orders-db", connect=self.connect)

    def order(self, number: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """A row, and its message."""
        home = SimulatedBroker(home=number)
        with Transaction(home, home, (self.last,), 30.0) as tx:
            tx.connection(self.last).cursor().execute("INSERT INTO orders VALUES (%s, 'x')", (number,))
            meanwhile()
            tx.send("orders", b"%d" % number)

    def sessions(self) -> list[Any]:
        """Connections that the server has, but for the one that asks."""
        asked = f"FROM information_schema.processlist WHERE db = '{self.database}' AND id <> CONNECTION_ID()"
        return self.execute(f"SELECT id {asked} ORDER BY id")


@pytest.fixture
def orders(mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch) -> Iterator[PooledOrders]:
    quiet_resolver(monkeypatch)
    made = PooledOrders(mariadb)
    yield made
    made.last.close()


def test_connections_of_ended_threads_are_used_by_later_ones(orders: PooledOrders) -> None:
    """Each left its own for ever, inside BEGIN and SAVEPOINT."""
    eventually(lambda: orders.sessions() == [], "the sessions of the install have ended")  # the install's
    together = threading.Barrier(6)
    threads = [threading.Thread(target=orders.order, args=(number, together.wait)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = list[Any]()

    def are_only_the_threads_own() -> bool:  # the server may still be ending that of the question before
        left[:] = orders.sessions()
        return len(left) == 6

    eventually(are_only_the_threads_own, "only the threads' own sessions are left")
    for number in range(7, 13):
        orders.order(number)
    assert len(orders.rows()) == 12
    eventually(lambda: orders.sessions() == left, lambda: f"{left} are all, now {orders.sessions()}")


def test_idle_connections_are_bounded_and_closed_from_any_thread(
    orders: PooledOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "IDLE_MAX", 3)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(orders.order, range(1, 65)))
    assert len(orders.rows()) == 64
    eventually(lambda: len(orders.sessions()) <= 3, "no more sessions than may be idle")
    assert 1 <= len(orders.last._pool) <= 3
    other = threading.Thread(target=orders.last.close)
    other.start()
    other.join()
    eventually(lambda: orders.sessions() == [], "all sessions have ended")
