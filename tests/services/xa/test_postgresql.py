"""A last resource on a real PostgreSQL; the server is killed."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest

import txmq
from tests.crash_points import at_moment, crash_at
from txmq import Outcome, RolledBackError
from txmq.errors import ConfigError, HeuristicHazardError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa import LastResource
from txmq.xa.database.marker_table import own_transaction
from txmq.xa.resolver_ports import cluster_of

PATIENT_S = 600.0
IDLE = "idle_in_transaction_session_timeout"
RESOLVING = ("lock_timeout", "transaction_isolation")


class Shop:
    """A database of orders."""

    def __init__(self, broker: BrokerProcess, server: PostgreSQL) -> None:
        self.broker, self.server = broker, server
        self.run("DROP SCHEMA public CASCADE")
        self.run("CREATE SCHEMA public")
        self.run("CREATE TABLE sold (pieces INTEGER)")
        self.run("INSERT INTO sold VALUES (0)")
        self.client = txmq.connect(broker.address, timeout=5.0)
        self.client.topics.create("orders")
        self.resource = LastResource("shop", connect=self.connect)
        self.resource.install(self.client)
        self.order()

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(self.server.conninfo())

    def run(self, statement: str) -> None:
        with psycopg.connect(self.server.conninfo(), autocommit=True) as connection:
            connection.execute(statement)

    def count(self, of: str) -> int:
        with self.connect() as connection:
            ((found,),) = connection.execute(f"SELECT {of}").fetchall()
        return int(found)

    def order(self) -> txmq.Transaction:
        """A row and a message, with the row's number."""
        with self.client.producer().transaction(self.resource, timeout=PATIENT_S) as tx:
            connection = tx.connection(self.resource)
            connection.execute("UPDATE sold SET pieces = pieces + 1")
            ((pieces,),) = connection.execute("SELECT pieces FROM sold").fetchall()
            tx.send("orders", str(pieces).encode(), key=b"k")
        assert tx.outcome is Outcome.COMMITTED
        return tx

    def values(self) -> list[int]:
        return [int(message.value or b"") for message in self.client.browse("orders")]

    def check(self) -> None:
        """Rows are messages, each once, in their order."""
        sold = self.count("pieces FROM sold")
        eventually(lambda: self.values() == list(range(1, sold + 1)), "every message is visible, once")
        eventually(lambda: not list(self.client.transactions.list(state="in-doubt")), "nothing is in doubt")


@pytest.fixture
def shop(broker: BrokerProcess, postgresql: PostgreSQL) -> Iterator[Shop]:
    made = Shop(broker, postgresql)
    yield made
    made.client.close()
    made.resource.close()


def crash(server: PostgreSQL) -> None:
    """All of it ends at once, and it is started again."""
    server.restart()


@pytest.mark.parametrize(("moment", "sold"), [("prepared", 1), ("db_committed", 2)])
def test_killed_server_leaves_rows_and_messages_or_neither(shop: Shop, moment: str, sold: int) -> None:
    with at_moment(f"client.tx.{moment}", lambda: crash(shop.server)):
        if sold == 2:
            shop.order()
        else:
            with pytest.raises(RolledBackError):
                shop.order()
    assert shop.count("pieces FROM sold") == sold
    shop.check()
    shop.order()


@pytest.mark.parametrize("statement", ["SET LOCAL synchronous_commit TO off", "SET synchronous_commit TO off"])
def test_body_cannot_make_commit_one_that_crash_takes_back(shop: Shop, statement: str) -> None:
    shop.run("ALTER SYSTEM SET wal_writer_delay = '10s'")  # else the server is soon through with it by itself
    shop.run("SELECT pg_reload_conf()")
    try:
        for sold in (2, 3):
            with (
                at_moment("client.tx.db_committed", lambda: crash(shop.server)),
                shop.client.producer().transaction(shop.resource, timeout=PATIENT_S) as tx,
            ):
                connection = tx.connection(shop.resource)
                connection.execute(statement)
                connection.execute("UPDATE sold SET pieces = pieces + 1")
                tx.send("orders", str(sold).encode(), key=b"k")
            assert shop.count("pieces FROM sold") == sold
    finally:
        shop.run("ALTER SYSTEM RESET wal_writer_delay")
    shop.check()


