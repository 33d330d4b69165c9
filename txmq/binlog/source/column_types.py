"""Types of columns: how a value stands in a row of the binlog, and the form in which it travels.

A reader takes bytes and a place and returns the value and the place after it. There is one for each column of a table,
made when its table map is read, so that a row is a loop over readers.

What the binlog leaves out is put back: the zero bytes at the end of BINARY, UUID and INET6. What it cannot tell
(fractions in the temporal types of before MySQL 5.6) is refused with the column's name.

Sources: MariaDB, "Rows Event", "Table Map Event"; MySQL internals, "Date and Time Data Type Representation";
MariaDB server, ``sql/field_comp.h`` (compressed columns).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import date
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from struct import Struct
from typing import Final
from uuid import UUID

from pymysqlreplication.constants import FIELD_TYPE

from txmq.binlog.decoded_changes import ColumnKind, Value
from txmq.binlog.source.decimals import decimal_reader
from txmq.binlog.source.events import EVENT_BYTES_MAX
from txmq.binlog.source.json_binary import json_text
from txmq.binlog.source.table_map import MapColumn

Reader = Callable[[bytes, int], tuple[Value, int]]
TextDecoder = Callable[[bytes], str]

_FIXED: Final[dict[int, tuple[str, str, str]]] = {  # name, then struct of signed and of unsigned values
    FIELD_TYPE.TINY: ("tinyint", "<b", "<B"),
    FIELD_TYPE.SHORT: ("smallint", "<h", "<H"),
    FIELD_TYPE.LONG: ("int", "<i", "<I"),
    FIELD_TYPE.LONGLONG: ("bigint", "<q", "<Q"),
    FIELD_TYPE.FLOAT: ("float", "<f", "<f"),
    FIELD_TYPE.DOUBLE: ("double", "<d", "<d"),
}
_TEXTS: Final = {1: "tinytext", 2: "text", 3: "mediumtext", 4: "longtext"}
_BLOBS: Final = {1: "tinyblob", 2: "blob", 3: "mediumblob", 4: "longblob"}
_MAPPED: Final = bytes(10) + b"\xff\xff"  # an IPv4 address in IPv6, shown with points; so is one after 96 zero bits


def _inet6(raw: bytes) -> str:
    if raw.startswith(_MAPPED):
        return f"::ffff:{IPv4Address(raw[12:])}"
    if raw.startswith(bytes(12)) and raw[12:14] != bytes(2):
        return f"::{IPv4Address(raw[12:])}"
    text = str(IPv6Address(raw))
    words = text.split(":")
    if "::" in text or "0" not in words:
        return text
    place = words.index("0")  # MariaDB shortens a single zero as well
    return ":".join(words[:place]) + "::" + ":".join(words[place + 1 :])


_SPECIAL: Final[dict[str, Callable[[bytes], str]]] = {
    "uuid": lambda raw: str(UUID(bytes=raw)),
    "inet6": _inet6,
    "inet4": lambda raw: str(IPv4Address(raw)),
}
"""MariaDB's types that the binlog shows as BINARY."""

Described = tuple[str, ColumnKind, Reader]  # SQL type, form, reader


class UnsupportedTypeError(Exception):
    """The text says what the column is, and what to do."""


def describe_column(column: MapColumn, text: TextDecoder | None, declared: str) -> Described:
    """How a column is read.

    Args:
        column: from the table map.
        text: decoder of its character set; None if it is binary.
        declared: its type in the database as it is now, if the binlog does not tell (UUID, INET4, INET6).

    Raises:
        UnsupportedTypeError: its values cannot be read exactly.
    """
    kind = column.type
    if kind in _FIXED:
        return _fixed(column)
    if kind in _DESCRIBE:
        return _DESCRIBE[kind](column)
    if kind == FIELD_TYPE.STRING:
        return _string(column, text, declared)
    if kind in (FIELD_TYPE.VARCHAR, FIELD_TYPE.VAR_STRING, VARCHAR_COMPRESSED):
        return _varchar(column, text)
    if kind in (FIELD_TYPE.BLOB, BLOB_COMPRESSED):
        return _blob(column, text)
    if kind in (FIELD_TYPE.TIME, FIELD_TYPE.DATETIME, FIELD_TYPE.TIMESTAMP):
        raise UnsupportedTypeError(
            "it has the format of before MySQL 5.6, in which the binlog does not tell fractions; "
            "rebuild the table with mysql56_temporal_format=ON (ALTER TABLE ... FORCE)"
        )
    raise UnsupportedTypeError(f"its type (number {kind}) is not known")


