r"""Transactions on the wire: bodies of ``commit``, ``prepare`` and ``decide``, and answers to these and ``checks``.

Byte layout
    *Parts* are the messages. A body repeats
    ``<topic> <partition> <length>[ keys=<crc>,<crc>...][ id=<topic id>]\r\n<batch>``. ``keys`` are the
    CRC32C of the keys in the batch, ascending, at most 64 of them, or ``*`` for any; without the word the batch has no
    keys. ``id`` says which topic of that name is meant.

    *Branches* of an XA transaction stand before the parts in the body of ``decide``:
    ``<resource> <uuid, 32 hex> <length>\r\n<JSON object>``, as many as ``branches=`` says. The object has ``bqual``
    (at most 64 printable ASCII characters), ``connection`` (the database's number for the owner's connection, below
    2^64, or null), ``wrote`` and ``marker`` (whether a marker row proves the outcome) and ``table`` (the marker table,
    under its name in SQL).

    An answer repeats ``<topic> <partition> <base offset> <count>\n``, with ``-`` as base offset while the part waits
    for its place; the answer to ``outcome`` has the outcome's own line before them.

    *Half messages* that are due for a check-back are the answer to ``checks``. It repeats
    ``<txid> <attempt> <age ms> <length>\r\n`` and so many bytes of parts.

Invariants
    * Strict both ways: one content has one text, and every byte belongs to a part.
    * At most 10,000 parts a request, each of at least one byte: a request cannot make many objects out of few bytes.
      At most 64 branches, each of at most 1 KiB.
    * Batches are copied out of the body: the broker writes offsets into them.
    * One branch a resource: a uuid appears once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from txmq.errors import BadRequestError, LocalProtocolError, RemoteProtocolError
from txmq.model import is_valid_name, is_valid_table
from txmq.protocol.json_text import read_json
from txmq.xid import is_bqual_text

Buffer = bytes | bytearray | memoryview

PARTS_MAX = 10_000  # in one request
KEYS_MAX = 64  # in one part; more are said as "any"
ANY_KEYS = None  # Part.keys where keys are not listed: collides with every other part of the partition
NO_KEYS: frozenset[int] = frozenset()

_NUMBER = rb"(?:0|[1-9][0-9]{0,9})"
_PART = re.compile(
    rb"([!-~]{1,200}) (%b) ([1-9][0-9]{0,9})(?: keys=(\*|%b(?:,%b){0,63}))?(?: id=([1-9][0-9]{0,9}))?\r\n"
    % (_NUMBER, _NUMBER, _NUMBER)
).match
_RESULT = re.compile(rb"([!-~]{1,200}) (%b) (-|0|[1-9][0-9]{0,19}) ([1-9][0-9]{0,9})\n" % _NUMBER).match
_OUTCOME = re.compile(rb"(committed|rolled-back|prepared|unknown)\n").match
WirePart = tuple[bytes, bytes, bytearray, bytes | None, bytes | None]
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
_HEAD = re.compile(rb"([!-~]{1,64}) ([1-9][0-9]{0,9}) (0|[1-9][0-9]{0,19}) (0|[1-9][0-9]{0,9})\r\n").match


class Part(NamedTuple):
    """One batch of a transaction.

    Attributes:
        keys: None (``ANY_KEYS``) if the batch may hold any key.
        topic_id: of the topic that is meant; 0 for any of that name.
    """

    topic: str
    partition: int
    batch: bytearray
    keys: frozenset[int] | None
    topic_id: int


class PartResult(NamedTuple):
    """The place of a part: offsets ``base_offset`` to ``base_offset + count - 1``; None while it has no place yet."""

    topic: str
    partition: int
    base_offset: int | None
    count: int  # type: ignore[assignment]  # hides tuple.count, which no caller uses


def encode_part(
    topic: str, partition: int, batch: Buffer, keys: Collection[int] | None = NO_KEYS, topic_id: int = 0
) -> list[Buffer]:
    """The buffers of one part; more than 64 keys become "any". Without ``topic_id`` any topic of the name is meant.

    Raises:
        LocalProtocolError: the name, the partition, a key's CRC, the id or the batch cannot be carried.
    """
    size = memoryview(batch).nbytes
    if not is_valid_name(topic) or not 0 <= partition < 10**10 or not 0 < size < 10**10 or not 0 <= topic_id < 10**10:
        raise LocalProtocolError(f"cannot send a part of {size} bytes for partition {partition} of {topic[:80]!r}")
    if keys is None or len(keys) > KEYS_MAX:
        listed = " keys=*"
    else:
        listed = " keys=" + ",".join(map(str, _ascending(keys))) if keys else ""
    meant = f" id={topic_id}" if topic_id else ""
    return [f"{topic} {partition} {size}{listed}{meant}\r\n".encode("ascii"), batch]


def _ascending(keys: Collection[int]) -> list[int]:
    ascending = sorted(keys)
    if ascending[0] < 0 or ascending[-1] >= 1 << 32:
        raise LocalProtocolError(f"{ascending[0]} or {ascending[-1]} is not a CRC32C")
    return ascending


def parse_parts(body: Buffer) -> list[Part]:
    """Read the body of ``commit`` or ``prepare``; an empty one has no parts.

    Raises:
        BadRequestError: it is not a sequence of whole parts, or there are too many.
    """
    return [
        Part(topic.decode("ascii"), int(partition), batch, parse_keys(keys), int(topic_id or 0))
        for topic, partition, batch, keys, topic_id in split_parts(body)
    ]


"""Topic and partition as they stand on the wire, the batch, and the words after ``keys=`` and ``id=``."""


def split_parts(body: Buffer) -> list[WirePart]:
    """The same, with topic, partition, keys and id as they stand on the wire; only their syntax is checked.

    Raises:
        BadRequestError: as ``parse_parts``.
    """
    parts: list[WirePart] = []
    position, size = 0, len(body)
    while position < size:
        match = _PART(body, position)
        if match is None:
            raise BadRequestError(f"no part begins at byte {position} of the body")
        if len(parts) == PARTS_MAX:
            raise BadRequestError(f"a request has at most {PARTS_MAX} parts")
        topic, partition, length, keys, topic_id = match.groups()
        start = match.end()
        end = start + int(length)
        if end > size:
            raise BadRequestError(
                f"the part at byte {position} of the body is cut short: {end - size} bytes are missing"
            )
        batch = body[start:end]
        parts.append((topic, partition, batch if isinstance(batch, bytearray) else bytearray(batch), keys, topic_id))
        position = end
    return parts


def parse_keys(text: bytes | None) -> frozenset[int] | None:
    """Read the word after ``keys=``.

    Raises:
        BadRequestError: they are not CRC32Cs in ascending order.
    """
    if text is None:
        return NO_KEYS
    listed = list_keys(text)
    return ANY_KEYS if listed is None else frozenset(listed)


def list_keys(text: bytes) -> list[int] | None:
    """The same in order; None (``ANY_KEYS``) for ``*``.

    Raises:
        BadRequestError: as ``parse_keys``.
    """
    if text == b"*":
        return ANY_KEYS
    keys = [int(word) for word in text.split(b",")]
    if keys[-1] >= 1 << 32 or (len(keys) > 1 and any(later <= earlier for earlier, later in pairwise(keys))):
        raise BadRequestError("keys are CRC32Cs in ascending order, each once")
    return keys


def encode_result_line(topic: str, partition: int, base_offset: int | None, count: int) -> bytes:
    """One line of the answer to ``commit``; without an offset: the part waits for its place."""
    offset = b"-" if base_offset is None else b"%d" % base_offset
    return b"%b %d %b %d\n" % (topic.encode("ascii"), partition, offset, count)


def parse_result_lines(body: bytes) -> list[PartResult]:
    """Read the answer to ``commit``.

    Raises:
        RemoteProtocolError: it is not one.
    """
    results: list[PartResult] = []
    position = 0
    while position < len(body):
        match = _RESULT(body, position)
        if match is None:
            raise RemoteProtocolError(f"no result line at byte {position} of {body[:80]!r}")
        topic, partition, base_offset, count = match.groups()
        offset = None if base_offset == b"-" else int(base_offset)
        results.append(PartResult(topic.decode("ascii"), int(partition), offset, int(count)))
        position = match.end()
    return results


def parse_outcome(body: bytes) -> tuple[str, list[PartResult]]:
    """Read the answer to ``outcome``: ``committed``, ``rolled-back``, ``prepared`` or ``unknown``, and the results.

    Raises:
        RemoteProtocolError: it is not one.
    """
    match = _OUTCOME(body)
    if match is None:
        raise RemoteProtocolError(f"not an outcome: {body[:80]!r}")
    end = match.end()
    results = parse_result_lines(body[end:])
    if results and match[1] != b"committed":
        raise RemoteProtocolError(f"results of a transaction that is not committed: {body[:80]!r}")
    return match[1].decode("ascii"), results


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
    return {name: details[name] for name in _DETAILS}  # in the order in which they are journaled


def _refuse_twins(uuids: Sequence[str]) -> None:
    if len(set(uuids)) != len(uuids):
        raise BadRequestError("a resource has one branch: a uuid stands twice")


class DueHalf(NamedTuple):
    """One half message.

    Attributes:
        attempt: how often it has been handed out, this time included.
        parts: topic, partition and record batch.
    """

    txid: str
    attempt: int
    age_ms: int
    parts: tuple[tuple[str, int, bytearray], ...]


def encode_half(half: DueHalf) -> bytes:
    """One half of the answer."""
    parts = b"".join(buffer for part in half.parts for buffer in encode_part(*part))
    return f"{half.txid} {half.attempt} {half.age_ms} {len(parts)}\r\n".encode() + parts


def split_halves(body: Buffer) -> list[DueHalf]:
    """Read the answer to ``checks``.

    Raises:
        RemoteProtocolError: it is not one.
    """
    found: list[DueHalf] = []
    position = 0
    while position < len(body):
        match = _HEAD(body, position)
        if match is None:
            raise RemoteProtocolError(f"no half message at byte {position} of the answer to checks")
        start = match.end()
        position = start + int(match[4])
        if position > len(body):
            raise RemoteProtocolError(f"the answer to checks is cut short: {position - len(body)} bytes are missing")
        try:
            parts = split_parts(memoryview(body)[start:position])
        except BadRequestError as error:
            raise RemoteProtocolError(f"answer to checks: {error}") from None
        named = tuple((topic.decode("ascii"), int(partition), batch) for topic, partition, batch, *_ in parts)
        found.append(DueHalf(match[1].decode("ascii"), int(match[2]), int(match[3]), named))
    return found