def test_weak_durability_that_was_accepted_stays(shop: Shop) -> None:
    shop.run("ALTER ROLE postgres SET synchronous_commit = off")
    try:
        resource = LastResource("shop", connect=shop.connect)
        with pytest.raises(ConfigError, match="synchronous_commit = off"):
            shop.client.producer().transaction(resource).begin()
        weak = LastResource("shop", connect=shop.connect, allow_weak_durability=True)
        with shop.client.producer().transaction(weak) as tx:
            tx.send("orders", b"1")
        assert tx.outcome is Outcome.COMMITTED
        weak.close()
    finally:
        shop.run("ALTER ROLE postgres RESET synchronous_commit")


class CountsByItself:
    """As psycopg2: it begins by its own account, and does not see that a statement has ended the transaction."""

    Error = psycopg.Error

    def __init__(self, conninfo: str) -> None:
        self._connection, self._has_begun = psycopg.connect(conninfo, autocommit=True), False

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def get_transaction_status(self) -> int:
        return int(self._connection.info.transaction_status)

    def cursor(self) -> psycopg.Cursor[Any]:
        if not self._has_begun:
            self._has_begun = True
            self._connection.execute("BEGIN")
        return self._connection.cursor()

    def commit(self) -> None:
        self._end("COMMIT")

    def rollback(self) -> None:
        self._end("ROLLBACK")

    def _end(self, statement: str) -> None:
        if self._has_begun:
            self._has_begun = False
            self._connection.execute(statement)

    def close(self) -> None:
        self._connection.close()


@pytest.mark.parametrize("fails", [True, False])
def test_driver_that_counts_by_itself_tells_hazard(shop: Shop, fails: bool) -> None:
    resource = LastResource("shop", connect=lambda: CountsByItself(shop.server.conninfo()))
    expected = ZeroDivisionError if fails else HeuristicHazardError
    with pytest.raises(expected), shop.client.producer().transaction(resource) as tx:
        cursor = tx.connection(resource).cursor()
        cursor.execute("UPDATE sold SET pieces = pieces + 1")
        tx.send("orders", b"2")
        cursor.execute("COMMIT")
        if fails:
            _ = 1 / 0
    assert (shop.count("pieces FROM sold"), shop.values(), tx.outcome) == (2, [1], Outcome.UNKNOWN)
    resource.close()


def settings_of(connection: psycopg.Connection) -> dict[str, str]:
    """What was set for the session: behind pgbouncer, for whichever client has it next."""
    found = connection.execute("SELECT name, setting FROM pg_settings WHERE source = 'session'").fetchall()
    connection.rollback()
    return {name: setting for name, setting in found if not name.startswith("transaction_")}


def test_nothing_that_is_set_outlives_its_transaction(shop: Shop) -> None:
    shop.run("ALTER ROLE postgres SET default_transaction_isolation = 'repeatable read'")
    try:
        connections = [shop.connect() for _ in range(3)]
        unused = iter(connections)
        resource = LastResource("shop", connect=lambda: next(unused))
        resource.install(shop.client)
        connections[0] = shop.connect()  # that one is closed
        with shop.client.producer().transaction(resource) as tx:
            tx.connection(resource).execute("SELECT 1")
        database = resource.open_for_resolver(cluster_of(shop.client))
        with own_transaction(database.connection, database.table.dialect):
            shown = [database.connection.execute(f"SHOW {name}").fetchone() for name in RESOLVING]
        assert shown == [("1s",), ("read committed",)]
        assert [settings_of(connection) for connection in connections] == [{}, {}, {}]
        database.close()
        resource.close()
        connections[0].close()
    finally:
        shop.run("ALTER ROLE postgres RESET default_transaction_isolation")
    shop.check()


def test_smaller_limit_of_role_for_idle_transactions_stays(shop: Shop) -> None:
    told = []
    try:
        for given in ("0", "5s", "1h"):
            shop.run(f"ALTER ROLE postgres SET {IDLE} = '{given}'")
            resource = LastResource("shop", connect=shop.connect)
            with shop.client.producer().transaction(resource, timeout=20.0) as tx:
                told.append(tx.connection(resource).execute(f"SHOW {IDLE}").fetchone())
            resource.close()
    finally:
        shop.run(f"ALTER ROLE postgres RESET {IDLE}")
    assert told == [("32s",), ("5s",), ("32s",)]


