"""The table map event: names, types and key of a table, as they are for the row events that follow.

    table id 6 | flags 2 | database | table | columns | types | their metadata | nullable bits | optional metadata

Optional metadata (``binlog_row_metadata=FULL``) are fields of type, length and value. Character sets, members of ENUM
and SET, and signs are given only for those columns that have them, in order.

Sources: MariaDB, "Table Map Event"; MySQL 8.0, ``Table_map_event``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pymysqlreplication.constants import FIELD_TYPE

from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import SourceError
from txmq.binlog.position import Flavor
from txmq.binlog.source.charsets import Charset
from txmq.binlog.source.events import UNREADABLE

_META_BYTES: Final = {
    FIELD_TYPE.FLOAT: 1, FIELD_TYPE.DOUBLE: 1, FIELD_TYPE.TIMESTAMP2: 1, FIELD_TYPE.DATETIME2: 1, FIELD_TYPE.TIME2: 1,
    FIELD_TYPE.VARCHAR: 2, FIELD_TYPE.BIT: 2, FIELD_TYPE.NEWDECIMAL: 2, FIELD_TYPE.STRING: 2, FIELD_TYPE.VAR_STRING: 2,
    FIELD_TYPE.ENUM: 2, FIELD_TYPE.SET: 2, FIELD_TYPE.BLOB: 1, FIELD_TYPE.GEOMETRY: 1, FIELD_TYPE.JSON: 1,
    140: 1, 141: 2,  # BLOB and VARCHAR, compressed (MariaDB)
    242: 1,  # VECTOR (MySQL 9)
}  # fmt: skip
_NUMERIC: Final = frozenset(
    {
        FIELD_TYPE.TINY, FIELD_TYPE.SHORT, FIELD_TYPE.INT24, FIELD_TYPE.LONG, FIELD_TYPE.LONGLONG,
        FIELD_TYPE.NEWDECIMAL, FIELD_TYPE.FLOAT, FIELD_TYPE.DOUBLE, FIELD_TYPE.YEAR,
    }
)  # fmt: skip
_CHARACTER: Final = frozenset({FIELD_TYPE.STRING, FIELD_TYPE.VAR_STRING, FIELD_TYPE.VARCHAR, FIELD_TYPE.BLOB, 140, 141})
_WITH_MEMBERS: Final = frozenset({FIELD_TYPE.ENUM, FIELD_TYPE.SET})
_BINARY_CHARSET: Final = 63

_SIGNS, _DEFAULT_CHARSET, _COLUMN_CHARSETS, _NAMES, _SET_MEMBERS, _ENUM_MEMBERS = 1, 2, 3, 4, 5, 6
_PRIMARY_KEY, _PRIMARY_KEY_PREFIXES, _MEMBERS_DEFAULT_CHARSET, _MEMBERS_CHARSETS = 8, 9, 10, 11

CharsetOf = Callable[[int], Charset]


@dataclass(slots=True)
class MapColumn:
    """A column of a table map."""

    type: int
    meta: bytes
    name: str = ""
    is_unsigned: bool = False
    charset: Charset | None = None  # None: binary, or not a character type
    members: tuple[str, ...] = ()

    @property
    def character_bytes_max(self) -> int:
        """Of one character."""
        return self.charset.character_bytes_max if self.charset is not None else 1


@dataclass(slots=True)
class TableMap:
    """A table as row events need it. ``key``: places of the primary key's columns."""

    table: TableName
    columns: list[MapColumn] = field(default_factory=list)
    key: tuple[int, ...] = ()


def parse_table_map(body: bytes, flavor: Flavor, charset_of: CharsetOf) -> TableMap:
    """Read a table map from the bytes after its table id and flags, without checksum.

    Raises:
        SourceError: the names of the columns are absent, or the bytes are no table map.
    """
    try:
        return _parse(_Cursor(body), flavor, charset_of)
    except UNREADABLE as error:
        raise SourceError(f"a table map event cannot be read: {error}") from error


