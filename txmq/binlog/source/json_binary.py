"""MySQL's binary JSON as the text that the server itself shows (``CAST(doc AS CHAR)``), and its partial updates.

    document   type 1 | value
    object     count | bytes | key entries | value entries | keys | values       small: numbers of 2 bytes, large: of 4
    array      count | bytes | value entries | values
    key entry  offset | length 2                    offsets count from the container's count
    value entry  type 1 | offset, or the value itself if it fits
    string     length (7 bits a byte, the lowest first) | UTF-8
    opaque     type of column 1 | length, as above | bytes

Opaque values are of other types of SQL. Numbers and times have JSON's own form; of others the text is
``"base64:type15:..."``, as the server's.

A partial update (``binlog_row_value_options=PARTIAL_JSON``) says what has changed within a document, in diffs:

    diff   operation 1 | length | path | length | binary JSON, unless it removes       length-encoded integers
    path   $ | .name or ."text" or [number], any number of times

The document before the update is in its row, so that both are texts here. A number keeps its digits.

Sources: MySQL 9.7, ``sql-common/json_binary.h``, ``sql-common/json_dom.cc``, ``strings/dtoa.cc`` (``my_gcvt``),
``sql-common/json_diff.h``, ``sql-common/json_path.h``.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from pymysqlreplication.constants import FIELD_TYPE

from txmq.binlog.source.decimals import decimal_text

_SMALL, _LARGE = Struct("<H"), Struct("<I")
_LITERALS: Final = ("null", "true", "false")
_INT16, _UINT16, _INT32, _UINT32, _INT64, _UINT64 = (Struct(f"<{code}") for code in "hHiIqQ")
_DOUBLE = Struct("<d")
_LITERAL: Final = 4
_NUMBERS: Final = {5: _INT16, 6: _UINT16, 7: _INT32, 8: _UINT32, 9: _INT64, 10: _UINT64}
_INLINED: Final = frozenset({_LITERAL, 5, 6})
_INLINED_IN_LARGE: Final = _INLINED | {7, 8}
_F_FORMAT_MAX: Final = 15  # digits before the point, and fewer zeros after it: beyond that there is an exponent
_NESTED_MAX: Final = 100  # the server's own limit

quoted = json.JSONEncoder(ensure_ascii=False).encode
"""JSON of a text, ``true``, ``false`` or ``null``."""
REPLACE, INSERT, REMOVE = 0, 1, 2
_LONGER: Final = 251  # a length from here on has bytes of its own
_LEG: Final = re.compile(r'\.(?P<quoted>"(?:[^"\\]|\\.)*")|\.(?P<name>[^.\["]+)|\[(?P<cell>\d+)\]')


def json_text(data: bytes) -> str:
    """The text of a document. No bytes stand for ``null``: the server writes so what a table had before it had JSON.

    Raises:
        ValueError, LookupError, struct.error: it is no document.
    """
    return _value(data[0], data, 1, 0) if data else "null"


def _value(kind: int, data: bytes, at: int, depth: int) -> str:
    if kind <= 3:
        if depth >= _NESTED_MAX:
            raise ValueError(f"it is nested deeper than {_NESTED_MAX}")
        return _container(data, at, is_large=bool(kind & 1), is_array=bool(kind & 2), depth=depth)
    if kind in _NUMBERS:
        return str(_NUMBERS[kind].unpack_from(data, at)[0])
    return _SCALARS[kind](data, at)


def _container(data: bytes, at: int, *, is_large: bool, is_array: bool, depth: int) -> str:
    number = _LARGE if is_large else _SMALL
    width = number.size
    count, size = number.unpack_from(data, at)[0], number.unpack_from(data, at + width)[0]
    if at + size > len(data):
        raise ValueError(f"a container of {size} bytes has {len(data) - at}")
    entry = at + 2 * width
    keys = []
    if not is_array:
        for place in range(entry, entry + count * (width + 2), width + 2):
            start = at + number.unpack_from(data, place)[0]
            keys.append(_text(data, start, start + _SMALL.unpack_from(data, place + width)[0]))
        entry += count * (width + 2)
    inlined = _INLINED_IN_LARGE if is_large else _INLINED
    values = []
    for place in range(entry, entry + count * (width + 1), width + 1):
        kind = data[place]
        where = place + 1 if kind in inlined else at + number.unpack_from(data, place + 1)[0]
        values.append(_value(kind, data, where, depth + 1))
    if is_array:
        return f"[{', '.join(values)}]"
    return f"{{{', '.join([f'{key}: {value}' for key, value in zip(keys, values, strict=True)])}}}"


def _text(data: bytes, start: int, behind: int) -> str:
    if behind > len(data):
        raise ValueError(f"a text that ends at {behind} of {len(data)} bytes")
    return quoted(data[start:behind].decode())


def _sized(data: bytes, at: int) -> tuple[int, int]:
    """Where bytes begin that stand after their length, and where they end."""
    size = shift = 0
    while True:
        byte = data[at]
        size |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return at, at + size


def _literal(data: bytes, at: int) -> str:
    return _LITERALS[data[at]]


def _string(data: bytes, at: int) -> str:
    return _text(data, *_sized(data, at))


def _double(data: bytes, at: int) -> str:
    return double_text(_DOUBLE.unpack_from(data, at)[0])


def double_text(value: float) -> str:
    """A number as the server writes it: with the fewest digits that tell it from all others."""
    mantissa, _, exponent = f"{value!r}".lower().partition("e")
    sign, mantissa = ("-", mantissa[1:]) if mantissa.startswith("-") else ("", mantissa)
    whole, _, part = mantissa.partition(".")
    digits = (whole + part).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + part) - len(digits))  # digits before the point
    digits = digits.rstrip("0")
    if not digits:
        return f"{sign}0.0"
    if point <= -_F_FORMAT_MAX or (point > _F_FORMAT_MAX and len(digits) <= point):
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{tail}e{point - 1}"
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    return f"{sign}{digits[:point].ljust(point, '0')}.{digits[point:] or '0'}"


def _opaque(data: bytes, at: int) -> str:
    kind = data[at]
    start, behind = _sized(data, at + 1)
    raw = data[start:behind]
    if behind > len(data):
        raise ValueError(f"a value that ends at {behind} of {len(data)} bytes")
    if kind == FIELD_TYPE.NEWDECIMAL:
        return decimal_text(raw[2:], raw[0], raw[1])
    if kind in _TIMES:
        return f'"{_TIMES[kind](int.from_bytes(raw, "little", signed=True))}"'
    return f'"base64:type{kind}:{b64encode(raw).decode()}"'


def _date(packed: int) -> str:
    year, month = divmod(packed >> 46, 13)
    return f"{year:04d}-{month:02d}-{packed >> 41 & 31:02d}"


def _clock(packed: int) -> str:
    return f"{packed >> 30 & 63:02d}:{packed >> 24 & 63:02d}.{packed & 0xFFFFFF:06d}"


def _datetime(packed: int) -> str:
    return f"{_date(packed)} {packed >> 36 & 31:02d}:{_clock(packed)}"


def _time(packed: int) -> str:
    sign, packed = ("-", -packed) if packed < 0 else ("", packed)
    return f"{sign}{packed >> 36 & 1023:02d}:{_clock(packed)}"


_TIMES: Final[dict[int, Callable[[int], str]]] = {
    FIELD_TYPE.DATE: _date, FIELD_TYPE.TIME: _time, FIELD_TYPE.DATETIME: _datetime, FIELD_TYPE.TIMESTAMP: _datetime,
}  # fmt: skip
_SCALARS: Final[dict[int, Callable[[bytes, int], str]]] = {_LITERAL: _literal, 11: _double, 12: _string, 15: _opaque}


# --- partial updates --------------------------------------------------------------------------------------------------


class _Number(str):
    """As it is written."""

    __slots__ = ()


def patched(document: str, diffs: bytes) -> str:
    """A document's text after its diffs.

    Raises:
        ValueError, LookupError: they do not fit the document, or are none.
    """
    root = [_parsed(document)]
    at = 0
    while at < len(diffs):
        operation = diffs[at]
        start, behind = _length_encoded(diffs, at + 1)
        legs: list[str | int] = [0, *_legs(diffs[start:behind].decode())]
        value, at = None, behind
        if operation != REMOVE:
            start, at = _length_encoded(diffs, behind)
            value = _parsed(json_text(diffs[start:at]))
        _apply(root, legs, operation, value)
    if at != len(diffs):
        raise ValueError(f"diffs of {len(diffs)} bytes end at {at}")
    return _shown(root[0])


def _length_encoded(data: bytes, at: int) -> tuple[int, int]:
    """Where bytes begin that stand after their length, and where they end."""
    first, at = data[at], at + 1
    if first < _LONGER:
        return at, at + first
    start = at + {252: 2, 253: 3, 254: 8}[first]
    return start, start + int.from_bytes(data[at:start], "little")


def _parsed(text: str) -> Any:
    return json.loads(text, parse_int=_Number, parse_float=_Number)


def _legs(path: str) -> list[str | int]:
    found: list[str | int] = []
    at = int(path.startswith("$"))
    while at < len(path):
        leg = _LEG.match(path, at) if at else None
        if leg is None:
            raise ValueError(f"no path of a document: {path[:80]!r}")
        cell, name = leg["cell"], leg["name"]
        found.append(int(cell) if cell is not None else name if name is not None else json.loads(leg["quoted"]))
        at = leg.end()
    return found


def _apply(root: list[Any], legs: list[Any], operation: int, value: Any) -> None:
    inside: Any = root
    for leg in legs[:-1]:
        inside = inside[leg]
    last = legs[-1]
    if not isinstance(inside, list if isinstance(last, int) else dict):
        raise ValueError(f"{last!r} is of no such container")  # noqa: TRY004 - what the server sent, not a type of ours
    if operation == REMOVE:
        del inside[last]
    elif operation == REPLACE:
        _ = inside[last]  # it is there
        inside[last] = value
    elif operation != INSERT:
        raise ValueError(f"an operation that is not known ({operation})")
    elif isinstance(inside, list):
        inside.insert(last, value)
    else:
        members = sorted([*inside.items(), (last, value)], key=lambda member: _order(member[0]))
        inside.clear()
        inside.update(members)


def _order(name: str) -> tuple[int, bytes]:
    """The server's order of an object's members."""
    raw = name.encode()
    return len(raw), raw


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join([f"{quoted(name)}: {_shown(inner)}" for name, inner in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join([_shown(inner) for inner in value]) + "]"
    return str(value) if isinstance(value, _Number) else quoted(value)
