"""Rows events: the changed rows of one table, decoded by readers that are made once for its table map.

    table id 6 | flags 2 | more (version 2) | columns | bits of those present | for an update, again | rows
    row: bits of those that are NULL | values

Invariant: a row is whole but for generated columns, or an error. Another column that the row image leaves out is
refused with its name, and what does not end with its last row as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Final

from pymysqlreplication.constants import FIELD_TYPE

from txmq.binlog.decoded_changes import ABSENT, Column, ColumnKind, Row, RowChange, TableName, TableSchema, Value
from txmq.binlog.errors import ColumnError, SourceError
from txmq.binlog.source.column_types import Reader, UnsupportedTypeError, describe_column
from txmq.binlog.source.events import UNREADABLE, RowOp, uncompressed
from txmq.binlog.source.json_binary import patched
from txmq.binlog.source.table_map import MapColumn, TableMap

RowReader = Callable[[bytes, int], tuple[Row, int]]
_PARTIAL_JSON: Final = 1
_SPECIAL_SIZES: Final = (4, 16)
_HIDDEN: Final = re.compile(r"DB_ROW_HASH_\d+")
_UNREADABLE: Final = (*UNREADABLE, UnsupportedTypeError)


@dataclass(frozen=True, slots=True)
class TableDescription:
    """What the database says of a table now, and the binlog does not.

    Args:
        is_table: rows are stored in it: no view, no sequence.
        columns: names of all; none if it has gone.
        types: of the columns that the binlog shows as BINARY: ``uuid``, ``inet4``, ``inet6``.
        generated: names of the generated columns.
        unique: column names of each unique key without NULL.
    """

    is_table: bool = True
    columns: frozenset[str] = frozenset()
    types: dict[str, str] = field(default_factory=dict)
    generated: frozenset[str] = frozenset()
    unique: tuple[tuple[str, ...], ...] = ()


class AbsentColumnsError(ColumnError):
    """Columns that are not generated are absent from the row image.

    Attributes:
        names: of all of them.
        is_known: the database has columns of these names now, so that it was asked whether they are generated.
    """

    def __init__(self, table: TableName, names: Sequence[str], *, is_known: bool) -> None:
        text = "it is absent from the row image: SET GLOBAL binlog_row_image=FULL"
        super().__init__(str(table), names[0], text)
        self.names, self.is_known = names, is_known


class TableDecoder:
    """Turns a table's rows events into changes."""

    __slots__ = (
        "_all_present", "_columns", "_described", "_generated", "_image_size", "_readers", "_row_readers", "_shown",
        "_table_map", "schema",
    )  # fmt: skip

    def __init__(self, table_map: TableMap, described: TableDescription) -> None:
        self._table_map, self._described = table_map, described
        columns, self._readers = _columns(table_map, described)
        self._columns = len(columns)
        self._shown = len(columns)
        while self._shown and _is_hidden(columns[self._shown - 1], described):
            self._shown -= 1
        shown = columns[: self._shown]
        key = table_map.key or _unique_key(shown, described.unique)
        self.schema = TableSchema(table_map.table, tuple(shown), key)
        self._image_size = (self._columns + 7) // 8
        self._all_present = (1 << self._columns) - 1
        self._generated = sum(
            1 << place
            for place, column in enumerate(columns)
            if place >= self._shown or (column.is_generated and place not in key)
        )
        every = self._shown_of(_row_reader(self._readers))
        self._row_readers = {self._all_present: every}  # by the bits of the columns in the image

    def with_generated(self, names: frozenset[str]) -> TableDecoder:
        """The same, where these columns are generated, too."""
        generated = self._described.generated | names
        return TableDecoder(self._table_map, replace(self._described, generated=generated))

    def changes(
        self, op: RowOp, data: bytes, at: int, *, compressed: bool, is_partial: bool = False
    ) -> list[RowChange]:
        """The changes of a rows event, which begins at its number of columns.

        Args:
            is_partial: of JSON documents, rows after an update may hold what has changed.

        Raises:
            AbsentColumnsError: columns are absent from the row image.
            ColumnError: a value cannot be read.
            SourceError: the event does not fit the table map.
        """
        count, at = _number(data, at)
        if count != self._columns:
            raise SourceError(f"{self.schema.table}: an event has {count} columns, the table map {self._columns}")
        images = []
        for _ in range(2 if op == "u" else 1):
            behind = at + self._image_size
            images.append(int.from_bytes(data[at:behind], "little") & self._all_present)
            at = behind
        readers = [self._row_readers.get(present) or self._reader_of(present) for present in images]
        if compressed:
            data, at = uncompressed(data[at:]), 0
        try:
            if is_partial:
                return self._partial_updates(data, at, readers[0], images[-1])
            return self._rows(op, data, at, readers[0], readers[-1])
        except _UNREADABLE as error:
            raise self._unreadable(op, data, at, images, error) from error

    def _rows(self, op: str, data: bytes, at: int, read: RowReader, read_after: RowReader) -> list[RowChange]:
        found: list[RowChange] = []
        add, schema, end = found.append, self.schema, len(data)
        if op == "c":
            while at < end:
                row, at = read(data, at)
                add(RowChange("c", schema, None, row))
        elif op == "d":
            while at < end:
                row, at = read(data, at)
                add(RowChange("d", schema, row, None))
        else:
            while at < end:
                row, at = read(data, at)
                after, at = read_after(data, at)
                add(RowChange("u", schema, row, after))
        if at != end:
            raise SourceError(f"{schema.table}: the rows of an event end {at - end} bytes behind it")
        return found

    def _shown_of(self, read: RowReader) -> RowReader:
        """A reader that leaves out what the server keeps after the columns for itself."""
        shown = self._shown
        if shown == self._columns:
            return read

        def read_shown(data: bytes, at: int) -> tuple[Row, int]:
            values, behind = read(data, at)
            return values[:shown], behind

        return read_shown

    def _reader_of(self, present: int) -> RowReader:
        """A reader of an image without some generated columns.

        Raises:
            AbsentColumnsError: other columns are absent.
        """
        absent = self._all_present & ~present & ~self._generated
        if absent:
            names = [column.name for place, column in enumerate(self.schema.columns) if absent >> place & 1]
            raise AbsentColumnsError(self.schema.table, names, is_known=not self._described.columns.isdisjoint(names))
        places = self._places(present)
        read_present = _row_reader([self._readers[place] for place in places])
        width = self._columns

        def read(data: bytes, at: int) -> tuple[Row, int]:
            values, behind = read_present(data, at)
            row: list[Value] = [ABSENT] * width
            for place, value in zip(places, values, strict=True):
                row[place] = value
            return tuple(row), behind

        shown = self._row_readers[present] = self._shown_of(read)
        return shown

    def _partial_updates(self, data: bytes, at: int, read: RowReader, present: int) -> list[RowChange]:
        places = self._places(present)
        documents = [place for place, column in enumerate(self.schema.columns) if column.kind is ColumnKind.JSON]
        found = []
        while at < len(data):
            before, at = read(data, at)
            after, at = self._partial_row(before, data, at, places, documents)
            found.append(RowChange("u", self.schema, before, after))
        return found

    def _partial_row(
        self, before: Row, data: bytes, at: int, places: Sequence[int], documents: Sequence[int]
    ) -> tuple[Row, int]:
        """A row after an update: options, bits of the documents that are told by diffs, and what every row has."""
        options, at = data[at], at + 1
        changed = frozenset[int]()
        if options & _PARTIAL_JSON:
            bits, at = _bits(data, at, len(documents))
            changed = frozenset(place for number, place in enumerate(documents) if bits >> number & 1)
        nulls, at = _bits(data, at, len(places))
        row: list[Value] = [ABSENT] * self._columns
        for number, place in enumerate(places):
            if nulls >> number & 1:
                row[place] = None
            elif place in changed:
                behind = at + 4 + int.from_bytes(data[at : at + 4], "little")
                row[place] = patched(str(before[place]), data[at + 4 : behind])
                at = behind
            else:
                row[place], at = self._readers[place](data, at)
        return tuple(row), at

    def _places(self, present: int) -> list[int]:
        return [place for place in range(self._columns) if present >> place & 1]

    def _unreadable(
        self, op: str, data: bytes, at: int, images: Sequence[int], error: Exception
    ) -> ColumnError | SourceError:
        """Which column it was: the rows once more, one column at a time."""
        reason = str(error)
        in_turn = cycle([self._places(present) for present in images])
        while at < len(data):
            places = next(in_turn)
            null_size = (len(places) + 7) // 8
            nulls = int.from_bytes(data[at : at + null_size], "little")
            at += null_size
            for number, place in enumerate(places):
                if nulls >> number & 1:
                    continue
                try:
                    _value, at = self._readers[place](data, at)
                except _UNREADABLE:
                    return ColumnError(str(self.schema.table), self.schema.columns[place].name, reason)
        return SourceError(f"{self.schema.table}: an event ({op}) cannot be read: {reason}")


