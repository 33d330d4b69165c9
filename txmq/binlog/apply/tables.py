"""The target's tables, as its information schema describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import TargetError
from txmq.xa.database.dbapi import Connection, run

_COLUMNS = (
    "SELECT column_name, data_type, column_type, character_set_name, generation_expression "
    "FROM information_schema.columns WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position"
)
_KEYS = (
    "SELECT s.index_name, s.column_name, s.nullable FROM information_schema.statistics s "
    "WHERE s.table_schema = %s AND s.table_name = %s AND s.non_unique = 0 "
    "ORDER BY s.index_name <> 'PRIMARY', s.index_name, s.seq_in_index"
)
_OPAQUE = frozenset(
    {
        "vector", "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon",
        "geometrycollection", "geomcollection",
    }
)  # fmt: skip
_MEMBER = re.compile("'((?:[^']|'')*)'")  # of an ENUM
Row = Mapping[str, Any]  # values by column, as ``event_json.read_event`` has them


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column.

    Args:
        type: without its size: ``int``, ``enum``, ``timestamp``.
        full_type: as it was declared: ``enum('a','b')``.
        is_text: it has a character set.
        is_generated: the database computes it.
    """

    name: str
    type: str
    full_type: str = ""
    is_text: bool = False
    is_generated: bool = False

    @property
    def is_opaque(self) -> bool:
        """Its values are bytes that are compared as such in hex alone: geometries, of whichever kind, and vectors."""
        return self.type in _OPAQUE

    @property
    def has_empty_member(self) -> bool:
        """Whether it declares an empty text."""
        return "" in _MEMBER.findall(self.full_type)

    def value(self, found: Any) -> Any:
        """The value of an event as SQL takes it, in a session whose time zone is UTC."""
        if self.type == "timestamp" and isinstance(found, str):
            return found.removesuffix("Z").replace("T", " ")
        return found


@dataclass(frozen=True)
class TargetTable:
    """A table.

    Args:
        key: the columns that name a row: of the primary key, else of the first unique key without NULL; none: all
            columns name it.
    """

    name: TableName
    columns: tuple[TargetColumn, ...]
    key: tuple[str, ...]

    @cached_property
    def stored(self) -> tuple[TargetColumn, ...]:
        """The columns that are written."""
        return tuple(column for column in self.columns if not column.is_generated)

    @cached_property
    def enums(self) -> tuple[TargetColumn, ...]:
        """The columns of type ENUM in which an empty text is the error value, and no member."""
        return tuple(column for column in self.stored if column.type == "enum" and not column.has_empty_member)

    @cached_property
    def sql(self) -> str:
        """Its name in a statement with parameters."""
        return f"{quoted(self.name.database)}.{quoted(self.name.name)}"

    @cached_property
    def _key_columns(self) -> tuple[TargetColumn, ...]:
        known = {column.name: column for column in self.columns}
        return tuple(known[name] for name in self.key)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(column.name for column in self.columns)

    def key_of(self, row: Row) -> tuple[Any, ...]:
        """The values that name a row."""
        return tuple([column.value(row[column.name]) for column in self._key_columns])

    def values_of(self, row: Row) -> tuple[Any, ...]:
        """The values to write, in the order of ``stored``."""
        return tuple([column.value(row[column.name]) for column in self.stored])

    def require_columns(self, row: Row) -> None:
        """Refuse a row that does not have this table's columns.

        Raises:
            TargetError: names the first one that is missing on either side.
        """
        if row.keys() == self._names:
            return
        for name in row:
            if name not in self._names:
                raise TargetError(f"{self.name}: the target has no column {name}: give it the source's columns")
        missing = next((column.name for column in self.stored if column.name not in row), None)
        if missing is not None:
            raise TargetError(f"{self.name}: the source's row has no column {missing}, which the target has")


class TargetTables:
    """The tables met so far. Thread safety: any thread; two may read one table at the same time, with one result.

    Args:
        database: the name of a database in the target, by a pattern with ``{database}``.
    """

    def __init__(self, database: str) -> None:
        self._database = database
        self._known: dict[TableName, TargetTable] = {}

    def name(self, table: TableName) -> TableName:
        """What a table of the source is called in the target."""
        return TableName(self.database(table.database), table.name)

    def database(self, name: str) -> str:
        """What a database of the source is called in the target."""
        return self._database.replace("{database}", name)

    def get(self, connection: Connection, table: TableName) -> TargetTable:
        """The target's table for one of the source.

        Raises:
            TargetError: it is not there.
        """
        found = self._known.get(table)
        if found is None:
            found = self._known[table] = read_table(connection, self.name(table))
        return found

    def forget(self) -> None:
        """Read every table again when it is met next: a statement may have changed it."""
        self._known.clear()


def read_table(connection: Connection, name: TableName) -> TargetTable:
    """Read a table's columns and key.

    Raises:
        TargetError: it is not there.
    """
    columns = tuple(_column(row) for row in run(connection, _COLUMNS, name)[0])
    if not columns:
        raise TargetError(f"{name}: the target has no such table: create it as it is at the source")
    return TargetTable(name, columns, _key(run(connection, _KEYS, name)[0]))


def _column(row: Sequence[Any]) -> TargetColumn:
    name, type_, full_type, character_set, generation = map(_text, row)
    return TargetColumn(name, type_.lower(), full_type, bool(character_set), bool(generation))


def _key(rows: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    keys: dict[str, list[tuple[str, bool]]] = {}
    for index, column, nullable in rows:
        # MySQL lists the parts of an index that are expressions without a column.
        keys.setdefault(_text(index), []).append((_text(column), column is None or _text(nullable) == "YES"))
    usable = [columns for columns in keys.values() if not any(nullable for _, nullable in columns)]
    return tuple(column for column, _ in usable[0]) if usable else ()


def _text(value: Any) -> str:
    return "" if value is None else value.decode("utf-8") if isinstance(value, bytes) else str(value)


def json_as_text(sql: str) -> str:
    """SQL of what JSON's text tells of a document. MySQL stores more: which numbers are DECIMAL, which texts dates."""
    return f"CAST(CAST(CAST({sql} AS CHAR) AS JSON) AS CHAR)"


def quoted(name: str) -> str:
    """A name in a statement with parameters: ``%`` is doubled for the driver."""
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"
