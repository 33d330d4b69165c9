"""The SQL of the load: changes of rows, and statements that change tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tools.crash.binlog.tables import ALL_KEYS, KEYS, LIKE, MOVED, ROWS, Table
from txmq.xa.database.dbapi import run

_LARGE_SHARE = 0.01
_LARGE_ROWS = 150
_FILLED_ROWS = 100
_HOT_SHARE = 0.9
_EXTRA_MAX = 4
_MOVED_SHARE = 0.05


class Changes:
    """Changes of rows, drawn; all with the same stamp.

    Args:
        tables: which are changed.
        keyless_grow: whether rows are inserted into those without a key.
    """

    def __init__(self, tables: Sequence[Table], rng: random.Random, stamp: int, *, keyless_grow: bool) -> None:
        self._tables, self._rng, self._stamp, self._keyless_grow = tables, rng, stamp, keyless_grow

    def of_a_transaction(self, *, has_savepoints: bool = True) -> Iterator[str]:
        """Its statements."""
        rng = self._rng
        if self._keyless_grow and rng.random() < _LARGE_SHARE:
            yield self._large()
        for _ in range(rng.randrange(1, 6)):
            yield self._statement()
            if has_savepoints and rng.random() < 0.1:
                yield "SAVEPOINT here"
                yield self._statement()
                yield "ROLLBACK TO here"

    def _statement(self) -> str:
        table = self._rng.choice(self._tables)
        name = table.name + (MOVED if self._rng.random() < _MOVED_SHARE else "")
        make: Callable[[Table, str], str] = self._rng.choices(
            (self._insert, self._upsert, self._replace, self._update, self._update_many, self._rekey, self._delete,
             self._delete_many),
            (4, 2, 2, 5, 2, 2, 3, 1) if table.has_key or self._keyless_grow else (0, 0, 0, 5, 1, 2, 1, 0),
        )[0]  # fmt: skip
        return make(table, name)

    def rows(self, table: Table, count: int) -> Iterator[str]:
        """Statements that fill a table."""
        for first in range(0, count, _FILLED_ROWS):
            rows = [self._row(table, number) for number in range(first, min(first + _FILLED_ROWS, count))]
            yield f"INSERT IGNORE INTO {table.name} ({self._names(table)}) VALUES {', '.join(rows)}"

    def _number(self) -> int:
        return self._rng.randrange(KEYS if self._rng.random() < _HOT_SHARE else ALL_KEYS)

    @staticmethod
    def _names(table: Table) -> str:
        return ", ".join([*table.key_names, "stamp", *(column.name for column in table.columns)])

    def _row(self, table: Table, number: int) -> str:
        values = [column.value(self._rng) for column in table.columns]
        return f"({', '.join([*table.literals(number, self._rng), str(self._stamp), *values])})"

    def _into(self, table: Table, name: str, rows: int) -> str:
        drawn = [self._row(table, self._number()) for _ in range(rows)]
        return f"INTO {name} ({self._names(table)}) VALUES {', '.join(drawn)}"

    def _insert(self, table: Table, name: str) -> str:
        return f"INSERT IGNORE {self._into(table, name, self._rng.randrange(1, 5))}"

    def _upsert(self, table: Table, name: str) -> str:
        return f"INSERT {self._into(table, name, 2)} ON DUPLICATE KEY UPDATE stamp = VALUES(stamp)"

    def _replace(self, table: Table, name: str) -> str:
        return f"REPLACE {self._into(table, name, self._rng.randrange(1, 3))}"

    def _set(self, table: Table) -> str:
        some = self._rng.sample(table.columns, min(3, len(table.columns)))
        return ", ".join([f"stamp = {self._stamp}", *(f"{one.name} = {one.value(self._rng)}" for one in some)])

    def _update(self, table: Table, name: str) -> str:
        return f"UPDATE IGNORE {name} SET {self._set(table)} WHERE {table.where(self._number(), self._rng)}"

    def _update_many(self, table: Table, name: str) -> str:
        return (
            f"UPDATE {name} SET stamp = {self._stamp} ORDER BY {table.key_names[0]} LIMIT {self._rng.randrange(2, 9)}"
        )

    def _rekey(self, table: Table, name: str) -> str:
        new = zip(table.key_names, table.literals(self._number(), self._rng), strict=True)
        key = ", ".join(f"{column} = {literal}" for column, literal in new)
        where = table.where(self._number(), self._rng)
        return f"UPDATE IGNORE {name} SET {key}, stamp = {self._stamp} WHERE {where}"

    def _delete(self, table: Table, name: str) -> str:
        return f"DELETE FROM {name} WHERE {table.where(self._number(), self._rng)}"

    def _delete_many(self, table: Table, name: str) -> str:
        return f"DELETE FROM {name} ORDER BY {table.key_names[0]} DESC LIMIT {self._rng.randrange(2, 9)}"

    def _large(self) -> str:
        """More changes than one txmq transaction has."""
        table = self._rng.choice(self._tables)
        values = [column.value(self._rng) for column in table.columns]
        if table.has_key:
            return f"UPDATE {table.name} SET stamp = {self._stamp} LIMIT {_LARGE_ROWS}"
        row = ", ".join([f"n % {KEYS}", str(self._stamp), *values])
        counted = f"WITH RECURSIVE seq AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM seq WHERE n < {_LARGE_ROWS})"
        return f"INSERT INTO {table.name} ({self._names(table)}) {counted} SELECT {row} FROM seq"


def alterations(tables: Sequence[Table], rng: random.Random, connection: Any, *, moves: bool) -> list[str]:
    """Statements that change one of the tables, to be run one after the other; not each server knows all of them.

    Args:
        moves: tables may be renamed, emptied, dropped and made as well.
    """
    table = rng.choice(tables)
    if not moves or rng.random() < 0.5:
        return [_alteration(rng, connection, table)]
    name = table.name
    return rng.choice(
        (
            [f"RENAME TABLE {name} TO {name}{MOVED}", f"RENAME TABLE {name}{MOVED} TO {name}"],
            [f"RENAME TABLE {name}{MOVED} TO {name}"],
            [f"ALTER TABLE {name} RENAME TO {name}{MOVED}", f"RENAME TABLE {name}{MOVED} TO {name}"],
            [f"TRUNCATE TABLE {name}"],
            [f"DROP TABLE {name}", table.create()],
            [table.create()],  # a killed database has kept the former one from being made again
            [f"CREATE OR REPLACE {table.create().removeprefix('CREATE ')}"],
            [f"CREATE TABLE {name}{LIKE} LIKE {name}", f"INSERT INTO {name}{LIKE} SELECT * FROM {name} LIMIT 20",
             f"DROP TABLE {name}{LIKE}"],
            [f"CREATE TABLE {name}{ROWS} AS SELECT * FROM {name} LIMIT 20", f"DROP TABLE {name}{ROWS}"],
            [f"DROP TABLE IF EXISTS {name}{LIKE}, {name}{ROWS}"],
        )
    )  # fmt: skip


def _alteration(rng: random.Random, connection: Any, table: Table) -> str:
    shown = run(
        connection,
        "SELECT column_name FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = %s "
        "AND column_name LIKE 'x%%'",
        (table.name,),
    )[0]
    extra = [str(name) for (name,) in shown]
    number = rng.randrange(1000)
    if not extra or (len(extra) < _EXTRA_MAX and rng.random() < 0.5):
        where = rng.choice(("", " AFTER stamp"))
        declared = rng.choice(("VARCHAR(20) DEFAULT 'none'", f"INT DEFAULT {number}", "DATETIME(3)", "DECIMAL(9,2)"))
        return f"ALTER TABLE {table.name} ADD COLUMN x{number} {declared}{where}"
    chosen = rng.choice(extra)
    return rng.choice(
        (
            f"ALTER TABLE {table.name} DROP COLUMN {chosen}",
            f"ALTER TABLE {table.name} RENAME COLUMN {chosen} TO x{number}",
            f"ALTER TABLE {table.name} MODIFY COLUMN {chosen} VARCHAR(40)",
            f"ALTER TABLE {table.name} ADD INDEX IF NOT EXISTS stamps (stamp), COMMENT = '{number}'",
            f"ALTER TABLE {table.name} DROP INDEX IF EXISTS stamps",
            f"ALTER TABLE {table.name} ADD INDEX stamps (stamp), COMMENT = '{number}'",
            f"ALTER TABLE {table.name} DROP INDEX stamps",
        )
    )
