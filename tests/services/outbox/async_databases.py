"""Asynchronous drivers over the databases of ``databases.py``: how each connects, begins, ends, runs a statement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiomysql
import aiosqlite
import asyncmy
import asyncpg
import psycopg

from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

from .databases import Connect, connector, of_pymysql

TABLES = ("txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay", "orders")


class Database(ABC):
    """One driver, and one of its modes.

    Attributes:
        look: opens a connection of a synchronous driver.
        begins: the driver begins transactions by itself.
        opened: connections of the driver.
    """

    kind: str
    would_autocommit = False

    def __init__(self, where: Any, look: Connect) -> None:
        self.where, self.look, self.opened = where, look, list[Any]()
        connection = look()
        for table in TABLES:
            run(connection, f"DROP TABLE IF EXISTS {table}")
        run(connection, "CREATE TABLE orders (id INTEGER)")
        connection.commit()
        connection.close()

    async def open(self) -> Any:
        """A new connection, closed with the test."""
        self.opened.append(await self.connect())
        return self.opened[-1]

    @abstractmethod
    def connect(self) -> Any:
        """What the driver's ``connect`` gives, to be awaited."""

    async def execute(self, connection: Any, statement: str) -> None:
        """As one writes it with this driver."""
        await connection.execute(statement)

    @abstractmethod
    async def begin(self, connection: Any) -> Any:
        """As one writes it with this driver; what ``end`` takes."""

    async def end(self, begun: Any, word: str) -> None:
        """``commit`` or ``rollback``."""
        await getattr(begun, word)()

    async def close(self) -> None:
        """Close what is open."""
        for connection in self.opened:
            await connection.close()

    @asynccontextmanager
    async def transaction(self, connection: Any) -> AsyncIterator[None]:
        """A block that commits, or rolls back."""
        begun = await self.begin(connection)
        try:
            yield
        except BaseException:
            await self.end(begun, "rollback")
            raise
        await self.end(begun, "commit")


class Asyncpg(Database):
    kind, would_autocommit = "asyncpg", True

    def connect(self) -> Any:
        found = psycopg.conninfo.conninfo_to_dict(self.where)
        return asyncpg.connect(host=found["host"], port=found["port"], user=found["user"], database=found["dbname"])

    async def begin(self, connection: Any) -> Any:
        transaction = connection.transaction()
        await transaction.start()
        return transaction


class AsyncpgPool(Asyncpg):
    kind = "asyncpg-pool"
    pool: Any = None

    async def connect(self) -> Any:
        if self.pool is None:
            found = psycopg.conninfo.conninfo_to_dict(self.where)
            self.pool = await asyncpg.create_pool(
                host=found["host"], port=found["port"], user=found["user"], database=found["dbname"], min_size=1
            )
        return await self.pool.acquire()

    async def close(self) -> None:
        for connection in self.opened:
            await self.pool.release(connection)
        if self.pool is not None:
            await self.pool.close()


class Psycopg(Database):
    kind = "psycopg"

    def connect(self) -> Any:
        return psycopg.AsyncConnection.connect(self.where, autocommit=self.would_autocommit)

    async def begin(self, connection: Any) -> Any:
        if self.would_autocommit:
            await connection.execute("BEGIN")
        return connection


class PsycopgAutocommit(Psycopg):
    kind, would_autocommit = "psycopg-autocommit", True


class SQLite(Database):
    kind, level = "sqlite", ""

    def connect(self) -> Any:
        level = None if self.would_autocommit else ""
        return aiosqlite.connect(self.where, isolation_level=level, timeout=30.0)

    async def begin(self, connection: Any) -> Any:
        if self.would_autocommit:
            await connection.execute("BEGIN")
        return connection


class SQLiteAutocommit(SQLite):
    kind, would_autocommit = "sqlite-autocommit", True


class MySQL(Database):
    driver: Any

    def connect(self) -> Any:
        return self.driver.connect(**_of_asyncio(self.where), autocommit=self.would_autocommit)

    async def execute(self, connection: Any, statement: str) -> None:
        async with connection.cursor() as cursor:
            await cursor.execute(statement)

    async def begin(self, connection: Any) -> Any:
        await connection.begin()
        return connection

    async def close(self) -> None:
        for connection in self.opened:
            await connection.ensure_closed()


class Aiomysql(MySQL):
    kind, driver = "aiomysql", aiomysql


class AiomysqlAutocommit(Aiomysql):
    kind, would_autocommit = "aiomysql-autocommit", True


class Asyncmy(MySQL):
    kind, driver = "asyncmy", asyncmy


class AsyncmyAutocommit(Asyncmy):
    kind, would_autocommit = "asyncmy-autocommit", True


DRIVERS: dict[str, type[Database]] = {
    cls.kind: cls
    for cls in (
        Asyncpg, AsyncpgPool, Psycopg, PsycopgAutocommit, SQLite, SQLiteAutocommit, Aiomysql, AiomysqlAutocommit,
        Asyncmy, AsyncmyAutocommit,
    )
}  # fmt: skip


def database(kind: str, folder: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Database:
    """A database, empty but for a table of orders."""
    cls = DRIVERS[kind]
    if issubclass(cls, SQLite):
        return cls(folder / "shop.db", connector("sqlite", folder, mariadb, postgresql))
    if issubclass(cls, MySQL):
        return cls(mariadb.connect_arguments(), connector("mysqlclient", folder, mariadb, postgresql))
    return cls(postgresql.conninfo(), connector("psycopg", folder, mariadb, postgresql))


def _of_asyncio(where: dict[str, Any]) -> dict[str, Any]:
    return {{"database": "db"}.get(name, name): value for name, value in of_pymysql(where).items()}
