"""``await message.ack(connection)`` with asynchronous drivers and sessions: rebalances, rollbacks, cancelled tasks."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

import txmq
import txmq.aio
from tests.cancelled import cancelled_at
from tests.services.outbox.async_databases import DRIVERS, SQLite, database
from tests.services.sqlalchemy.databases import mariadb_url, postgresql_url
from txmq.errors import FencedError, TransactionStateError
from txmq.sqlalchemy import DatabaseOffsetStore
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

TOPIC, GROUP, PARTITIONS, MESSAGES = "orders", "billing", 2, 40
OPTIONS = txmq.ConsumerOptions(heartbeat_interval=0.05, offset_save_interval=0.1, retry_delay=0.01, session_timeout=60)
SCENARIO_S = 60.0
PAGE = (Path(__file__).resolve().parents[3] / "docs/how-to/consume.md").read_text("utf-8")
BILL = PAGE[PAGE.index("async def bill(") : PAGE.index("async def serve(")]
SESSIONS = {"session-asyncpg": "psycopg", "session-aiosqlite": "sqlite", "session-asyncmy": "aiomysql"}
KINDS = ("asyncpg", "asyncpg-pool", "psycopg", "sqlite", "aiomysql", "asyncmy", *SESSIONS)


class Shop:
    """Rows and offsets in one database, written through one driver."""

    def __init__(self, kind: str, folder: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> None:
        self.kind, self.of_driver = kind, database(SESSIONS.get(kind, kind), folder, mariadb, postgresql)
        self.connect = self.of_driver.look
        if isinstance(self.of_driver, SQLite):
            self.connect = lambda: sqlite3.connect(folder / "shop.db", timeout=0.5)
        self._urls = {
            "session-asyncpg": lambda: postgresql_url(postgresql, "asyncpg"),
            "session-aiosqlite": lambda: f"sqlite+aiosqlite:///{folder / 'shop.db'}",
            "session-asyncmy": lambda: mariadb_url(mariadb, "asyncmy"),
        }
        self._engine: AsyncEngine | None = None
        self.store: txmq.DatabaseOffsetStore
        if kind in SESSIONS:
            self.store = DatabaseOffsetStore(MetaData(), self.connect)
        else:
            self.store = txmq.DatabaseOffsetStore(self.connect)
        connection = self.of_driver.look()
        run(connection, "DROP TABLE IF EXISTS txmq_offset")
        connection.commit()
        connection.close()
        self.store.install()

    async def open(self) -> Any:
        """A connection, or a session."""
        if self.kind not in SESSIONS:
            return await self.of_driver.open()
        self._engine = self._engine or create_async_engine(self._urls[self.kind]())
        self.of_driver.opened.append(AsyncSession(self._engine))
        return self.of_driver.opened[-1]

    async def handle(
        self, given: Any, message: txmq.aio.Message, *, commits: bool = True, cancelled: int = 0
    ) -> None:  # fmt: skip
        """A row and the offset. Whatever ``ack`` says, the transaction is to end as it is told.

        Args:
            cancelled: at which of its awaits ``ack`` is; 0 at none.
        """
        begun = given if self.kind in SESSIONS else await self.of_driver.begin(given)
        await self._insert(given, message)
        try:
            await cancelled_at(message.consumer.ack(message, given), cancelled)
        except BaseException:
            with suppress(Exception):  # what comes later must not be committed either
                await self._insert(given, message)
            with suppress(Exception):
                await self._end(begun, "commit")
            raise
        await self._end(begun, "commit" if commits else "rollback")

    async def _insert(self, given: Any, message: txmq.aio.Message) -> None:
        statement = f"INSERT INTO orders VALUES ({int(message.value or b'')})"
        await (given.execute(text(statement)) if self.kind in SESSIONS else self.of_driver.execute(given, statement))

    async def _end(self, begun: Any, word: str) -> None:
        await (getattr(begun, word)() if self.kind in SESSIONS else self.of_driver.end(begun, word))

    def orders(self) -> list[int]:
        """All rows, as another connection sees them."""
        connection = self.of_driver.look()
        try:
            return [number for (number,) in run(connection, "SELECT id FROM orders ORDER BY id")[0]]
        finally:
            connection.close()

    async def close(self) -> None:
        """Close what is open; a refused acknowledgement has closed some."""
        for connection in self.of_driver.opened:
            if self.kind in SESSIONS:
                await connection.close()
        if self._engine is not None:
            self.of_driver.opened.clear()
            await self._engine.dispose()
        await self.of_driver.close()


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Shop:
    return Shop(request.param, tmp_path, mariadb, postgresql)


def serve(broker: BrokerProcess, shop: Shop, scenario: Callable[[txmq.aio.Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with await txmq.aio.connect(broker.address) as client, asyncio.timeout(SCENARIO_S):
            await client.topics.create(TOPIC, partitions=PARTITIONS)
            try:
                await scenario(client)
            finally:
                await client.topics.delete(TOPIC)
                await shop.close()

    asyncio.run(main())


def test_each_row_is_there_once_through_rebalances_and_rollbacks(shared_broker: BrokerProcess, shop: Shop) -> None:
    drawn = random.Random(11)

    async def scenario(client: txmq.aio.Client) -> None:
        consumers: list[tuple[txmq.aio.Consumer, list[Any]]] = []

        async def work() -> None:
            for consumer, connections in consumers:
                for message in await consumer.poll(timeout=0.02):
                    commits = drawn.random() > 0.1
                    try:
                        await shop.handle(connections[-1], message, commits=commits)
                    except (FencedError, TransactionStateError) as error:
                        await message.reject(str(error))
                        connections.append(await shop.open())
                        continue
                    if not commits:
                        await message.reject("rolled back")

        for change in range(4):
            if len(consumers) == 2:
                await consumers.pop(drawn.randrange(2))[0].close()
            made = await client.consumer(GROUP, [TOPIC], offset_store=shop.store, options=OPTIONS)
            consumers.append((made, [await shop.open()]))
            values = [b"%d" % number for number in range(change * MESSAGES // 4, (change + 1) * MESSAGES // 4)]
            await client.producer().send_many(TOPIC, [(value, value) for value in values])
            await work()
        while len(shop.orders()) < MESSAGES:
            await work()
        for consumer, _ in consumers:
            await consumer.close()

    serve(shared_broker, shop, scenario)
    assert shop.orders() == list(range(MESSAGES))


def test_refused_or_cancelled_transaction_cannot_commit(shared_broker: BrokerProcess, shop: Shop) -> None:
    async def scenario(client: txmq.aio.Client) -> None:
        await client.producer().send_many(TOPIC, [(b"k", b"1"), (b"k", b"2")])
        async with await client.consumer(GROUP, [TOPIC], offset_store=shop.store, options=OPTIONS) as consumer:
            (message,) = await consumer.poll(1, timeout=SCENARIO_S)
            for number in count(1):
                try:
                    await shop.handle(await shop.open(), message, cancelled=number)
                except asyncio.CancelledError:
                    assert shop.orders() == []
                else:
                    break
            assert number > 1
            assert shop.orders() == [1]
            (message,) = await consumer.poll(1, timeout=SCENARIO_S)
            shop.store.load(GROUP, (TOPIC, message.partition), 1 << 40)  # as the next owner, while this one was away
            with pytest.raises(FencedError):
                await shop.handle(await shop.open(), message)

    serve(shared_broker, shop, scenario)
    assert shop.orders() == [1]


@pytest.mark.parametrize("shop", ["asyncpg-pool"], indirect=True)
def test_function_of_the_page_ends_with_its_refusal(shared_broker: BrokerProcess, shop: Shop) -> None:
    given: dict[str, Any] = {"txmq": txmq}
    exec(BILL.replace("invoices", "orders"), given)

    async def scenario(client: txmq.aio.Client) -> None:
        await shop.open()
        given["pool"] = shop.of_driver.pool  # type: ignore[attr-defined]
        await client.producer().send_many(TOPIC, [(b"k", b"1"), (b"k", b"2")])
        async with await client.consumer(GROUP, [TOPIC], offset_store=shop.store, options=OPTIONS) as consumer:
            for refused in (False, True):
                (message,) = await consumer.poll(1, timeout=SCENARIO_S)
                if refused:
                    shop.store.load(GROUP, (TOPIC, message.partition), 1 << 40)
                    with pytest.raises(asyncpg.InterfaceError) as caught:
                        await given["bill"](message)
                    assert isinstance(caught.value.__context__, FencedError)
                else:
                    await given["bill"](message)

    serve(shared_broker, shop, scenario)
    assert shop.orders() == [1]


def test_kinds_are_all_that_the_outbox_takes() -> None:
    assert {kind for kind in DRIVERS if not kind.endswith("-autocommit")} <= set(KINDS)
