"""Databases that are frozen (SIGSTOP): blocks end in time and say what is known, resolvers go on with other ones."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

import txmq
from tests.crash_points import at_moment, crash_at
from tests.services.loop_client import Connect, inside
from tests.services.sqlite_shop import SQLiteShop
from tests.services.xa.mysql_shop import MySQLShop
from txmq.client.transaction.background_resolver import resolver_of
from txmq.errors import OutcomeUnknownError, TransactionTimeoutError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa import LastResource, MySQLResource
from txmq.xa.last_resource import resource_resolver
from txmq.xa.two_phase import branch_resolver

TIMEOUT_S = 1.0
_numbers = itertools.count(1)
Freeze = Callable[[], None]


class Frozen:
    """A server that stands still from ``begin`` to the end of the block."""

    def __init__(self, server: MariaDB | PostgreSQL) -> None:
        self.begin, self.end = server.pause, server.resume


@contextmanager
def frozen(server: MariaDB | PostgreSQL) -> Iterator[Frozen]:
    """It goes on at the end, whatever comes."""
    found = Frozen(server)
    try:
        yield found
    finally:
        found.end()


def ended(work: Callable[[], object]) -> BaseException | None:
    """What the work raises; it must end."""
    found = list[BaseException | None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  compared by the caller
            found.append(error)
        else:
            found.append(None)

    threading.Thread(target=run, daemon=True).start()
    eventually(lambda: found, "the call has ended", within_s=30.0)
    return found[0]


@pytest.fixture
def shop(shared_broker: BrokerProcess, mariadb: MariaDB, connect: Connect) -> Iterator[MySQLShop]:
    with MySQLShop.installed(shared_broker, mariadb, connect) as shop:
        shop.order(b"1")
        yield shop


def check(shop: MySQLShop) -> None:
    """Rows are messages, nothing is in doubt, and the next block begins."""
    eventually(shop.is_resolved, "nothing is in doubt")
    shop.order(b"last")
    eventually(lambda: shop.messages() == shop.rows(), "rows are messages")


def order(shop: Any, resource: Any, then: Freeze = lambda: None) -> None:
    """Two rows, a message, and something between the rows."""
    with shop.producer.transaction(resource, timeout=TIMEOUT_S) as tx:
        cursor = tx.connection(resource).cursor()
        cursor.execute("INSERT INTO orders (value) VALUES ('2')")
        then()
        cursor.execute("UPDATE orders SET value = '2' WHERE value = '2'")
        shop.producer.send(shop.topic, b"2", key=b"k")


# --- last resource ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packets", [True, False])
def test_statement_that_is_not_answered_ends_block_in_time(shop: MySQLShop, packets: bool) -> None:
    shop.arguments = {"multi_statements": packets}
    shop.resource.close()
    with frozen(shop.server) as server:
        error = ended(lambda: order(shop, shop.resource, server.begin))
    assert isinstance(error, TransactionTimeoutError)
    assert shop.rows() == [b"1"]
    check(shop)


@pytest.mark.parametrize("is_new", [True, False])
def test_block_that_finds_frozen_database_does_not_begin(shop: MySQLShop, is_new: bool) -> None:
    if is_new:
        shop.resource.close()
    with frozen(shop.server) as server:
        server.begin()
        error = ended(lambda: order(shop, shop.resource))
    assert isinstance(error, TransactionTimeoutError)
    check(shop)


@pytest.mark.parametrize("packets", [True, False])
def test_commit_that_is_not_answered_is_unknown_and_settled_later(shop: MySQLShop, packets: bool) -> None:
    shop.arguments = {"multi_statements": packets}
    shop.resource.close()
    with frozen(shop.server) as server:
        with at_moment("client.tx.prepared", server.begin):
            error = ended(lambda: order(shop, shop.resource))
        assert isinstance(error, OutcomeUnknownError)
        assert error.txid is not None
        assert shop.client.outcome(error.txid) is txmq.Outcome.UNKNOWN
    eventually(lambda: shop.client.outcome(str(error.txid)) is not txmq.Outcome.UNKNOWN, "its outcome is known")
    check(shop)


@pytest.mark.threads
def test_lent_connection_of_other_driver_is_closed_in_time(shop: MySQLShop) -> None:
    arguments = shop.server.connect_arguments()
    arguments["database"] = shop.database
    del arguments["db"]
    lent = pymysql.connect(**arguments)
    with frozen(shop.server) as server:
        error = ended(lambda: order_on(shop, lent, server.begin))
    assert isinstance(error, TransactionTimeoutError)
    assert not lent.open
    check(shop)


def order_on(shop: MySQLShop, lent: Any, then: Freeze) -> None:
    """Over a caller's connection."""
    with shop.producer.transaction(shop.resource.using(lent), timeout=TIMEOUT_S) as tx:
        cursor = tx.connection(shop.resource).cursor()
        cursor.execute("INSERT INTO orders (value) VALUES ('2')")
        then()
        cursor.execute("INSERT INTO orders (value) VALUES ('3')")