BLOB_COMPRESSED: Final = 140
VARCHAR_COMPRESSED: Final = 141
VECTOR: Final = 242  # of MySQL 9; MariaDB shows its own as VARBINARY


def _fixed(column: MapColumn) -> Described:
    name, signed, unsigned = _FIXED[column.type]
    kind = ColumnKind.FLOAT if column.type in (FIELD_TYPE.FLOAT, FIELD_TYPE.DOUBLE) else ColumnKind.INTEGER
    struct = Struct(unsigned if column.is_unsigned else signed)
    unpack, size = struct.unpack_from, struct.size

    def read(data: bytes, at: int) -> tuple[Value, int]:
        return unpack(data, at)[0], at + size

    return name + " unsigned" * column.is_unsigned, kind, read


def _int24(column: MapColumn) -> Described:
    signed = not column.is_unsigned

    def read(data: bytes, at: int) -> tuple[Value, int]:
        behind = at + 3
        return int.from_bytes(data[at:behind], "little", signed=signed), behind

    return "mediumint" + " unsigned" * column.is_unsigned, ColumnKind.INTEGER, read


def _year(_column: MapColumn) -> Described:
    return "year", ColumnKind.INTEGER, lambda data, at: (data[at] + 1900 if data[at] else 0, at + 1)


def _bit(column: MapColumn) -> Described:
    bits = column.meta[0] + column.meta[1] * 8
    size = (bits + 7) // 8

    def read(data: bytes, at: int) -> tuple[Value, int]:
        behind = at + size
        return int.from_bytes(data[at:behind], "big"), behind

    return f"bit({bits})", ColumnKind.INTEGER, read


# --- text and bytes --------------------------------------------------------------------------------------------------


def _string(column: MapColumn, text: TextDecoder | None, declared: str) -> Described:
    size = (((column.meta[0] << 4) & 0x300) ^ 0x300) + column.meta[1]  # two bits of it stand in the type's byte
    prefix = 2 if size > 255 else 1
    special = _SPECIAL.get(declared)
    if special is not None:
        return declared, ColumnKind.TEXT, _prefixed(prefix, lambda raw: special(raw.ljust(size, b"\0")))
    if text is None:
        return f"binary({size})", ColumnKind.BINARY, _prefixed(prefix, lambda raw: raw.ljust(size, b"\0"))
    return f"char({size // column.character_bytes_max})", ColumnKind.TEXT, _prefixed(prefix, text)


def _varchar(column: MapColumn, text: TextDecoder | None) -> Described:
    size = column.meta[0] + (column.meta[1] << 8)
    prefix = 2 if size > 255 else 1
    compressed = column.type == VARCHAR_COMPRESSED
    size -= compressed  # of the header
    name = f"varbinary({size})" if text is None else f"varchar({size // column.character_bytes_max})"
    return _variable(name, prefix, text, compressed=compressed)


def _blob(column: MapColumn, text: TextDecoder | None) -> Described:
    prefix = column.meta[0]
    if prefix not in _BLOBS:
        raise UnsupportedTypeError(f"its length has {prefix} bytes")
    name = (_BLOBS if text is None else _TEXTS)[prefix]
    return _variable(name, prefix, text, compressed=column.type == BLOB_COMPRESSED)