def _columns(table_map: TableMap, described: TableDescription) -> tuple[list[Column], list[Reader]]:
    columns, readers = [], []
    for column in table_map.columns:
        text = None if column.charset is None else column.charset.decode
        try:
            name, kind, reader = describe_column(column, text, _declared(column, described))
        except UnsupportedTypeError as error:
            raise ColumnError(str(table_map.table), column.name, str(error)) from error
        columns.append(Column(column.name, kind, name, column.name in described.generated))
        readers.append(reader)
    return columns, readers


def _declared(column: MapColumn, described: TableDescription) -> str:
    return described.types.get(column.name, "") if _is_binary(column) else ""


def _is_binary(column: MapColumn) -> bool:
    return column.type == FIELD_TYPE.STRING and column.charset is None


def nameless_binaries(table_map: TableMap, described: TableDescription) -> list[str]:
    """Columns that may be UUID, INET4 or INET6, of which the database does not tell: they have other names now."""
    return [
        column.name
        for column in table_map.columns
        if _is_binary(column) and column.meta[1] in _SPECIAL_SIZES and column.name not in described.columns
    ]


def _is_hidden(column: Column, described: TableDescription) -> bool:
    """Whether it is MariaDB's own, of a long unique key (``DB_ROW_HASH_1``): these stand after all columns."""
    return _HIDDEN.fullmatch(column.name) is not None and column.name not in described.columns