@pytest.mark.threads
@pytest.mark.parametrize("point", ["client.tx.db_committed", "client.xa.decided"])
def test_resolver_goes_on_with_others_while_one_database_is_frozen(
    shop: MySQLShop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(resource_resolver, "PATIENCE_S", TIMEOUT_S)
    monkeypatch.setattr(branch_resolver, "PATIENCE_S", TIMEOUT_S)
    branch = MySQLResource("shop", connect=shop.connect)
    resolver_of(shop.client).add(branch)
    topic = f"{shop.topic}.others"  # decided messages of one topic wait for each other's rows
    shop.client.topics.create(topic)
    dead = MySQLShop(shop.broker, shop.server, shop.database)
    others = SQLiteShop(shop.broker, tmp_path / "orders.db")
    others.resource = LastResource("others", connect=others.connect)
    others.resource.install()
    with (
        others.client as owner,
        pytest.raises(SimulatedCrash),
        crash_at("client.tx.db_committed"),
        owner.producer().transaction(others.resource) as tx,
    ):
        tx.connection(others.resource).execute("CREATE TABLE made (id INTEGER)")
        tx.send(topic, b"seen")
    with frozen(shop.server) as server:
        with crash_at(point), pytest.raises(SimulatedCrash):
            order(dead, MySQLResource("shop", connect=dead.connect) if ".xa." in point else dead.resource)
        dead.die()
        server.begin()
        resolver_of(shop.client).add(LastResource("others", connect=others.connect))
        eventually(lambda: [*shop.client.browse(topic)], "the other database's message is seen")
        assert not shop.is_resolved()
    for connection in others.opened:
        connection.close()
    shop.order(b"after")
    eventually(shop.is_resolved, "nothing is in doubt")
    eventually(lambda: not shop.server.prepared(), "no branch is left")
    assert shop.rows() == [b"1", b"2", b"after"]
    branch.close()


# --- XA ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "outcome"),
    [
        ("client.xa.body_done", TransactionTimeoutError),
        ("client.xa.decided", type(None)),
        ("body", TransactionTimeoutError),
    ],
)
def test_xa_block_ends_in_time_and_says_what_is_known(
    shop: MySQLShop, moment: str, outcome: type[BaseException | None]
) -> None:
    branch = MySQLResource("shop", connect=shop.connect)
    inside(shop.client, lambda client: resolver_of(client).add(branch))
    with frozen(shop.server) as server, at_moment(moment, server.begin):
        error = ended(lambda: order(shop, branch, server.begin if moment == "body" else lambda: None))
        assert isinstance(error, outcome)
    eventually(lambda: not shop.server.prepared(), "no branch is left")
    check(shop)
    branch.close()


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


class PostgreSQLShop:
    """A database of orders."""

    def __init__(self, broker: BrokerProcess, server: PostgreSQL) -> None:
        self.server, self.topic = server, f"postgresql{next(_numbers)}"
        self.client = txmq.connect(broker.address)
        self.producer = self.client.producer()
        self.client.topics.create(self.topic)
        self.resource = LastResource("shop", connect=self.connect)
        with self.connect() as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
            connection.execute("CREATE TABLE orders (id SERIAL, value TEXT)")
        self.resource.install()
        order(self, self.resource)

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(self.server.conninfo())

    def rows(self) -> list[bytes]:
        with self.connect() as connection:
            return [value.encode() for (value,) in connection.execute("SELECT value FROM orders ORDER BY id")]

    def check(self) -> None:
        """Rows are messages, nothing is in doubt, and the next block begins."""
        order(self, self.resource)
        eventually(lambda: not list(self.client.transactions.list(state="in-doubt")), "nothing is in doubt")
        assert [message.value for message in self.client.browse(self.topic)] == self.rows()


@pytest.mark.parametrize(
    ("moment", "outcome"),
    [
        ("body", TransactionTimeoutError), ("client.tx.body_done", TransactionTimeoutError),
        ("client.tx.prepared", OutcomeUnknownError), ("before", TransactionTimeoutError),
    ],
)  # fmt: skip
def test_block_ends_in_time_on_frozen_postgresql(
    shared_broker: BrokerProcess, postgresql: PostgreSQL, moment: str, outcome: type[BaseException]
) -> None:
    shop = PostgreSQLShop(shared_broker, postgresql)
    with frozen(postgresql) as server, at_moment(moment, server.begin):
        if moment == "before":
            server.begin()
        error = ended(lambda: order(shop, shop.resource, server.begin if moment == "body" else lambda: None))
        assert isinstance(error, outcome)
    shop.check()
    shop.client.close()
    shop.resource.close()