def test_first_query_of_a_body_takes_the_snapshot(shop: Shop) -> None:
    """A body that waits for a lock first, as for an advisory one, reads what was committed until then."""

    def connect() -> psycopg.Connection:
        connection = shop.connect()
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return connection

    resource = LastResource("shop", connect=connect)
    for pieces in (7, 8):
        with shop.client.producer().transaction(resource) as tx:
            connection = tx.connection(resource)
            shop.run(f"UPDATE sold SET pieces = {pieces}")
            assert connection.execute("SELECT pieces FROM sold").fetchall() == [(pieces,)]
    resource.close()


def test_standby_is_refused(shop: Shop) -> None:
    """It may lack what others have committed."""
    shop.server.kill()
    shop.server.start(is_standby=True)
    try:
        resource = LastResource("shop", connect=shop.connect)
        with pytest.raises(ConfigError, match=r"read-only|recovery"):
            shop.client.producer().transaction(resource).begin()
    finally:
        shop.server.restart()
    shop.order()
    shop.check()


def test_failed_statement_dooms_the_block(shop: Shop) -> None:
    tx = shop.client.producer().transaction(shop.resource).__enter__()
    with pytest.raises(psycopg.Error):
        tx.connection(shop.resource).execute("SELECT 1/0")
    with pytest.raises(RolledBackError, match="division by zero"):
        tx.__exit__(None, None, None)
    with shop.client.producer().transaction(shop.resource) as tx:
        connection = tx.connection(shop.resource)
        with pytest.raises(psycopg.Error), tx.savepoint(shop.resource):
            connection.execute("SELECT 1/0")
        connection.execute("UPDATE sold SET pieces = pieces + 1")
        tx.send("orders", b"2")
    shop.check()


def test_server_ends_owner_that_stands_still_behind_its_marker(shop: Shop) -> None:
    owner = txmq.connect(shop.broker.address)
    opened = list[psycopg.Connection]()

    def connect() -> psycopg.Connection:
        opened.append(shop.connect())
        return opened[-1]

    resource = LastResource("shop", connect=connect)
    with (
        crash_at("client.tx.prepared"),
        pytest.raises(SimulatedCrash),
        owner.producer().transaction(resource, timeout=2.0) as tx,
    ):
        tx.connection(resource).execute("UPDATE sold SET pieces = pieces + 1")
        tx.send("orders", b"never", key=b"k")
    owner.close()
    shop.order()
    assert shop.count("pieces FROM sold") == 2
    shop.check()
    for connection in opened:
        connection.close()


@pytest.mark.parametrize("raises", [True, False])
def test_rows_that_body_leaves_unread_hold_up_no_end(shop: Shop, raises: bool) -> None:
    ended = list[BaseException | None]()

    def sell() -> None:
        try:
            with shop.client.producer().transaction(shop.resource, timeout=PATIENT_S) as tx:
                cursor = tx.connection(shop.resource).cursor()
                cursor.execute("UPDATE sold SET pieces = pieces + 1")
                rows = cursor.stream("SELECT generate_series(1, 1000000)")
                assert next(rows) == (1,)
                if raises:
                    raise ZeroDivisionError
        except BaseException as error:  # noqa: BLE001  compared below
            ended.append(error)

    threading.Thread(target=sell, daemon=True).start()
    eventually(lambda: ended, "the block has ended")
    assert isinstance(ended[0], ZeroDivisionError if raises else RolledBackError)
    assert shop.count("pieces FROM sold") == 1
    shop.order()
    shop.check()


def test_error_among_rows_dooms_the_block(shop: Shop) -> None:
    with pytest.raises(RolledBackError, match="zero"), shop.client.producer().transaction(shop.resource) as tx:
        cursor = tx.connection(shop.resource).cursor()
        with suppress(psycopg.errors.DivisionByZero):
            list(cursor.stream("SELECT 1 / (3 - n) FROM generate_series(1, 5) AS n"))
    shop.order()
    shop.check()
