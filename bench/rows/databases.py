"""The databases of the rows: SQLite in WAL mode, servers of our own of MariaDB and PostgreSQL; all force every commit.

The same tables and statements in all. ``timed`` connections note the moment at which the database's COMMIT has
returned: from then on the message is due.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bench.model import NotInstalledError
from bench.peers.processes import require_client
from txmq.errors import ConfigError
from txmq.testing.processes.database_programs import MariaDBFailedError
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL, PostgreSQLFailedError
from txmq.xa.database.mysql_server import mysql_driver

VALUE = b"x" * 100
ORDER = "INSERT INTO orders (content) VALUES (?)"
OUTBOX = "INSERT INTO outbox (topic, message_key, content) VALUES (?, ?, ?)"
RELAY_BATCH = 512  # rows that a relay takes in one turn
_OLDEST = f"SELECT id, content FROM outbox ORDER BY id LIMIT {RELAY_BATCH}"
_TABLES = (
    "CREATE TABLE orders (id {id}, content {blob})",
    "CREATE TABLE outbox (id {id}, topic {text}, message_key {blob}, content {blob})",
)


class Committed(Protocol):
    """Takes the moments of commits, as a list does."""

    def append(self, moment: float, /) -> None:
        """Note one."""


Connect = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """How a relay takes rows of the outbox.

    Attributes:
        rows: reads the oldest ones, and locks them if the database can.
        session: run first on its connection, if not empty.
    """

    rows: str
    session: str = ""


_SKIPPING = _OLDEST + " FOR UPDATE SKIP LOCKED"
# At REPEATABLE READ the claim would lock the gaps that writers insert into.
_MARIADB_CLAIM = Claim(_SKIPPING, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")


@dataclass(frozen=True, slots=True)
class Database:
    """One database with the two tables.

    Attributes:
        connect: a new connection, not in autocommit, that forces its commits; can be pickled.
        timed: the same, appending to the list each time a commit has returned.
        begin: the statement that begins a transaction that will write; empty if the driver begins by itself.
        placeholder: of the driver's SQL.
        claim: of a relay.
        pid: of the server, if there is one and it is one process.
        empty: empties the outbox at once, however many rows it has.
    """

    name: str
    connect: Connect
    timed: Callable[[Committed], Any]
    begin: str
    placeholder: str
    claim: Claim
    pid: Callable[[], int | None] = lambda: None
    empty: str = "TRUNCATE TABLE outbox"

    def sql(self, text: str) -> str:
        """``text`` with the driver's placeholders."""
        return text.replace("?", self.placeholder)


Open = Callable[[Path], AbstractContextManager[Database]]


@contextmanager
def sqlite(directory: Path) -> Iterator[Database]:
    """A file in ``directory``."""
    connect = partial(_connect_sqlite, (directory / "orders.db").absolute())

    def timed(committed: Committed) -> sqlite3.Connection:
        class Timed(sqlite3.Connection):
            def commit(self) -> None:
                super().commit()
                committed.append(time.perf_counter())

        return connect(Timed)

    with closing(connect()) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        _create(connection, {"id": "INTEGER PRIMARY KEY AUTOINCREMENT", "blob": "BLOB", "text": "TEXT"})
    # Without BEGIN IMMEDIATE two writers would meet at the upgrade of their locks.
    yield Database("SQLite", connect, timed, "BEGIN IMMEDIATE", "?", Claim(_OLDEST), empty="DELETE FROM outbox")


def _connect_sqlite(path: Path, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60.0, factory=factory)
    connection.execute("PRAGMA synchronous=FULL")
    return connection


