"""A database of its own on a real MariaDB."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import MySQLdb

from txmq.testing.processes.mariadb import MariaDB

_numbers = itertools.count(1)


class MySQLDatabase:
    """One database, and the connections that one process has to it."""

    def __init__(self, server: MariaDB, database: str = "") -> None:
        self.server, self.database = server, database or f"d{next(_numbers)}"
        server.execute(f"CREATE DATABASE IF NOT EXISTS {self.database}")
        self.opened: list[Any] = []
        self.arguments: dict[str, Any] = {}

    def connect(self, **arguments: Any) -> Any:
        """What the application gives as ``connect=``."""
        self.opened.append(self.server.connect(**({"db": self.database} | self.arguments | arguments)))
        return self.opened[-1]

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """Somebody else's statement, committed at once."""
        with (
            closing(self.server.connect(db=self.database, autocommit=True)) as connection,
            closing(connection.cursor()) as cursor,
        ):
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description is not None else []

    @contextmanager
    def table_that_cannot_roll_back(self, name: str = "cache", engine: str = "MyISAM") -> Iterator[str]:
        """Such a table: every resource on the server refuses it, so it is dropped at the end."""
        self.execute(f"CREATE TABLE {name} (i INT) ENGINE={engine}")
        try:
            yield name
        finally:
            self.execute(f"DROP TABLE {name}")

    def disconnect(self) -> None:
        """Close what the process has opened."""
        for connection in self.opened:
            with suppress(MySQLdb.Error):  # it was closed before
                connection.close()
