"""What a body changes on a connection, and what a block tells when its marker is kept out; on a real MariaDB."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

from collections.abc import Iterator

import pytest

import txmq
from tests.services.loop_client import Connect, inside
from tests.services.xa.mysql_shop import MySQLShop
from txmq.errors import RolledBackError, TransactionTimeoutError
from txmq.runtime.clocks import OSClock
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource

IN_PACKETS = [True, False]


@pytest.fixture(params=IN_PACKETS, ids=["packets", "single"])
def shop(
    shared_broker: BrokerProcess, mariadb: MariaDB, connect: Connect, request: pytest.FixtureRequest
) -> Iterator[MySQLShop]:
    with MySQLShop.installed(shared_broker, mariadb, connect) as shop:
        shop.arguments = {"multi_statements": request.param}
        yield shop


class SetBack(OSClock):
    """A machine's clock that somebody sets back."""

    set_back_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() - self.set_back_ms


def run(shop: MySQLShop, *statements: str) -> None:
    """A block whose body runs these, too."""
    with shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        for statement in statements:
            tx.connection(shop.resource).cursor().execute(statement)


@pytest.mark.parametrize(
    "statement", ["USE mysql", "SET SESSION TRANSACTION READ ONLY", "SET SESSION lock_wait_timeout = 7"]
)
def test_body_that_changes_its_session_spoils_no_other_block(shop: MySQLShop, statement: str) -> None:
    run(shop)
    ((timeout,),) = shop.execute("SELECT @@GLOBAL.lock_wait_timeout")
    run(shop, statement)
    for _ in range(2):
        with shop.producer.transaction(shop.resource) as tx:
            cursor = tx.connection(shop.resource).cursor()
            cursor.execute("SELECT DATABASE(), @@lock_wait_timeout")
            assert cursor.fetchone() == (shop.database, timeout)
            shop.insert(tx, b"x")
    assert shop.rows() == shop.messages() == [b"x"] * 4


def test_marker_of_another_database_is_not_called_late(shop: MySQLShop) -> None:
    run(shop)
    other = "0" * 32
    shop.execute("SET foreign_key_checks = 0")
    with pytest.raises(RolledBackError, match="another database answers") as caught:
        run(shop, "SET foreign_key_checks = 0", f"UPDATE txmq_marker_identity SET uuid = '{other}'")
    assert not isinstance(caught.value, TransactionTimeoutError)
    run(shop)
    assert shop.rows() == shop.messages() == [b"x"] * 2


def test_databases_clock_that_was_set_is_not_called_late(shop: MySQLShop) -> None:
    run(shop)
    with pytest.raises(RolledBackError, match="clock of 'shop' was set") as caught:
        run(shop, "SET timestamp = UNIX_TIMESTAMP() + 3600")
    assert caught.value.retriable
    assert not isinstance(caught.value, TransactionTimeoutError)
    run(shop)


def test_machines_clock_that_is_set_back_refuses_no_block(shop: MySQLShop) -> None:
    clock = SetBack()
    shop.resource = LastResource("shop", connect=shop.connect, clock=clock)
    inside(shop.client, shop.resource.install)
    run(shop)
    clock.set_back_ms = 120_000
    run(shop)
    assert shop.rows() == shop.messages() == [b"x"] * 2


def test_marker_that_waits_for_a_lock_in_vain_says_so(shop: MySQLShop) -> None:
    run(shop)
    columns, holder = "(txid, outcome, deadline_ms, written_ms, seen)", shop.connect()
    with pytest.raises(RolledBackError, match="1205") as caught, shop.producer.transaction(shop.resource) as tx:
        shop.insert(tx, b"x")
        tx.connection(shop.resource).cursor().execute("SET SESSION innodb_lock_wait_timeout = 1")
        holder.cursor().execute(f"INSERT INTO txmq_marker {columns} VALUES (%s, 'rolled-back', 0, 0, 0)", (tx.txid,))
    assert caught.value.retriable
    holder.rollback()
    assert txmq.Outcome.COMMITTED is shop.order(b"x")
