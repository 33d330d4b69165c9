"""``using(connection)`` on a real MariaDB: what a block costs, and wrapped connections, for both kinds of resource."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import MySQLdb
import MySQLdb.connections
import pytest
from sqlalchemy.pool import NullPool

import txmq
from tests.services.loop_client import Connect
from tests.unit.xa.last_resource.test_resource_lent_connections import Hiding, Passing, Tracing
from txmq.errors import ConfigError, TransactionStateError
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource, MySQLResource

from .mysql_orders import NAME, MySQLOrders


class Noting(MySQLdb.connections.Connection):  # type: ignore[misc]  # the driver has no types
    """Counts what it sends."""

    def __init__(self, **arguments: Any) -> None:
        self.sent: list[Any] = []
        super().__init__(**arguments)

    def query(self, query: Any) -> None:
        self.sent.append(query)
        super().query(query)

    def send_query(self, query: Any) -> None:
        self.sent.append(query)
        super().send_query(query)

    def commit(self) -> None:
        self.sent.append("COMMIT")
        super().commit()

    def rollback(self) -> None:
        self.sent.append("ROLLBACK")
        super().rollback()


class LentOrders(MySQLOrders):
    """A database that is used both ways."""

    def __init__(self, server: MariaDB, client: txmq.Client) -> None:
        super().__init__(server)
        self.client, self.producer = client, client.producer()
        self.last = LastResource("orders-db", connect=self.connect)

    def lend(self, **arguments: Any) -> Noting:
        """A connection of the caller's."""
        connection = Noting(**(self.server.connect_arguments() | {"db": self.database} | arguments))
        self.opened.append(connection)
        return connection

    def order(self, number: int, resource: Any, connection: Any) -> None:
        """A row, and its message."""
        with self.producer.transaction(resource.using(connection)) as tx:
            tx.connection(resource).cursor().execute("INSERT INTO orders VALUES (%s, 'x')", (number,))
            tx.send("orders", b"%d" % number)


@pytest.fixture
def orders(shared_broker: BrokerProcess, mariadb: MariaDB, connect: Connect) -> Iterator[LentOrders]:
    with connect(shared_broker.address) as client:
        client.topics.ensure("orders")
        made = LentOrders(mariadb, client)
        yield made
    for connection in made.opened:
        with suppress(MySQLdb.Error):  # closed before
            connection.close()


@pytest.mark.parametrize(("is_packed", "trips"), [(True, 4), (False, 7)])
def test_lent_connection_costs_one_look_more_than_an_own_one(orders: LentOrders, is_packed: bool, trips: int) -> None:
    connection, counts = orders.lend(multi_statements=is_packed), []
    for number in range(3):
        connection.sent.clear()
        orders.order(number, orders.last, connection)
        counts.append(len(connection.sent))
    assert (counts[0] > trips, counts[1:]) == (True, [trips, trips]), connection.sent


def test_an_xa_branch_on_a_lent_connection_is_verified_once(orders: LentOrders) -> None:
    connection, counts = orders.lend(), []
    for number in range(3):
        connection.sent.clear()
        orders.order(number, orders.resource, Tracing(connection))
        counts.append(len(connection.sent))
    assert counts[0] > counts[1] == counts[2] == 5, connection.sent


def test_remembered_connection_is_refused_in_autocommit_and_in_transaction(orders: LentOrders) -> None:
    connection = orders.lend()
    orders.order(1, orders.last, connection)
    connection.autocommit(True)
    with pytest.raises(TransactionStateError, match="autocommit"):
        orders.order(2, orders.last, connection)
    connection.autocommit(False)
    connection.cursor().execute("SELECT * FROM orders")
    with pytest.raises(TransactionStateError, match="already in"):
        orders.order(2, orders.last, connection)


@pytest.mark.parametrize("wrap", [Passing, Tracing, lambda c: NullPool(lambda: c).connect()], ids=["p", "t", "pool"])
def test_a_wrapped_connection_works_and_its_wrapper_sees_each_statement(orders: LentOrders, wrap: Any) -> None:
    connection = orders.lend()
    orders.order(1, orders.last, wrap(connection))
    assert orders.rows() == [1]
    assert not any(b"SAVEPOINT txmq_body; INSERT" in query for query in connection.sent if isinstance(query, bytes))


class Lying(Passing):
    """One that says that it is what it wraps, as wrapt's do."""

    @property  # type: ignore[misc]  # of an object it can be set
    def __class__(self) -> Any:
        return Noting


@pytest.mark.threads  # a branch without a client
@pytest.mark.parametrize("wrap", [Passing, Tracing, Lying])
def test_branch_on_a_wrapped_connection_starts_by_itself(orders: LentOrders, wrap: Any) -> None:
    connection = orders.lend()
    orders.resource = MySQLResource(NAME, connect=lambda: wrap(connection))
    for number in (1, 2):
        assert orders.prepared(number).commit()
    starts = [str(query) for query in connection.sent if "XA START" in str(query)]
    assert (len(starts), any("INSERT" in start for start in starts)) == (2, False)


def test_one_that_hides_its_driver_takes_dialect_and_no_branch(orders: LentOrders) -> None:
    with pytest.raises(ConfigError, match="give dialect="):
        orders.order(1, orders.last, Hiding(orders.lend()))
    named = LastResource("orders-db", connect=orders.connect, dialect="mysql")
    orders.order(1, named, Hiding(orders.lend()))
    assert orders.rows() == [1]
    busy = orders.lend()
    busy.cursor().execute("SELECT * FROM orders")
    with pytest.raises(TransactionStateError, match="already in"):
        orders.order(2, named, Hiding(busy))
    with pytest.raises(ConfigError, match="not of Hiding"):
        orders.order(2, orders.resource, Hiding(orders.lend()))
