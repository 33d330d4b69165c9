"""kill -9 of a process that drains an outbox, at each step of a page: another one goes on; all arrives, once, in order.

A page costs the pump two packets where the database is MariaDB: what was placed is taken away, and the next rows are
locked and read; then they get numbers, and COMMIT. What is in the database at the death shows which step it was.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import txmq
from tests.services.transaction.dying_drainer import PAGE_SIZE
from tests.services.xa.mysql_database import MySQLDatabase
from txmq.runtime import crashpoints
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import start_logged
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource
from txmq.xa.last_resource.outbox import OutboxOptions

NAME, TOPIC, PARTITIONS, ITEMS = "shop", "orders", 3, 4
ROWS = 20  # two pages, and half a one
NOBODY = "txmq://127.0.0.1:1"  # a port that is given to no broker
DEAD_S_MAX = 60.0


class Left(NamedTuple):
    """What a death has left: rows that wait, those of them that have a number, and messages that readers see."""

    waiting: int
    numbered: int
    arrived: int


class Shop:
    """Pieces of several items are sold, a row of the item and a message with its key each; 20 messages wait."""

    def __init__(self, broker: BrokerProcess, connect: Callable[[], Any], place: dict[str, object], log: Path) -> None:
        self._broker, self._connect, self._place, self._log = broker, connect, place, log
        with closing(connect()) as connection:
            cursor = connection.cursor()
            cursor.execute("CREATE TABLE sold (item INTEGER PRIMARY KEY, pieces INTEGER)")
            cursor.execute("INSERT INTO sold VALUES " + ", ".join(f"({item}, 0)" for item in range(ITEMS)))
            connection.commit()
        self.client, resource = self._process(broker.address)
        self.client.topics.create(TOPIC, partitions=PARTITIONS)
        resource.install(self.client)
        client, resource = self._process(NOBODY)
        with client:
            for number in range(ROWS):
                _sell(client, resource, number % ITEMS)

    def _process(self, address: str) -> tuple[txmq.Client, LastResource]:
        """One that drains nothing before it is told to settle, or has sold something."""
        options = OutboxOptions("always", away_after_ms=20 if address == NOBODY else 500)
        client = txmq.connect(address, lazy=address == NOBODY)
        return client, LastResource(NAME, connect=self._connect, outbox=options)

    def drain_until_dead(self, how: str, point: str) -> Left:
        """Another process drains, alone, and is killed at a point."""
        given = {"address": self._broker.address, "resource": NAME, "how": how, **self._place}
        command = [sys.executable, "-m", "tests.services.transaction.dying_drainer", json.dumps(given)]
        child = start_logged(command, self._log, {**os.environ, crashpoints.VARIABLE: f"client.outbox.{point}"})
        try:
            assert child.wait(DEAD_S_MAX) == -signal.SIGKILL, self._log.read_text()
        finally:
            child.kill()
        return self.left()

    def left(self) -> Left:
        ((waiting, numbered),) = self.run(
            "SELECT COUNT(*), SUM(CASE WHEN number > 0 THEN 1 ELSE 0 END) FROM txmq_marker_outbox"
        )
        return Left(waiting, int(numbered or 0), sum(1 for _ in self.client.browse(TOPIC)))

    def end_turn(self) -> None:
        """As if it had been over long ago."""
        self.run("UPDATE txmq_marker_outbox_series SET until_ms = 0")

    def drain(self) -> None:
        """A process that lives goes on, and sells one piece more of each item."""
        client, resource = self._process(self._broker.address)
        with client:
            client.settle(resource)
            for item in range(ITEMS):
                _sell(client, resource, item)
            eventually(lambda: not self.left().waiting, lambda: f"the outbox is empty: {self.left()}")

    def check(self) -> None:
        """Rows are messages, each once, in order for each key; and numbers, of which none was given twice."""
        sold = {b"%d" % item: list(range(1, pieces + 1)) for item, pieces in self.run("SELECT item, pieces FROM sold")}
        assert sum(map(len, sold.values())) == ROWS + ITEMS
        found: dict[bytes, list[int]] = {key: [] for key in sold}
        for message in self.client.browse(TOPIC):
            found[message.key or b""].append(int(message.value or b""))
        assert found == sold
        assert self.run("SELECT number FROM txmq_marker_outbox_series") == [(ROWS + ITEMS,)]

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """One statement of its own."""
        with closing(self._connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            rows = list(cursor.fetchall()) if cursor.description is not None else []
            connection.commit()
            return rows


def _sell(client: txmq.Client, resource: LastResource, item: int) -> None:
    with client.producer().transaction(resource) as tx:
        cursor = tx.connection(resource).cursor()
        cursor.execute(f"UPDATE sold SET pieces = pieces + 1 WHERE item = {item}")
        cursor.execute(f"SELECT pieces FROM sold WHERE item = {item}")
        ((pieces,),) = cursor.fetchall()
        tx.send(TOPIC, str(pieces).encode(), key=b"%d" % item)


@pytest.fixture
def sqlite_shop(broker: BrokerProcess, tmp_path: Path) -> Iterator[Shop]:
    path = tmp_path / "shop.db"
    place: dict[str, object] = {"path": str(path)}
    made = Shop(
        broker, lambda: sqlite3.connect(path, timeout=30.0, check_same_thread=False), place, tmp_path / "drainer.log"
    )
    yield made
    made.client.close()


@pytest.fixture
def mysql_shop(broker: BrokerProcess, mariadb: MariaDB, tmp_path: Path) -> Iterator[Shop]:
    database = MySQLDatabase(mariadb)
    place: dict[str, object] = {"server": mariadb.connect_arguments() | {"db": database.database}}
    made = Shop(broker, database.connect, place, tmp_path / "drainer.log")
    yield made
    made.client.close()
    database.disconnect()


@pytest.fixture(params=["sqlite_shop", "mysql_shop"])
def shop(request: pytest.FixtureRequest) -> Shop:
    found: Shop = request.getfixturevalue(request.param)
    return found


# Behind each point: the rows that wait, those with a number, and the most that readers see.
OF_A_PUMP = {
    "chosen:1": Left(ROWS, 0, 0),
    "numbered:1": Left(ROWS, PAGE_SIZE, 0),
    "sent:1": Left(ROWS, PAGE_SIZE, PAGE_SIZE),
    "answered:1": Left(ROWS, PAGE_SIZE, PAGE_SIZE),
    "chosen:2": Left(ROWS, PAGE_SIZE, PAGE_SIZE),  # what was placed is taken away, and not committed
}
OF_ROUNDS = {  # all get their numbers at once, and leave at once
    "chosen:1": Left(ROWS, 0, 0),
    "numbered:1": Left(ROWS, ROWS, 0),
    "sent:1": Left(ROWS, ROWS, PAGE_SIZE),
    "answered:1": Left(ROWS, ROWS, ROWS),
}


@pytest.mark.parametrize("point", OF_A_PUMP)
def test_pump_that_is_killed_at_a_page_sends_nothing_twice(shop: Shop, point: str) -> None:
    _kill_and_go_on(shop, "pump", point, OF_A_PUMP[point])


@pytest.mark.parametrize("point", OF_ROUNDS)
def test_round_that_is_killed_at_a_page_sends_nothing_twice(mysql_shop: Shop, point: str) -> None:
    _kill_and_go_on(mysql_shop, "rounds", point, OF_ROUNDS[point])


def _kill_and_go_on(shop: Shop, how: str, point: str, expected: Left) -> None:
    left = shop.drain_until_dead(how, point)
    assert left[:2] == expected[:2]
    assert left.arrived <= expected.arrived
    assert left.arrived or not point.startswith("answered")
    shop.end_turn()
    shop.drain()
    shop.check()


def test_pump_that_is_killed_behind_a_deletion_loses_nothing(shop: Shop) -> None:
    left = shop.drain_until_dead("pump", "deleted:1")
    assert left.waiting < ROWS
    assert ROWS - left.waiting <= left.arrived <= 2 * PAGE_SIZE
    shop.end_turn()
    shop.drain()
    shop.check()


def test_turn_of_a_drainer_that_was_killed_ends_by_itself(shop: Shop) -> None:
    shop.drain_until_dead("pump", "chosen:1")
    assert shop.run("SELECT COUNT(*) FROM txmq_marker_outbox_series WHERE until_ms > 0") == [(1,)]
    shop.drain()
    shop.check()
