"""Partial updates of MySQL's JSON (``binlog_row_value_options=PARTIAL_JSON``): what has changed within a document.

    diff   operation 1 | length | path | length | binary JSON, unless it removes       length-encoded integers
    path   $ | .name or ."text" or [number], any number of times

The document before the update is in its row, so that both are texts here. A number keeps its digits.

Source: MySQL 9.7, ``sql-common/json_diff.h``, ``sql-common/json_path.h``.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from txmq.binlog.source.json_binary import json_text, quoted

REPLACE, INSERT, REMOVE = 0, 1, 2
_LONGER: Final = 251  # a length from here on has bytes of its own
_LEG: Final = re.compile(r'\.(?P<quoted>"(?:[^"\\]|\\.)*")|\.(?P<name>[^.\["]+)|\[(?P<cell>\d+)\]')


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
        start, behind = _sized(diffs, at + 1)
        legs: list[str | int] = [0, *_legs(diffs[start:behind].decode())]
        value, at = None, behind
        if operation != REMOVE:
            start, at = _sized(diffs, behind)
            value = _parsed(json_text(diffs[start:at]))
        _apply(root, legs, operation, value)
    if at != len(diffs):
        raise ValueError(f"diffs of {len(diffs)} bytes end at {at}")
    return _shown(root[0])


def _sized(data: bytes, at: int) -> tuple[int, int]:
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
