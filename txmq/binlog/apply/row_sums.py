"""Checksums of rows, made by the database: SQL that is the same for source and target.

Theory of operation. Each column has an expression that gives its value as hexadecimal text, or NULL. Two values have
the same text if, and only if, they are the same value of the column's type. A row's sum is the SHA-256 of these texts;
a chunk's is the sum of its rows' as numbers, so that equal rows count as often as they are there.

A chunk is a range of the key, ``low < key <= high``. The key's columns are compared in the order in which the database
sorts them, and are read in a form that can be compared with them again.

Source: MariaDB 10.11, "HEX", "SHA2", "ORDER BY" (ENUM and SET sort by number).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from txmq.binlog.apply.tables import TargetColumn, TargetTable, json_as_text, quoted

Key = tuple[Any, ...]
_BY_NUMBER = frozenset({"enum", "set", "bit"})
_BYTES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_NUMBERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "year"})


class Chunk(NamedTuple):
    """A range of keys; None: without end on that side."""

    low: Key | None
    high: Key | None


class RowSums:
    """The statements about one table.

    Args:
        table: of the source; the target has its columns and its key.
    """

    def __init__(self, table: TargetTable) -> None:
        columns = {column.name: column for column in table.columns}
        self.columns = [column.name for column in table.columns]
        self.key = [columns[name] for name in table.key]
        self._texts = [_text(column) for column in table.columns]
        row = ",".join(f"IFNULL({text},'-')" for text in self._texts)
        self._row = f"SHA2(CONCAT_WS('#',{row}),256)"
        self._sorted = ",".join(_sorted(column) for column in self.key)

    def chunk_sum(self, name: str, chunk: Chunk) -> tuple[str, Key]:
        """The statement that gives a chunk's number of rows and its sum."""
        where, parameters = self._range(chunk)
        halves = ",".join(
            f"COALESCE(SUM(CAST(CONV(SUBSTR(sums.row_sum,{start},15),16,10) AS DECIMAL(30))),0)" for start in (1, 17)
        )
        inner = f"SELECT {self._row} AS row_sum FROM {name}{where}"  # noqa: S608 - names are quoted
        return f"SELECT COUNT(*),{halves} FROM ({inner}) sums", parameters  # noqa: S608 - as above

    def chunk_end(self, name: str, low: Key | None, rows: int) -> tuple[str, Key]:
        """The statement that gives the key of the last of so many rows above ``low``."""
        where, parameters = self._range(Chunk(low, None))
        keys = ",".join(_read(column) for column in self.key)
        sql = f"SELECT {keys} FROM {name}{where} ORDER BY {self._sorted} LIMIT 1 OFFSET {rows - 1}"  # noqa: S608 - as above
        return sql, parameters

    def chunk_rows(self, name: str, chunk: Chunk) -> tuple[str, Key]:
        """The statement that gives the rows of a chunk: the key as people read it, and a sum of each column."""
        where, parameters = self._range(chunk)
        keys = [
            f"CAST({quoted(column.name)} AS CHAR)" if not _is_bytes(column) else _text(column) for column in self.key
        ]
        sums = [f"SHA2({text},256)" for text in self._texts]
        return f"SELECT {','.join(keys + sums)} FROM {name}{where}", parameters  # noqa: S608 - as above

    def row_counts(self, name: str) -> str:
        """The statement that gives each different row's sum, and how often it is there."""
        return f"SELECT {self._row} AS row_sum, COUNT(*) FROM {name} GROUP BY row_sum"  # noqa: S608 - as above

    def _range(self, chunk: Chunk) -> tuple[str, Key]:
        conditions, parameters = [], list[Any]()
        if chunk.low is not None:
            condition, values = self._above(chunk.low)
            conditions.append(condition)
            parameters += values
        if chunk.high is not None:
            condition, values = self._above(chunk.high)
            conditions.append(f"NOT ({condition})")
            parameters += values
        return (" WHERE " + " AND ".join(f"({one})" for one in conditions)) if conditions else "", tuple(parameters)

    def _above(self, key: Key) -> tuple[str, Sequence[Any]]:
        """A condition on the first column that an index serves, and the order of all columns."""
        names = [_sorted(column) for column in self.key]
        exact = []
        parameters: list[Any] = []
        for place, name in enumerate(names):
            exact.append(" AND ".join([f"{before} = %s" for before in names[:place]] + [f"{name} > %s"]))
            parameters += key[: place + 1]
        return " OR ".join(f"({one})" for one in exact), parameters


def _text(column: TargetColumn) -> str:
    name = quoted(column.name)
    if column.type == "enum":
        return f"CONCAT(HEX(CONVERT({name} USING utf8mb4)),'.',{name}+0)"  # the error value is no empty member
    if column.is_text:
        return f"HEX(CONVERT({name} USING utf8mb4))"
    if column.type in ("float", "double"):
        return f"HEX(CAST({name}+0e0 AS CHAR))"  # as text a FLOAT has six digits
    if column.type == "json":
        return f"HEX({json_as_text(name)})"
    return f"HEX({name})" if _is_bytes(column) else f"HEX(CAST({name} AS CHAR))"


def _sorted(column: TargetColumn) -> str:
    return f"{quoted(column.name)}+0" if column.type in _BY_NUMBER else quoted(column.name)


def _read(column: TargetColumn) -> str:
    """A key's value in a form that the driver hands back as it was."""
    name = quoted(column.name)
    if column.type in _BY_NUMBER or column.is_text or column.type in _BYTES | _NUMBERS:
        return _sorted(column)
    return f"{name}+0e0" if column.type in ("float", "double") else f"CAST({name} AS CHAR)"


def _is_bytes(column: TargetColumn) -> bool:
    return column.type in _BYTES or column.is_opaque or column.type == "bit"