def _variable(name: str, prefix: int, text: TextDecoder | None, *, compressed: bool) -> Described:
    kind = ColumnKind.BINARY if text is None else ColumnKind.TEXT
    if not compressed:
        return name, kind, _prefixed(prefix, text)
    if text is None:
        return f"{name} compressed", kind, _prefixed(prefix, _inflated)
    return f"{name} compressed", kind, _prefixed(prefix, lambda raw: text(_inflated(raw)))


def _geometry(column: MapColumn) -> Described:
    return "geometry", ColumnKind.BINARY, _prefixed(column.meta[0], None)


def _vector(column: MapColumn) -> Described:
    """Floats of four bytes, the lowest first, as both vendors store them."""
    return "vector", ColumnKind.BINARY, _prefixed(column.meta[0], None)


def _json(column: MapColumn) -> Described:
    return "json", ColumnKind.JSON, _prefixed(column.meta[0], json_text)


def _prefixed(size: int, convert: Callable[[bytes], str | bytes] | None) -> Reader:
    """A reader of bytes after their length, which has ``size`` bytes."""

    def read(data: bytes, at: int) -> tuple[Value, int]:
        start = at + size
        behind = start + (data[at] if size == 1 else int.from_bytes(data[at:start], "little"))
        raw = data[start:behind]
        return (raw if convert is None else convert(raw)), behind

    return read


def _inflated(raw: bytes) -> bytes:
    """A compressed column's value: header (method, and size of the length), length, deflated bytes."""
    if not raw:
        return raw
    header = raw[0]
    if header == 0:
        return raw[1:]
    if header >> 4 != 8:
        raise UnsupportedTypeError(f"it is compressed by a method that is not known ({header >> 4})")
    behind = 1 + (header & 7)
    size = int.from_bytes(raw[1:behind], "big")
    inflate = zlib.decompressobj(-zlib.MAX_WBITS if header & 8 else zlib.MAX_WBITS)
    if size > EVENT_BYTES_MAX:
        raise ValueError(f"a compressed value of {size} bytes, over the limit of {EVENT_BYTES_MAX}")
    value = inflate.decompress(raw[behind:], size + 1)
    if len(value) != size:
        raise ValueError(f"a compressed value of {size} bytes has {len(value)}")
    return value


# --- sets and enumerations -------------------------------------------------------------------------------------------


def _enum(column: MapColumn) -> Described:
    values, size = ("", *column.members), column.meta[1]

    def read(data: bytes, at: int) -> tuple[Value, int]:
        behind = at + size
        return values[int.from_bytes(data[at:behind], "little")], behind

    return f"enum({_quoted(column.members)})", ColumnKind.TEXT, read


def _set(column: MapColumn) -> Described:
    members, size = column.members, column.meta[1]

    @lru_cache(1024)
    def text(bits: int) -> str:
        if bits >> len(members):
            raise ValueError(f"a SET of {len(members)} members has the bits {bits:b}")
        return ",".join(member for number, member in enumerate(members) if bits >> number & 1)

    def read(data: bytes, at: int) -> tuple[Value, int]:
        behind = at + size
        return text(int.from_bytes(data[at:behind], "little")), behind

    return f"set({_quoted(members)})", ColumnKind.TEXT, read


def _quoted(members: Sequence[str]) -> str:
    return ",".join("'" + member.replace("'", "''") + "'" for member in members)


# --- decimals --------------------------------------------------------------------------------------------------------


def _decimal(column: MapColumn) -> Described:
    precision, scale = column.meta[0], column.meta[1]
    size, text = decimal_reader(precision, scale)

    def read(data: bytes, at: int) -> tuple[Value, int]:
        behind = at + size
        return text(data[at:behind]), behind

    unsigned = " unsigned" * column.is_unsigned
    return f"decimal({precision},{scale}){unsigned}", ColumnKind.DECIMAL, read


# --- dates and times -------------------------------------------------------------------------------------------------

_SECONDS: Final = [f"{second:02d}" for second in range(64)]  # and minutes, hours, days, months: 0 to 63 in the format


@lru_cache(4096)
def _day_text(days: int) -> str:
    return date.fromordinal(719163 + days).isoformat()


