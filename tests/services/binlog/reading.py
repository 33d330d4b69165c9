"""A reader of a test's own changes: it begins where the binlog ends, in a database of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import Any, Self

from txmq.binlog.decoded_changes import Op, RowChange, TransactionPart
from txmq.binlog.position import Position
from txmq.binlog.source import BinlogSource, SourceOptions
from txmq.testing.processes.mariadb import MariaDB

READ_TIMEOUT_S = 10.0
_NUMBERS = count(1000)


class Reading:
    """A source that captures one database. A block: the source is closed, the database dropped."""

    def __init__(self, server: MariaDB, **options: Any) -> None:
        self.server = server
        self.number = next(_NUMBERS)
        self.database = f"d{self.number}"
        self.options = options
        self.source = self.another()

    def another(self, **options: Any) -> BinlogSource:
        """A source of the same kind, not opened."""
        where = self.server.connect_arguments(tcp=True)
        given: dict[str, Any] = {
            "name": "test", "server_id": self.number, "captures": lambda table: table.database == self.database,
            "host": where["host"], "port": where["port"],
        }  # fmt: skip
        return BinlogSource(SourceOptions(**(given | self.options | options)))

    def __enter__(self) -> Self:
        self.server.execute(f"CREATE DATABASE {self.database} CHARACTER SET utf8mb4")
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        self.server.execute(f"DROP DATABASE IF EXISTS {self.database}")

    def begin(self) -> Position:
        """Read from here on."""
        position = self.source.current_position()
        self.source.open(position)
        return position

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Statements of one session, in autocommit; the rows of the last one."""
        with closing(self.server.connect(db=self.database, autocommit=True)) as connection:
            for statement in statements:
                with closing(connection.cursor()) as cursor:
                    cursor.execute(statement)
                    rows = list(cursor.fetchall()) if cursor.description is not None else []
        return rows

    def parts(self, source: BinlogSource | None = None) -> list[TransactionPart]:
        """All parts up to where the binlog ends now."""
        read = self.source if source is None else source
        end = read.current_position().gtid_set
        found: list[TransactionPart] = []
        while not found or not found[-1].gtids.covers(end):
            part = read.read(READ_TIMEOUT_S)
            assert part is not None, f"nothing came, {end} was expected"
            found.append(part)
        return found

    def changes(self) -> list[RowChange]:
        return [change for part in self.parts() for change in part.changes]

    def told(self) -> list[tuple[str, Any]]:
        """Op and row of each change: before and after of an update."""
        return [(str(Op(change.op)), _row(change)) for change in self.changes()]


def _row(change: RowChange) -> Sequence[Any] | None:
    if change.op == "u":
        return change.before, change.after
    return change.after if change.before is None else change.before