def _bits(data: bytes, at: int, count: int) -> tuple[int, int]:
    behind = at + (count + 7) // 8
    return int.from_bytes(data[at:behind], "little"), behind


def _unique_key(columns: Sequence[Column], unique: Sequence[Sequence[str]]) -> tuple[int, ...]:
    places = {column.name: place for place, column in enumerate(columns)}
    fitting = (key for key in unique if all(name in places for name in key))
    return tuple(places[name] for name in next(fitting, ()))


def _row_reader(readers: Sequence[Reader]) -> RowReader:
    null_size = (len(readers) + 7) // 8

    def read(data: bytes, at: int) -> tuple[Row, int]:
        behind = at + null_size
        nulls = int.from_bytes(data[at:behind], "little")
        at = behind
        values: list[Value] = []
        add = values.append
        if not nulls:  # nearly all rows of many tables
            for reader in readers:
                value, at = reader(data, at)
                add(value)
            return tuple(values), at
        for reader in readers:
            if nulls & 1:
                add(None)
            else:
                value, at = reader(data, at)
                add(value)
            nulls >>= 1
        return tuple(values), at

    return read


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A length-encoded integer below 65,536."""
    first = data[at]
    if first < 251:
        return first, at + 1
    if first != 252:
        raise SourceError(f"a rows event has a number of columns that begins with {first}")
    return data[at + 1] + (data[at + 2] << 8), at + 3
