"""The databases of the campaign's services: how each is reached, harmed, dumped and put back.

A dump is what its own program makes of a database that is in use: ``mariadb-dump``, ``pg_dump``, SQLite's backup.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg

from tools.crash.processes import CampaignError
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

COPY: Final = "copied"
_LOCK_WAIT_S: Final = 5
_DUMP_S: Final = 60.0


class Place(NamedTuple):
    """How a process reaches a database: of a service, or the copy of one.

    Attributes:
        driver: a DB-API module.
        arguments: of its ``connect``.
    """

    driver: str
    arguments: dict[str, Any]

    def connect(self) -> Any:
        """A new connection."""
        return import_module(self.driver).connect(**self.arguments)

    @property
    def error(self) -> type[Exception]:
        """What the driver raises."""
        found: type[Exception] = import_module(self.driver).Error
        return found

    def run(self, connection: Any, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run a statement with ``?`` for its parameters; its rows."""
        rows, _ = run(connection, statement if self.driver == "sqlite3" else statement.replace("?", "%s"), parameters)
        return list(rows)

    def ask(self, question: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of a question, in a session of its own."""
        with closing(self.connect()) as connection:
            return self.run(connection, question, parameters)

    def toml(self, name: str) -> str:
        """As the configuration of relays has it."""
        words = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.arguments.items())
        return f'[[outbox]]\nname = "{name}"\ndriver = "{self.driver}"\nconnect = {{ {words} }}\n'


class Database(ABC):
    """One of them, begun when it is made.

    Attributes:
        server: what may die; None: it is a file.
    """

    server: MariaDB | PostgreSQL | None = None

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where the service works."""

    @property
    @abstractmethod
    def copy(self) -> Place:
        """Where its copy is, if there is one."""

    @abstractmethod
    def dump(self, file: Path) -> None:
        """Write a dump, while all go on."""

    @abstractmethod
    def load(self, file: Path) -> None:
        """Put a dump in the place of what is there; nobody works with it."""

    @abstractmethod
    def load_copy(self, file: Path) -> None:
        """Make the copy anew of a dump."""


class SQLiteDatabase(Database):
    """A file."""

    def __init__(self, directory: Path, _stack: ExitStack) -> None:
        self._file, self._copy = directory / "sqlite.db", directory / f"{COPY}.db"
        with closing(self.place.connect()) as connection:
            connection.execute("PRAGMA journal_mode = WAL")

    @property
    def place(self) -> Place:
        return Place("sqlite3", {"database": str(self._file), "timeout": 10.0})

    @property
    def copy(self) -> Place:
        return Place("sqlite3", {"database": str(self._copy), "timeout": 10.0})

    def dump(self, file: Path) -> None:
        _back_up(self._file, file)

    def load(self, file: Path) -> None:
        _back_up(file, self._file)

    def load_copy(self, file: Path) -> None:
        _back_up(file, self._copy)


def _back_up(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as written:
        read.backup(written)


class MariaDBDatabase(Database):
    """A server."""

    server: MariaDB

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        options = (f"--innodb-lock-wait-timeout={_LOCK_WAIT_S}",)
        self.server = stack.enter_context(MariaDB(directory / "mariadb", options=options))

    @property
    def place(self) -> Place:
        return Place("MySQLdb", self.server.connect_arguments())

    @property
    def copy(self) -> Place:
        return Place("MySQLdb", self.server.connect_arguments() | {"db": COPY})

    def dump(self, file: Path) -> None:
        _call("mariadb-dump", *self._where, "--single-transaction", f"--result-file={file}", self.server.database)

    def load(self, file: Path) -> None:
        _call("mariadb", *self._where, f"--execute=source {file}", self.server.database)

    def load_copy(self, file: Path) -> None:
        self.server.make_database_anew(COPY)
        _call("mariadb", *self._where, f"--execute=source {file}", COPY)

    @property
    def _where(self) -> tuple[str, ...]:
        return "--no-defaults", f"--socket={self.place.arguments['unix_socket']}", "--user=root"


class PostgreSQLDatabase(Database):
    """A server."""

    server: PostgreSQL

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.server = stack.enter_context(PostgreSQL(directory / "postgresql"))

    @property
    def place(self) -> Place:
        return Place("psycopg", {"conninfo": self.server.conninfo()})

    @property
    def copy(self) -> Place:
        return Place("psycopg", {"conninfo": self.server.conninfo(COPY)})

    def dump(self, file: Path) -> None:
        _call("pg_dump", "--clean", "--if-exists", f"--file={file}", f"--dbname={self.server.conninfo()}")

    def load(self, file: Path) -> None:
        self._load(file, self.server.conninfo())

    def load_copy(self, file: Path) -> None:
        with closing(psycopg.connect(self.server.conninfo(), autocommit=True)) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {COPY} WITH (FORCE)")
            connection.execute(f"CREATE DATABASE {COPY}")
        self._load(file, self.server.conninfo(COPY))

    @staticmethod
    def _load(file: Path, where: str) -> None:
        _call(
            "psql", "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", f"--file={file}",
            f"--dbname={where}",
        )  # fmt: skip


def _call(program: str, *words: str) -> None:
    found = shutil.which(program)
    if found is None:
        raise CampaignError(f"{program} is not installed: it comes with the database")
    done = subprocess.run([found, *words], capture_output=True, text=True, timeout=_DUMP_S, check=False)
    if done.returncode != 0:
        raise CampaignError(f"{program} ended with {done.returncode}: {done.stderr[-2000:]}")


MADE: Final[Mapping[str, Callable[[Path, ExitStack], Database]]] = {
    "mariadb": MariaDBDatabase, "postgresql": PostgreSQLDatabase, "sqlite": SQLiteDatabase,
}  # fmt: skip
FILES: Final = ("sqlite",)  # those that are no servers