@lru_cache(4096)
def _date_text(year: int, month: int, day: int) -> str:
    return f"{year:04d}-{month:02d}-{day:02d}"


def _date(_column: MapColumn) -> Described:
    def read(data: bytes, at: int) -> tuple[Value, int]:
        behind = at + 3
        packed = int.from_bytes(data[at:behind], "little")
        return _date_text(packed >> 9, packed >> 5 & 15, packed & 31), behind

    return "date", ColumnKind.DATE, read


def _fraction(digits: int) -> tuple[int, Callable[[int], str]]:
    """Bytes of a fraction with so many digits, and its text, with the point."""
    size = (digits + 1) // 2
    if digits % 2:
        return size, lambda number: f".{number // 10:0{digits}d}"
    return size, lambda number: f".{number:0{digits}d}"


def _datetime(column: MapColumn) -> Described:
    digits = column.meta[0]
    more, fraction = _fraction(digits)
    two = _SECONDS

    def read(data: bytes, at: int) -> tuple[Value, int]:
        behind = at + 5
        packed = int.from_bytes(data[at:behind], "big") - 0x8000000000
        year, month = divmod(packed >> 22, 13)
        text = (
            f"{_date_text(year, month, packed >> 17 & 31)}"
            f"T{two[packed >> 12 & 31]}:{two[packed >> 6 & 63]}:{two[packed & 63]}"
        )
        if not digits:
            return text, behind
        return text + fraction(int.from_bytes(data[behind : behind + more], "big")), behind + more

    return f"datetime({digits})" if digits else "datetime", ColumnKind.DATETIME, read


def _timestamp(column: MapColumn) -> Described:
    digits = column.meta[0]
    more, fraction = _fraction(digits)
    two = _SECONDS

    def read(data: bytes, at: int) -> tuple[Value, int]:
        middle = at + 4
        behind = middle + more
        seconds = int.from_bytes(data[at:middle], "big")
        part = int.from_bytes(data[middle:behind], "big")
        days, rest = divmod(seconds, 86400)
        hour, rest = divmod(rest, 3600)
        minute, second = divmod(rest, 60)
        day = _day_text(days) if seconds or part else "0000-00-00"
        text = f"{day}T{two[hour]}:{two[minute]}:{two[second]}"
        return (f"{text}{fraction(part)}Z" if digits else f"{text}Z"), behind

    return f"timestamp({digits})" if digits else "timestamp", ColumnKind.TIMESTAMP, read


def _time(column: MapColumn) -> Described:
    digits = column.meta[0]
    more, fraction = _fraction(digits)
    zero, shift, mask = 0x800000 << more * 8, more * 8, (1 << more * 8) - 1
    two = _SECONDS

    def read(data: bytes, at: int) -> tuple[Value, int]:
        behind = at + 3 + more
        packed = int.from_bytes(data[at:behind], "big") - zero
        minus, packed = ("-", -packed) if packed < 0 else ("", packed)
        whole = packed >> shift
        text = f"{minus}{whole >> 12 & 1023:02d}:{two[whole >> 6 & 63]}:{two[whole & 63]}"
        return (text + fraction(packed & mask) if digits else text), behind

    return f"time({digits})" if digits else "time", ColumnKind.TIME, read


_DESCRIBE: Final[dict[int, Callable[[MapColumn], Described]]] = {
    FIELD_TYPE.INT24: _int24,
    FIELD_TYPE.YEAR: _year,
    FIELD_TYPE.BIT: _bit,
    FIELD_TYPE.NEWDECIMAL: _decimal,
    FIELD_TYPE.DATE: _date,
    FIELD_TYPE.DATETIME2: _datetime,
    FIELD_TYPE.TIMESTAMP2: _timestamp,
    FIELD_TYPE.TIME2: _time,
    FIELD_TYPE.ENUM: _enum,
    FIELD_TYPE.SET: _set,
    FIELD_TYPE.GEOMETRY: _geometry,
    FIELD_TYPE.JSON: _json,
    VECTOR: _vector,
}
