"""``txmq.aio.Outbox`` and its relay: each asynchronous driver, in transactions, out of them, and cancelled."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvloop

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from txmq.errors import ClosedError, ConfigError, OutboxFullError, TransactionStateError
from txmq.outbox.page import OutboxRow
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

from .async_databases import DRIVERS, Database, database

RELAYED = ("asyncpg", "psycopg", "sqlite", "aiomysql", "asyncmy")
DRAIN_S = 60.0


class Shop:
    """A database with an outbox, written to through one asynchronous driver."""

    def __init__(self, of_driver: Database) -> None:
        self.database, self.outbox = of_driver, txmq.aio.Outbox("orders-db")

    async def installed(self) -> Any:
        """A connection, after ``install``."""
        connection = await self.database.open()
        await self.outbox.install(connection)
        return connection

    async def order(self, connection: Any, number: int) -> None:
        """A row, in the transaction that is open."""
        await self.database.execute(connection, f"INSERT INTO orders VALUES ({number})")

    def seen(self) -> list[OutboxRow]:
        """The messages that wait, as another connection sees them."""
        connection = self.database.look()
        try:
            return list(self.outbox.inner.tables(connection).waiting(connection, 100, 1 << 20).rows)
        finally:
            connection.close()

    def orders(self) -> list[int]:
        """The committed rows of orders."""
        connection = self.database.look()
        try:
            return [number for (number,) in run(connection, "SELECT id FROM orders ORDER BY id")[0]]
        finally:
            connection.close()


@pytest.fixture(params=list(DRIVERS))
def shop(request: pytest.FixtureRequest, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Shop:
    return Shop(database(request.param, tmp_path, mariadb, postgresql))


def serve(shop: Shop, scenario: Callable[[Any], Awaitable[None]], on_loop: Callable[..., Any] = asyncio.run) -> None:
    """Run a scenario with a connection; nothing of it is left on its loop."""

    async def main() -> None:
        try:
            await scenario(await shop.installed())
        finally:
            await shop.database.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    on_loop(main())


def test_message_exists_with_the_commit_of_its_row(shop: Shop) -> None:
    async def scenario(connection: Any) -> None:
        for number, word in enumerate(("commit", "rollback", "commit")):
            begun = await shop.database.begin(connection)
            await shop.order(connection, number)
            headers = {"trace": b"\x80"}
            await shop.outbox.send(connection, "orders", b"\x00\xff%%s%d" % number, b"k\xfe'", headers=headers)
            await shop.database.end(begun, word)

    serve(shop, scenario)
    rows = shop.seen()
    assert [(row.topic, row.key, row.value, row.headers) for row in rows] == [
        ("orders", b"k\xfe'", b"\x00\xff%%s%d" % number, (("trace", b"\x80"),)) for number in (0, 2)
    ]
    assert shop.orders() == [0, 2]
    assert {row.unit for row in rows} == {None}


def test_transaction_commits_rows_and_messages_as_one_unit(shop: Shop) -> None:
    async def scenario(connection: Any) -> None:
        async with shop.outbox.transaction(connection) as tx:
            await shop.order(connection, 1)
            tx.send("orders", b"one")
            tx.send("mails", b"two", b"key")
        with pytest.raises(ZeroDivisionError):
            await fail(connection)

    async def fail(connection: Any) -> None:
        async with shop.outbox.transaction(connection) as tx:
            await shop.order(connection, 2)
            tx.send("orders", b"never")
            raise ZeroDivisionError

    serve(shop, scenario)
    rows = shop.seen()
    assert [row.value for row in rows] == [b"one", b"two"]
    assert len({row.unit for row in rows} - {None}) == 1
    assert shop.orders() == [1]


def test_savepoint_of_the_driver_nests_in_a_transaction(
    tmp_path: Path, postgresql: PostgreSQL, mariadb: MariaDB
) -> None:
    for kind in ("asyncpg", "psycopg-autocommit"):
        shop = Shop(database(kind, tmp_path, mariadb, postgresql))

        async def fail_in_part(connection: Any, shop: Shop = shop) -> None:
            async with connection.transaction():
                await shop.order(connection, 2)
                await shop.outbox.send(connection, "orders", b"undone")
                raise LookupError

        async def scenario(connection: Any, shop: Shop = shop, fail: Any = fail_in_part) -> None:
            async with shop.outbox.transaction(connection) as tx:
                await shop.order(connection, 1)
                tx.send("orders", b"kept")
                with pytest.raises(LookupError):
                    await fail(connection)

        serve(shop, scenario)
        assert ([row.value for row in shop.seen()], shop.orders()) == ([b"kept"], [1])


def test_message_that_would_be_committed_alone_is_refused(shop: Shop) -> None:
    async def scenario(connection: Any) -> None:
        if shop.database.would_autocommit:
            with pytest.raises(TransactionStateError, match="no transaction is open on this connection"):
                await shop.outbox.send(connection, "orders", b"alone")
        else:
            await shop.outbox.send(connection, "orders", b"in the transaction that the driver begins")
            await connection.rollback()

    serve(shop, scenario)
    assert shop.seen() == []


def test_transaction_within_another_one_is_refused(shop: Shop) -> None:
    async def scenario(connection: Any) -> None:
        async with shop.database.transaction(connection):
            await shop.order(connection, 1)
            with pytest.raises(TransactionStateError, match="already"):
                await shop.outbox.transaction(connection).__aenter__()

    serve(shop, scenario)
    assert shop.orders() == [1]


def test_several_messages_are_one_unit_in_order(shop: Shop) -> None:
    messages = [("a", b"%d" % number, b"k") for number in range(450)]

    async def scenario(connection: Any) -> None:
        async with shop.database.transaction(connection):
            await shop.outbox.send_many(connection, messages)

    serve(shop, scenario)
    connection = shop.database.look()
    rows = shop.outbox.inner.tables(connection).waiting(connection, 1000, 1 << 20).rows
    connection.close()
    assert [row.value for row in rows] == [value for _, value, _ in messages]
    assert len({row.unit for row in rows} - {None}) == 1


def test_tasks_with_connections_of_their_own_write_side_by_side(shop: Shop) -> None:
    async def serve_one(number: int) -> None:
        connection = await shop.database.open()
        for part in range(3):
            async with shop.outbox.transaction(connection) as tx:
                await shop.order(connection, number)
                tx.send("orders", b"%d %d" % (number, part))

    async def scenario(_: Any) -> None:
        await asyncio.gather(*map(serve_one, range(6)))

    serve(shop, scenario)
    assert {row.value for row in shop.seen()} == {b"%d %d" % (number, part) for number in range(6) for part in range(3)}
    assert shop.orders() == sorted(number for number in range(6) for _ in range(3))


def test_full_outbox_refuses_more_and_undoes_the_row(shop: Shop) -> None:
    outbox = txmq.aio.Outbox("orders-db", rows_max=2)

    async def scenario(connection: Any) -> None:
        async with shop.database.transaction(connection):
            await outbox.send_many(connection, [("a", b"1"), ("a", b"2"), ("a", b"3")])
        outbox.inner._looked = float("-inf")
        with pytest.raises(OutboxFullError, match="more than 2 messages wait"):
            await order(connection)

    async def order(connection: Any) -> None:
        async with outbox.transaction(connection) as tx:
            await shop.order(connection, 1)
            tx.send("a", b"4")

    serve(shop, scenario)
    assert (len(shop.seen()), shop.orders()) == (3, [])


# --- cancelled --------------------------------------------------------------------------------------------------------


def test_send_cancelled_anywhere_leaves_the_transaction_to_its_owner(shop: Shop) -> None:
    async def scenario(_: Any) -> None:
        for number in count(1):
            connection = await shop.database.open()
            try:
                await cancelled_in_transaction(connection, number)
            except asyncio.CancelledError:
                assert shop.seen() == []
                assert shop.orders() == []
                continue
            assert number > 1
            break

    async def cancelled_in_transaction(connection: Any, number: int) -> None:
        begun = await shop.database.begin(connection)
        try:
            await shop.order(connection, number)
            await cancelled_at(shop.outbox.send(connection, "orders", b"%d" % number), number)
        except asyncio.CancelledError:
            closes = shop.database.kind.startswith(("aiomysql", "asyncmy"))  # these do, in the middle of an answer
            with suppress(*[Exception] if closes else []):
                await shop.database.end(begun, "rollback")
            raise
        await shop.database.end(begun, "commit")

    serve(shop, scenario)
    assert len(shop.seen()) == len(shop.orders()) == 1


def test_transaction_cancelled_anywhere_has_messages_exactly_with_its_rows(shop: Shop) -> None:
    async def order(connection: Any, number: int) -> None:
        async with shop.outbox.transaction(connection) as tx:
            await shop.order(connection, number)
            tx.send("orders", b"%d" % number)

    async def scenario(_: Any) -> None:
        for number in count(1):
            connection = await shop.database.open()
            try:
                await cancelled_at(order(connection, number), number)
            except asyncio.CancelledError:
                continue
            assert number > 2
            break

    serve(shop, scenario)
    # A COMMIT that was cancelled on its way may still be executed.
    eventually(lambda: [int(row.value) for row in shop.seen()] == shop.orders() != [], "each row has its message")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_connection_of_another_kind_is_refused_by_name(shop: Shop) -> None:
    async def scenario(connection: Any) -> None:
        other = shop.database.look()
        with pytest.raises(ConfigError, match=r"not a connection of an asynchronous driver that is known: asyncpg, "):
            await shop.outbox.send(other, "orders", b"blocks the loop")
        other.close()
        with pytest.raises(ConfigError, match=r"is an asynchronous driver: use txmq\.aio\.Outbox, and await"):
            txmq.Outbox("orders-db").send(connection, "orders", b"awaited by nobody")

    serve(shop, scenario)


def test_error_of_the_driver_goes_on_unchanged(shop: Shop) -> None:
    async def scenario(connection: Any) -> None:
        elsewhere = txmq.aio.Outbox("orders-db", table="absent")
        elsewhere.inner._looked = float("inf")
        with pytest.raises(Exception, match="absent") as caught:
            await order(elsewhere, connection)
        root = type(connection).__module__.partition(".")[0]
        expected = {"aiosqlite": "sqlite3", "aiomysql": "pymysql"}.get(root, root)
        assert type(caught.value).__module__.partition(".")[0] == expected

    async def order(elsewhere: txmq.aio.Outbox, connection: Any) -> None:
        async with shop.database.transaction(connection):
            await elsewhere.send(connection, "orders", b"never")

    serve(shop, scenario)


def test_outbox_serves_one_loop_after_another(tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> None:
    shop = Shop(database("sqlite", tmp_path, mariadb, postgresql))

    async def scenario(connection: Any) -> None:
        async with shop.outbox.transaction(connection) as tx:
            tx.send("orders", b"once a loop")

    for on_loop in (asyncio.run, uvloop.run, asyncio.run):
        serve(shop, scenario, on_loop)
        shop.database.opened.clear()
    assert len(shop.seen()) == 3


# --- the relay --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=RELAYED)
def relayed(request: pytest.FixtureRequest, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Shop:
    return Shop(database(request.param, tmp_path, mariadb, postgresql))


async def messages(client: txmq.aio.Client, topic: str) -> list[bytes | None]:
    """What readers see."""
    return [message.value async for message in client.browse(topic)]


def test_messages_arrive_by_a_relay_on_the_loop(relayed: Shop, shared_broker: BrokerProcess) -> None:
    topic = f"loop-{relayed.database.kind}"

    async def scenario(connection: Any) -> None:
        async with await txmq.aio.connect(shared_broker.address) as client:
            await client.topics.create(topic)
            async with client.relay(relayed.outbox, connect=relayed.database.connect) as relay:
                for number in range(20):
                    async with relayed.outbox.transaction(connection) as tx:
                        tx.send(topic, b"%d" % number, b"k")
                await relay.drain(DRAIN_S)
                assert (relay.sent, relay.stopped) == (20, None)
            assert await messages(client, topic) == [b"%d" % number for number in range(20)]
            with pytest.raises(ClosedError):
                await relay.drain(DRAIN_S)

    serve(relayed, scenario)
    assert relayed.seen() == []


def test_relay_on_the_loop_uses_other_drivers_in_a_thread(relayed: Shop, shared_broker: BrokerProcess) -> None:
    topic = f"thread-{relayed.database.kind}"

    async def scenario(connection: Any) -> None:
        client = await txmq.aio.connect(shared_broker.address)
        await client.topics.create(topic)
        relay = client.relay(relayed.outbox, connect=relayed.database.look)
        async with relayed.outbox.transaction(connection) as tx:
            tx.send(topic, b"message")
        await relay.drain(DRAIN_S)
        assert await messages(client, topic) == [b"message"]
        await client.close()
        with pytest.raises(ClosedError):
            await relay.drain(DRAIN_S)

    serve(relayed, scenario)
    assert relayed.seen() == []


def test_relay_goes_on_after_its_connection_is_lost(relayed: Shop, shared_broker: BrokerProcess) -> None:
    topic, opened = f"lost-{relayed.database.kind}", list[Any]()

    async def connect() -> Any:
        opened.append(await relayed.database.connect())
        return opened[-1]

    async def scenario(connection: Any) -> None:
        async with await txmq.aio.connect(shared_broker.address) as client:
            await client.topics.create(topic)
            async with client.relay(relayed.outbox, connect=connect) as relay:
                for number in range(3):
                    async with relayed.outbox.transaction(connection) as tx:
                        tx.send(topic, b"%d" % number)
                    await relay.drain(DRAIN_S)
                    await close(opened[-1])
            assert sorted(await messages(client, topic), key=str) == [b"0", b"1", b"2"]

    async def close(connection: Any) -> None:
        if relayed.database.kind == "psycopg":  # whose close() under a statement of another task may crash libpq
            with socket.socket(fileno=os.dup(connection.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)
            return
        found = connection.close()
        if found is not None:
            await found

    serve(relayed, scenario)
    assert len(opened) >= 3


def test_relay_is_refused_what_is_none(shared_broker: BrokerProcess) -> None:
    async def main() -> None:
        async with await txmq.aio.connect(shared_broker.address) as client:
            outbox: Any = txmq.aio.Outbox("x")
            with pytest.raises(ConfigError, match="a function that opens a connection"):
                client.relay(outbox, connect="shop.db")  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"expected txmq\.Outbox"):
                client.relay("orders-db", connect=sqlite3.connect)  # type: ignore[arg-type]

    asyncio.run(main())
