"""The messages of a transaction on the wire: bodies of ``commit`` and ``prepare``, and the lines that answer them.

Byte layout
    A body repeats ``<topic> <partition> <length>[ keys=<crc>,<crc>...][ id=<topic id>]\\r\\n<batch>``. ``keys`` are the
    CRC32C of the keys in the batch, ascending, at most 64 of them, or ``*`` for any; without the word the batch has no
    keys. ``id`` says which topic of that name is meant.
    An answer repeats ``<topic> <partition> <base offset> <count>\\n``, with ``-`` as base offset while the part waits
    for its place; the answer to ``outcome`` has the outcome's own line before them.

Invariants
    * Strict both ways: one content has one text, and every byte belongs to a part.
    * At most 10,000 parts a request, each of at least one byte: a request cannot make many objects out of few bytes.
    * Batches are copied out of the body: the broker writes offsets into them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

from txmq.errors import BadRequestError, LocalProtocolError, RemoteProtocolError
from txmq.model import is_valid_name

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


WirePart = tuple[bytes, bytes, bytearray, bytes | None, bytes | None]
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