def _parse(cursor: _Cursor, flavor: Flavor, charset_of: CharsetOf) -> TableMap:
    database, _ = cursor.text(cursor.byte()), cursor.byte()
    name, _ = cursor.text(cursor.byte()), cursor.byte()
    found = TableMap(TableName(database, name))
    types = cursor.take(cursor.number())
    if not types:
        raise ValueError(f"{found.table} has no columns")
    metadata = _Cursor(cursor.take(cursor.number()))
    for kind in types:
        meta = metadata.take(_META_BYTES.get(kind, 0))
        if kind == FIELD_TYPE.STRING and meta[0] in _WITH_MEMBERS:
            kind = meta[0]
        found.columns.append(MapColumn(kind, meta))
    cursor.take((len(types) + 7) // 8)
    fields = {}
    while not cursor.at_end:
        kind = cursor.byte()
        fields[kind] = cursor.take(cursor.number())
    _add_metadata(found, fields, flavor, charset_of)
    return found


def _add_metadata(found: TableMap, fields: Mapping[int, bytes], flavor: Flavor, charset_of: CharsetOf) -> None:
    columns = found.columns
    if _NAMES not in fields:
        raise SourceError(
            f"the binlog does not name the columns of {found.table}: SET GLOBAL binlog_row_metadata=FULL "
            "(it holds for the sessions that write, and for what is written from then on)"
        )
    names = _Cursor(fields[_NAMES])
    for column in columns:
        column.name = names.text(names.number())
    numeric = [column for column in columns if column.type in _NUMERIC]
    if numeric and _SIGNS not in fields:
        raise ValueError("the signs of the numbers are absent")
    signs = fields.get(_SIGNS, b"")
    for place, column in enumerate(numeric):
        column.is_unsigned = bool(signs[place // 8] & 0x80 >> place % 8)
    character = _CHARACTER | {FIELD_TYPE.GEOMETRY} if flavor == "mariadb" else _CHARACTER
    _add_charsets(
        [column for column in columns if column.type in character],
        fields.get(_DEFAULT_CHARSET), fields.get(_COLUMN_CHARSETS), charset_of,
    )  # fmt: skip
    members = [column for column in columns if column.type in _WITH_MEMBERS]
    _add_charsets(members, fields.get(_MEMBERS_DEFAULT_CHARSET), fields.get(_MEMBERS_CHARSETS), charset_of)
    _add_members([column for column in members if column.type == FIELD_TYPE.SET], fields.get(_SET_MEMBERS))
    _add_members([column for column in members if column.type == FIELD_TYPE.ENUM], fields.get(_ENUM_MEMBERS))
    found.key = _key(fields)


def _add_charsets(columns: list[MapColumn], default: bytes | None, each: bytes | None, charset_of: CharsetOf) -> None:
    if not columns:
        return
    if each is not None:
        cursor = _Cursor(each)
        numbers = [cursor.number() for _ in columns]
    elif default is not None:
        cursor = _Cursor(default)
        numbers = [cursor.number()] * len(columns)
        while not cursor.at_end:
            place = cursor.number()
            numbers[place] = cursor.number()
    else:
        raise ValueError("the character sets are absent")
    for column, number in zip(columns, numbers, strict=True):
        column.charset = None if number == _BINARY_CHARSET else charset_of(number)


def _add_members(columns: list[MapColumn], described: bytes | None) -> None:
    if not columns:
        return
    if described is None:
        raise ValueError("the members of ENUM or SET are absent")
    cursor = _Cursor(described)
    for column in columns:
        decode = bytes.decode if column.charset is None else column.charset.decode
        column.members = tuple(decode(cursor.take(cursor.number())) for _ in range(cursor.number()))


def _key(fields: Mapping[int, bytes]) -> tuple[int, ...]:
    if _PRIMARY_KEY in fields:
        return tuple(_Cursor(fields[_PRIMARY_KEY]).numbers())
    return tuple(_Cursor(fields.get(_PRIMARY_KEY_PREFIXES, b"")).numbers()[::2])


class _Cursor:
    """A place in bytes; reading past their end raises ``IndexError``."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._data)

    def take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise IndexError(f"{size} bytes at {start} of {len(self._data)}")
        return self._data[start : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def text(self, size: int) -> str:
        return self.take(size).decode()

    def number(self) -> int:
        """A length-encoded integer."""
        first = self.byte()
        return first if first < 251 else int.from_bytes(self.take({252: 2, 253: 3, 254: 8}[first]), "little")

    def numbers(self) -> list[int]:
        found = []
        while not self.at_end:
            found.append(self.number())
        return found