@contextmanager
def mariadb(directory: Path) -> Iterator[Database]:
    """A server over ``directory``: each commit forces the redo log; no binary log."""
    server = MariaDB(directory / "mariadb")
    try:
        server.start()
    except (MariaDBFailedError, ConfigError) as error:
        if "install" not in str(error):
            raise
        raise NotInstalledError(str(error)) from error
    try:
        with closing(server.connect()) as connection:
            kinds = {"id": "BIGINT PRIMARY KEY AUTO_INCREMENT", "blob": "VARBINARY(1000)", "text": "VARCHAR(200)"}
            _create(connection, kinds)
        yield Database(
            "MariaDB", partial(_connect_mariadb, server.connect_arguments()),
            lambda committed: _timed_mariadb(server, committed), "", "%s", _MARIADB_CLAIM,
            lambda: server.pid,
        )  # fmt: skip
    finally:
        server.kill()


def _connect_mariadb(arguments: dict[str, Any]) -> Any:
    return mysql_driver().connect(**arguments)


def _timed_mariadb(server: MariaDB, committed: Committed) -> Any:
    from MySQLdb.connections import Connection

    class Timed(Connection):  # type: ignore[misc]  # the driver has no types
        def commit(self) -> None:
            super().commit()
            committed.append(time.perf_counter())

        _results = 0  # to be read up to COMMIT's

        def query(self, query: str | bytes) -> None:
            super().query(query)
            if isinstance(query, str) and query.startswith("EXECUTE"):  # what was prepared has COMMIT in it
                self._results = 1
            else:
                before, commit, _ = query.partition("COMMIT") if isinstance(query, str) else ("", "", "")
                self._results = before.count(";") + 1 if commit and not before.startswith("PREPARE") else 0
            self._read_one()

        def next_result(self) -> int:
            result = int(super().next_result())
            self._read_one()
            return result

        def _read_one(self) -> None:
            self._results -= 1
            if self._results == 0:
                committed.append(time.perf_counter())

    return Timed(**server.connect_arguments())


@contextmanager
def postgresql(directory: Path) -> Iterator[Database]:
    """A server; each commit forces its log."""
    require_client("psycopg", "psycopg[binary]")
    with postgresql_server(directory) as server:
        connect = partial(_connect_postgresql, server.conninfo())
        with closing(connect()) as connection:
            kinds = {"id": "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY", "blob": "BYTEA", "text": "TEXT"}
            _create(connection, kinds)
        timed = partial(_timed_postgresql, server.conninfo())
        yield Database("PostgreSQL", connect, timed, "", "%s", Claim(_SKIPPING))


@contextmanager
def postgresql_server(directory: Path) -> Iterator[PostgreSQL]:
    """A server with an empty database.

    Raises:
        NotInstalledError: it is not installed.
    """
    with ExitStack() as stack:
        try:
            server = stack.enter_context(PostgreSQL(directory / "postgresql"))
        except PostgreSQLFailedError as error:
            if "install" not in str(error):
                raise
            raise NotInstalledError(str(error)) from error
        yield server


def _connect_postgresql(conninfo: str) -> Any:
    import psycopg

    return psycopg.connect(conninfo)


def _timed_postgresql(conninfo: str, committed: Committed) -> Any:
    import psycopg

    class Timed(psycopg.Connection[Any]):
        def commit(self) -> None:
            super().commit()
            committed.append(time.perf_counter())

    return Timed.connect(conninfo)


def _create(connection: Any, kinds: dict[str, str]) -> None:
    with closing(connection.cursor()) as cursor:
        for table in _TABLES:
            cursor.execute(table.format(**kinds))
    connection.commit()


def transactions(database: Database, *statements: tuple[str, tuple[object, ...]]) -> Callable[[], object]:
    """These statements in one plain commit, on one connection of the thread that asks."""
    connection = database.connect()
    cursor = connection.cursor()
    ready = [(database.sql(text), values) for text, values in statements]

    def work() -> None:
        if database.begin:
            cursor.execute(database.begin)
        for text, values in ready:
            cursor.execute(text, values)
        connection.commit()

    return work


def row(database: Database) -> Callable[[], object]:
    """The order's row alone."""
    return transactions(database, (ORDER, (VALUE,)))


def row_and_outbox(database: Database) -> Callable[[], object]:
    """The order's row and the outbox row that a relay would publish."""
    return transactions(database, (ORDER, (VALUE,)), (OUTBOX, ("bench", b"key", VALUE)))
