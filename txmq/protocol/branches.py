"""The branches of an XA transaction on the wire: before the parts in the body of ``decide``.

Byte layout
    ``<resource> <uuid, 32 hex> <length>\\r\\n<JSON object>``, as many as ``branches=`` says. The object has ``bqual``
    (at most 64 printable ASCII characters), ``connection`` (the database's number for the owner's connection, below
    2^64, or null), ``wrote`` and ``marker`` (whether a marker row proves the outcome) and ``table`` (the marker table,
    under its name in SQL).

Invariants
    * Strict both ways, at most 64 branches, each of at most 1 KiB.
    * One branch a resource: a uuid appears once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txmq.errors import BadRequestError, LocalProtocolError
from txmq.model import is_valid_name, is_valid_table
from txmq.protocol.json_text import read_json
from txmq.xid import is_bqual_text

Buffer = bytes | bytearray | memoryview

BRANCHES_MAX = 64
BRANCH_SIZE_BYTES_MAX = 1024
_CONNECTION_END = 1 << 64
_BRANCH = re.compile(rb"([!-~]{1,200}) ([0-9a-f]{32}) ([1-9][0-9]{0,3})\r\n").match
# As clients of this library write it: reading JSON and looking at each value costs five times as much.
_PLAIN = re.compile(
    rb'([!-~]{1,200}) ([0-9a-f]{32}) ([1-9][0-9]{0,3})\r\n({"bqual": "([0-9a-z.]{1,64})", '
    rb'"connection": (0|[1-9][0-9]{0,18}), "wrote": (true|false), "marker": (true|false), '
    rb'"table": "([0-9A-Za-z_.]{1,97})"})'
).match
_AS_ASCII, _AS_TEXT = json.encoder.encode_basestring_ascii, json.encoder.encode_basestring
_DETAILS: dict[str, type | tuple[type, ...]] = {
    "bqual": str,
    "connection": (int, type(None)),
    "wrote": bool,
    "marker": bool,
    "table": str,
}


def encode_branch(resource: str, uuid: str, details: Mapping[str, Any]) -> bytes:
    """One branch.

    Raises:
        LocalProtocolError: it cannot be carried.
    """
    text = _as_json(_AS_ASCII, details).encode()
    entry = f"{resource} {uuid} {len(text)}\r\n".encode() + text
    if not is_valid_name(resource) or _BRANCH(entry) is None or len(text) > BRANCH_SIZE_BYTES_MAX:
        raise LocalProtocolError(f"cannot send branch {resource[:80]!r} with uuid {uuid[:80]!r}")
    return entry


def split_branches(body: Buffer, count: int) -> tuple[list[dict[str, Any]], int]:
    """Read the branches of ``decide``.

    Returns:
        resource, uuid, bqual, connection, wrote and marker of each, and where the parts begin.

    Raises:
        BadRequestError: malformed, too many, or two of one resource.
    """
    if not 1 <= count <= BRANCHES_MAX:
        raise BadRequestError(f"branches={count}: expected 1 to {BRANCHES_MAX}")
    found: list[dict[str, Any]] = []
    position = 0
    for number in range(count):
        plain = _PLAIN(body, position)
        if plain is not None and (branch := _plain(plain)) is not None:
            found.append(branch)
            position = plain.end()
            continue
        match = _BRANCH(body, position)
        if match is None or not is_valid_name(match[1].decode()):
            raise BadRequestError(f"no branch begins at byte {position} of the body, where number {number} should")
        start = match.end()
        position = start + int(match[3])
        if position > len(body) or position - start > BRANCH_SIZE_BYTES_MAX:
            raise BadRequestError(f"branch {number} is cut short, or over {BRANCH_SIZE_BYTES_MAX} bytes")
        details = _details(bytes(body[start:position]), number)
        found.append({"resource": match[1].decode(), "uuid": match[2].decode(), **details})
    if count > 1:
        _refuse_twins([branch["uuid"] for branch in found])
    return found, position


def _plain(match: re.Match[bytes]) -> dict[str, Any] | None:
    """What ``_PLAIN`` has found, if it is a branch."""
    resource, uuid, size, text, bqual, connection, wrote, marker, table = match.groups()
    if int(size) != len(text) or not is_valid_name(name := resource.decode()):
        return None
    if not is_valid_table(table_name := table.decode()):
        return None
    return {
        "resource": name, "uuid": uuid.decode(), "bqual": bqual.decode(), "connection": int(connection),
        "wrote": wrote == b"true", "marker": marker == b"true", "table": table_name,
    }  # fmt: skip


def branches_json(branches: Sequence[Mapping[str, Any]]) -> str:
    """``split_branches`` as JSON: what an encoder makes of it that keeps what is not ASCII, in less of its time."""
    listed = [
        f'{{"resource": "{branch["resource"]}", "uuid": "{branch["uuid"]}", {_as_json(_AS_TEXT, branch)[1:]}'
        for branch in branches
    ]
    return f"[{', '.join(listed)}]"


def _as_json(string: Callable[[str], str], details: Mapping[str, Any]) -> str:
    """The details of a branch; ``string`` writes one string."""
    connection = details["connection"]
    told = "null" if connection is None else int(connection)  # an older broker kept true, too, which JSON writes small
    return (
        f'{{"bqual": {string(details["bqual"])}, "connection": {told}, '
        f'"wrote": {"true" if details["wrote"] else "false"}, "marker": {"true" if details["marker"] else "false"}, '
        f'"table": {string(details["table"])}}}'
    )


def _details(text: bytes, number: int) -> dict[str, Any]:
    details = read_json(text)
    if not isinstance(details, dict) or details.keys() != _DETAILS.keys():
        raise BadRequestError(f"branch {number}: expected a JSON object of {', '.join(_DETAILS)}")
    for name, kind in _DETAILS.items():
        if not isinstance(details[name], kind):
            raise BadRequestError(f"branch {number}: {name} is not what it should be")
    if not is_bqual_text(details["bqual"]):
        raise BadRequestError(f"branch {number}: bqual is at most 64 printable ASCII characters, without a space")
    connection = details["connection"]
    if isinstance(connection, bool) or not 0 <= (connection or 0) < _CONNECTION_END:
        raise BadRequestError(f"branch {number}: connection is a number from 0 to 2^64-1, or null")
    if not is_valid_table(details["table"]):
        raise BadRequestError(f"branch {number}: table is no table's name")
    return details


def _refuse_twins(uuids: Sequence[str]) -> None:
    if len(set(uuids)) != len(uuids):
        raise BadRequestError("a resource has one branch: a uuid stands twice")
