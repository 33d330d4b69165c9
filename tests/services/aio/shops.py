"""Order databases for tests of ``txmq.aio``: SQLite in a file, and a real MariaDB, in one shape."""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import txmq
import txmq.aio
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource, MySQLResource

from ..xa.mysql_database import MySQLDatabase

TOPIC = "orders"


class Shop(ABC):
    """One database of orders, and a stock of which each order takes one.

    Attributes:
        resource: the database as the application names it.
        insert, take: statements of an order: its row, with its value as parameter; and one from the stock, a hot row.
        opened: every connection that the application was asked for.
    """

    insert: str
    take = "UPDATE stock SET left_over = left_over - 1 WHERE id = 1"

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.resource = self.new_resource()

    def new_resource(self) -> LastResource:
        """The same database, as a resource that has not been used."""
        return LastResource("shop", connect=self.connect)

    def connect(self) -> Any:
        """What the application gives as ``connect=``."""
        self.opened.append(self._connect())
        return self.opened[-1]

    @abstractmethod
    def _connect(self) -> Any:
        """A driver's connection."""

    @abstractmethod
    def rows(self) -> list[bytes]:
        """The committed orders, in order."""

    @abstractmethod
    def left_over(self) -> int:
        """What is left of the stock."""

    @contextmanager
    def stock_held(self) -> Iterator[None]:
        """Somebody else's transaction holds the stock."""
        with closing(self._connect()) as connection:
            connection.cursor().execute(self.take)
            yield
            connection.rollback()


class SQLiteShop(Shop):
    """A file."""

    insert = "INSERT INTO orders (value) VALUES (?)"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "shop.db"
        super().__init__()
        with closing(self._connect()) as connection:
            connection.execute("PRAGMA journal_mode = wal")
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, value BLOB)")
            connection.execute("CREATE TABLE stock (id INTEGER PRIMARY KEY, left_over INTEGER)")
            connection.execute("INSERT INTO stock VALUES (1, 0)")
            connection.commit()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=30.0)

    def rows(self) -> list[bytes]:
        return [value for (value,) in self._read("SELECT value FROM orders ORDER BY id")]

    def left_over(self) -> int:
        return int(self._read("SELECT left_over FROM stock")[0][0])

    def _read(self, sql: str) -> list[Any]:
        with closing(self._connect()) as connection:
            return connection.execute(sql).fetchall()


class MariaDBShop(Shop):
    """A database of its own on a server."""

    insert = "INSERT INTO orders (value) VALUES (%s)"

    def __init__(self, server: MariaDB) -> None:
        self.database = MySQLDatabase(server)
        super().__init__()
        orders = "id INT AUTO_INCREMENT PRIMARY KEY, value VARBINARY(100)"
        self.database.execute(f"CREATE TABLE orders ({orders}) ENGINE=InnoDB")
        self.database.execute("CREATE TABLE stock (id INT PRIMARY KEY, left_over INT) ENGINE=InnoDB")
        self.database.execute("INSERT INTO stock VALUES (1, 0)")

    def _connect(self) -> Any:
        return self.database.server.connect(db=self.database.database)

    def rows(self) -> list[bytes]:
        return [value for (value,) in self.database.execute("SELECT value FROM orders ORDER BY id")]

    def left_over(self) -> int:
        return int(self.database.execute("SELECT left_over FROM stock")[0][0])


class TwoShops:
    """Two databases on one server, and the orders that have a row in each."""

    def __init__(self, server: MariaDB) -> None:
        self.shops = [MariaDBShop(server), MariaDBShop(server)]
        self.resources = [MySQLResource(f"xa-{each}", connect=shop.connect) for each, shop in enumerate(self.shops)]

    def install(self) -> None:
        """Make their tables."""
        for resource in self.resources:
            resource.install()

    def close(self) -> None:
        """Let go of idle connections."""
        for resource in self.resources:
            resource.close()

    async def order(self, producer: txmq.aio.Producer, tx: txmq.aio.Transaction, value: bytes, topic: str) -> None:
        """A row in each, and a message."""
        async with tx:
            for shop, resource in zip(self.shops, self.resources, strict=True):
                await tx.connection(resource).execute(shop.insert, (value,))
            await producer.send(topic, value, key=b"k")

    def prepared(self) -> list[Any]:
        """Branches that the server holds in doubt."""
        return self.shops[0].database.execute("XA RECOVER")


class Service:
    """One process of the shop on a loop.

    Attributes:
        topic: of its messages; another one for each test.
    """

    def __init__(self, client: txmq.aio.Client, producer: txmq.aio.Producer, shop: Shop, topic: str) -> None:
        self.client, self.producer, self.shop, self.topic = client, producer, shop, topic

    async def order(self, value: bytes, resource: Any = None) -> txmq.aio.Transaction:
        """Commit a row, a piece from the stock, and a message."""
        tx = self.producer.transaction(resource or self.shop.resource)
        await self.order_in(tx, value)
        return tx

    async def order_in(self, tx: txmq.aio.Transaction, value: bytes) -> None:
        """The same in a transaction that has not begun."""
        async with tx:
            await self.write(tx, value)

    async def write(self, tx: txmq.aio.Transaction, value: bytes) -> None:
        """The statements and the message of an order, the hot row last."""
        connection = tx.connection(self.shop.resource)
        await connection.execute(self.shop.insert, (value,))
        await tx.send(self.topic, value, key=b"k")
        await connection.execute(self.shop.take)

    async def messages(self) -> list[bytes | None]:
        """The visible messages, in order."""
        return [message.value async for message in self.client.browse(self.topic)]

    async def check(self) -> list[bytes]:
        """Rows, stock and messages agree once everything is told; the orders."""
        rows = await asyncio.to_thread(self.shop.rows)
        found = await self.messages()
        async with asyncio.timeout(60.0):
            while len(found) < len(rows) or await self._in_doubt():
                await asyncio.sleep(0.01)
                found, rows = await self.messages(), await asyncio.to_thread(self.shop.rows)
        assert sorted(filter(None, found)) == sorted(rows)
        assert len(set(rows)) == len(rows) == -await asyncio.to_thread(self.shop.left_over)
        return rows

    async def _in_doubt(self) -> bool:
        return bool(await self.client.transactions.list(state="in-doubt"))


@asynccontextmanager
async def serving(broker: BrokerProcess, shop: Shop, topic: str) -> AsyncIterator[Service]:
    """A service whose topic and tables are made."""
    async with await txmq.aio.connect(broker.address) as client, client.producer() as producer:
        await client.topics.ensure(topic)
        await asyncio.to_thread(shop.resource.install)
        try:
            yield Service(client, producer, shop, topic)
        finally:
            shop.resource.close()


def on_loop(work: Callable[[], Any]) -> None:
    """Run a scenario; nothing of it is left on its loop."""

    async def main() -> None:
        await work()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
