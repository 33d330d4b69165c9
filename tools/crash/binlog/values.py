"""Whether a value of an event is what the server's own program shows of the same column."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from tools.crash.binlog.decoded import Cell, Image
from tools.crash.binlog.tables import key_columns

_ESCAPED: Final = re.compile(rb"[\x00-\x1f]")
_INTEGERS: Final = ("TINYINT", "SHORTINT", "MEDIUMINT", "INT", "LONGINT")
_YEAR_0: Final = b"1900"  # no year that a column can have
_COMPARED: Final[Mapping[str, Callable[[str], str]]] = {
    "BINARY": lambda text: bytes.fromhex(text).decode(),
    "DATETIME": lambda text: text.replace(" ", "T"),
}
_FLOAT_DIGITS: Final = 1e-5  # a FLOAT is shown with six digits


def differing(image: Image, row: Mapping[str, Any]) -> list[str]:
    """The columns of a row that are not as shown; all of them if their number is not the same."""
    if len(image) != len(row):
        return [f"{len(row)} columns, {len(image)} in the binlog"]
    return [name for cell, (name, value) in zip(image, row.items(), strict=True) if not _is_shown(cell, name, value)]


def canonical(cell: Cell) -> str:
    """A key's or a stamp's value as text, without what is only shown."""
    shown, kind = cell[0].decode("utf-8", "replace"), cell[1]
    if kind in _INTEGERS:
        return shown.rpartition("(")[2].rstrip(")")
    if kind.startswith("DATETIME"):
        shown = shown.replace(" ", "T")
    return shown.strip("'")


def plain(value: object) -> str:
    """The same of an event's value."""
    return value.decode() if isinstance(value, bytes) else str(value)


def compared_key(table: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The table, and the same of a row's key as ``txmq binlog compare`` shows it; the table alone if it has no key."""
    pairs = zip(texts, key_columns(table), strict=False)  # of a table without a key: the row's checksum
    return table, *(_COMPARED.get(declared.partition("(")[0], str)(text) for text, (_, declared) in pairs)


def _is_shown(cell: Cell, name: str, value: object) -> bool:
    shown, kind = cell
    if shown == b"NULL" or value is None:
        return shown == b"NULL" and value is None
    if name.startswith("o"):  # see tables.py
        return True
    word = re.match(r"[A-Z]+", kind)
    assert word is not None, kind
    if word[0] == "YEAR":
        return value == (0 if shown == _YEAR_0 else int(shown))
    if word[0] in _INTEGERS:
        return any(int(text) == value for text in re.split(rb" ?[()]", shown) if text)
    return _OTHERS[word[0]](shown, value)


def _bits(shown: bytes, value: Any) -> bool:
    return bool(int(shown[2:-1], 2) == value)


def _float(shown: bytes, value: Any) -> bool:
    return bool(abs(float(shown) - value) <= _FLOAT_DIGITS * abs(value))


def _double(shown: bytes, value: Any) -> bool:
    return bool(float(shown) == value)


def _decimal(shown: bytes, value: Any) -> bool:
    return shown == str(value).encode()


def _date(shown: bytes, value: Any) -> bool:
    return shown.replace(b":", b"-") == f"'{value}'".encode()


def _moment(shown: bytes, value: Any) -> bool:
    return shown.replace(b" ", b"T") == f"'{value}'".encode()


def _time(shown: bytes, value: Any) -> bool:
    return shown == f"'{value}'".encode()


def _stamp(shown: bytes, value: Any) -> bool:
    seconds, dot, digits = shown.decode().partition(".")
    if float(shown) == 0:
        return bool(str(value).startswith("0000-00-00T00:00:00"))
    text = datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return bool(value == f"{text}{dot}{digits}Z")


def _text(shown: bytes, value: Any) -> bool:
    data = value if isinstance(value, bytes) else str(value).encode()
    wanted = _ESCAPED.sub(lambda found: rf"\x{found[0][0]:02x}".encode(), data)
    found = shown[1:-1]
    padding = rb"\x00"
    while isinstance(value, bytes) and len(wanted) > len(found) and wanted.endswith(padding):
        wanted = wanted[: -len(padding)]  # of a BINARY, which the binlog leaves out
    return found == wanted


_OTHERS: Final = {
    "BIT": _bits, "FLOAT": _float, "DOUBLE": _double, "DECIMAL": _decimal, "DATE": _date, "DATETIME": _moment,
    "TIME": _time, "TIMESTAMP": _stamp, **dict.fromkeys(
        ("STRING", "VARSTRING", "BLOB", "TINYBLOB", "MEDIUMBLOB", "LONGBLOB", "JSON"), _text
    ),
}  # fmt: skip
