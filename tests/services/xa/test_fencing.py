"""A copy of a database on the same server: a resolver that is led there, with production's broker, proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg
import pytest

import txmq
from tests.crash_points import crash_at
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa import LastResource, MySQLResource
from txmq.xa.resolver import Resolver

COPY = "staging"
TABLES = ("sold", "txmq_marker_identity", "txmq_marker", "txmq_marker_token")


class Database:
    """A database of orders, and how it is copied."""

    def __init__(self, connect: Callable[[str | None], Any], copy: Callable[[], None]) -> None:
        self._connect, self.copy, self._opened = connect, copy, list[Any]()

    def connect(self, name: str | None) -> Any:
        """A connection, that of a process which dies, too, is closed in the end."""
        self._opened.append(self._connect(name))
        return self._opened[-1]

    def close(self) -> None:
        """Close what dead processes have left."""
        for connection in self._opened:
            with suppress(Exception):  # closed before
                connection.close()

    def resource(self, name: str | None = None) -> LastResource:
        """The resource; with a name, as somebody sees it whose configuration leads to that database."""
        return LastResource("shop", connect=lambda: self.connect(name))

    def xa_resource(self, name: str | None = None) -> MySQLResource:
        """The same as an XA resource."""
        return MySQLResource("shop", connect=lambda: self.connect(name))

    def token(self) -> str:
        """The newest one that is drawn in the original."""
        with closing(self.connect(None)) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("SELECT drawn FROM txmq_marker_token")
            rows = cursor.fetchall()
        return rows[0][0] if rows else ""


def _in_mariadb(server: MariaDB) -> Iterator[Database]:
    def copy() -> None:
        server.execute(f"CREATE DATABASE {COPY}")
        for table in TABLES:
            ((_, definition),) = server.execute(f"SHOW CREATE TABLE {table}")
            with closing(server.connect(db=COPY, autocommit=True)) as connection:
                connection.cursor().execute(definition)
            server.execute(f"INSERT INTO {COPY}.{table} SELECT * FROM {server.database}.{table}")

    server.execute("CREATE TABLE sold (id INTEGER PRIMARY KEY) ENGINE=InnoDB")
    with closing(Database(lambda name: server.connect(db=name or server.database), copy)) as made:
        yield made
    server.execute(f"DROP TABLE {', '.join(sorted(TABLES))}")
    server.execute(f"DROP DATABASE IF EXISTS {COPY}")


def _in_postgresql(server: PostgreSQL) -> Iterator[Database]:
    def run(*statements: str, database: str | None = None) -> None:
        with psycopg.connect(server.conninfo(database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    run("DROP SCHEMA public CASCADE", "CREATE SCHEMA public", "CREATE TABLE sold (id INTEGER PRIMARY KEY)")
    copy = f"CREATE DATABASE {COPY} TEMPLATE {server.database}"
    with closing(
        Database(lambda name: psycopg.connect(server.conninfo(name)), lambda: run(copy, database="postgres"))
    ) as made:
        yield made
    run(f"DROP DATABASE IF EXISTS {COPY}", database="postgres")


@pytest.fixture
def on_mariadb(mariadb: MariaDB) -> Iterator[Database]:
    yield from _in_mariadb(mariadb)


@pytest.fixture(params=["mariadb", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    server = request.getfixturevalue(request.param)
    yield from _in_mariadb(server) if isinstance(server, MariaDB) else _in_postgresql(server)


def _order(client: txmq.Client, resource: LastResource | MySQLResource, number: int) -> str:
    with client.producer().transaction(resource) as tx:
        tx.connection(resource).cursor().execute(f"INSERT INTO sold VALUES ({number})")
        tx.send("orders", b"%d" % number)
    return tx.txid or ""


def _left_after_a_copy(
    broker: BrokerProcess, database: Database, make: Callable[[], LastResource | MySQLResource], point: str
) -> None:
    """Three orders, of which the copy has the first one, and the owner of the last one dies at a point."""
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        resource = make()
        resource.install(client)
        _order(client, resource, 1)
        eventually(database.token, "a token is drawn")
        resource.close()
    database.copy()
    copied = database.token()
    with txmq.connect(broker.address) as client:
        resource = make()
        _order(client, resource, 2)
        eventually(lambda: database.token() != copied, "a token is drawn after the copy was made")
        with crash_at(point), pytest.raises(SimulatedCrash):
            _order(client, resource, 3)
        resource.close()


def _orders(client: txmq.Client) -> list[bytes | None]:
    return [message.value for message in client.browse("orders")]


def test_copy_on_the_same_server_rolls_nothing_back(broker: BrokerProcess, database: Database) -> None:
    """Somebody's staging, made of production's database, with production's broker in its settings."""
    _left_after_a_copy(broker, database, database.resource, "client.tx.db_committed")
    with txmq.connect(broker.address) as client:
        (left,) = [row["txid"] for row in client.transactions.list(state="in-doubt")]
        resolver = Resolver(client, [database.resource(COPY)])
        eventually(lambda: resolver.run_once() or _refusals(resolver), "the copy is asked")
        resolver.close()
        assert client.outcome(left) is not txmq.Outcome.ROLLED_BACK
        resolver = Resolver(client, [database.resource()])
        eventually(lambda: resolver.run_once() or client.outcome(left) is txmq.Outcome.COMMITTED, "the original is")
        resolver.close()
        assert _orders(client) == [b"1", b"2", b"3"]


def test_xa_branch_that_a_copy_lacks_is_not_called_lost(broker: BrokerProcess, on_mariadb: Database) -> None:
    """XA RECOVER is the server's, and lists nothing of what is committed; the marker stands in the other schema."""
    database = on_mariadb
    _left_after_a_copy(broker, database, database.xa_resource, "client.xa.all_committed")
    with txmq.connect(broker.address) as client:
        (left,) = [row["txid"] for row in client.transactions.list(state="in-doubt")]
        _resolve_in_a_copy(client, database)
        assert client.transactions.list(state="heuristic") == []
        assert [row["txid"] for row in client.transactions.list(state="in-doubt")] == [left]
        resolver = Resolver(client, [database.xa_resource()])
        eventually(lambda: resolver.run_once() and not client.transactions.list(state="in-doubt"), "the original is")
        resolver.close()
        assert (client.transactions.list(state="heuristic"), _orders(client)) == ([], [b"1", b"2", b"3"])
        database.xa_resource(COPY).install(client, adopt=True)
        assert _are_refused(client, database.xa_resource(COPY)) is False
        assert _are_refused(client, database.xa_resource()) is True


def _resolve_in_a_copy(client: txmq.Client, database: Database) -> None:
    resolver = Resolver(client, [database.xa_resource(COPY)])
    eventually(lambda: resolver.run_once() or _refusals(resolver), "the copy is asked")
    resolver.close()


def _are_refused(client: txmq.Client, resource: MySQLResource) -> bool:
    resolver = Resolver(client, [resource])
    resolver.run_once()
    found = bool(_refusals(resolver))
    resolver.close()
    return found


def _refusals(resolver: Resolver) -> list[str]:
    return [str(error) for _, error in resolver.problems() if "txmq resolver adopt" in str(error)]
