"""The rows of consumer groups: JSON arrays that say which partition, under which generation, how far.

Byte layout
    They are in the bodies of ``group``; and before the parts in the body of a transaction that saves offsets, and in
    its meta. There ``offsets=<bytes>`` says how many bytes of JSON stand before the parts (after the branches, in
    ``decide``): ``[[group, order, [[topic, partition, generation, offset, deferred], ...]], ...]``, the rows as in
    ``group save``. ``order`` is the member's own number of the moment at which it looked at its offsets: it grows.

Invariants
    * Strict: a partition of a group appears once; sizes are checked before anything is made of them.
    * A row that is handed out names a topic by a valid name, and a partition by a number from 0 on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from txmq.errors import BadRequestError, TooLargeError
from txmq.model import TopicPartition, is_valid_name
from txmq.protocol.grammar import OFFSETS_SIZE_BYTES_MAX
from txmq.protocol.json_text import is_whole, read_json

Buffer = bytes | bytearray | memoryview

GROUPS_MAX = 64
ROWS_MAX = 4096  # in one request
DEFERRED_SIZE_MAX = 64 << 10
_LONG_END = 1 << 63
PIECE_SIZE_BYTES = 60 << 10  # every broker takes it, whatever its ``request_size_bytes_max``
PIECE_ROWS = 1000
_LOG: Final = re.compile(r"[0-9]{1,10}\.[0-9a-f]{16}")  # ``LogHistory.log``


class OffsetRow(NamedTuple):
    """One offset to save: the next one to be consumed, under the generation the partition was consumed under."""

    topic: str
    partition: int
    generation: int
    offset: int
    deferred: str | None


class GroupOffsets(NamedTuple):
    """The offsets that a transaction saves for one group."""

    group: str
    order: int
    rows: tuple[OffsetRow, ...]


def encode_offsets(groups: Sequence[GroupOffsets]) -> bytes:
    """The JSON before the parts; empty if there are none."""
    return json.dumps(groups, separators=(",", ":")).encode() if groups else b""


def split_offsets(body: Buffer, start: int, size: int) -> tuple[list[GroupOffsets], int]:
    """Read the offsets of a body.

    Args:
        start: where they begin.
        size: what ``offsets=`` says; 0 if the word is absent.

    Returns:
        The offsets, and where the parts begin.

    Raises:
        BadRequestError: malformed, or a partition twice.
        TooLargeError: more than ``OFFSETS_SIZE_BYTES_MAX``, or too many rows.
    """
    if not size:
        return [], start
    if size > OFFSETS_SIZE_BYTES_MAX:
        raise TooLargeError(f"offsets={size}: at most {OFFSETS_SIZE_BYTES_MAX}")
    end = start + size
    if end > len(body):
        raise BadRequestError(f"offsets={size}: more than the body holds")
    found = read_json(body[start:end])
    if not isinstance(found, list) or not 1 <= len(found) <= GROUPS_MAX:
        raise BadRequestError(f"offsets are a JSON array of 1 to {GROUPS_MAX} groups")
    refuse_too_many(sum(len(given[2]) for given in found if _has_rows(given)))
    groups = [_group(given) for given in found]
    if len({group.group for group in groups}) != len(groups):
        raise BadRequestError("offsets: a group stands twice")
    return groups, end


def refuse_too_many(rows: int) -> None:
    """Refuse what would take the broker too long.

    Raises:
        TooLargeError: more than ``ROWS_MAX``.
    """
    if rows > ROWS_MAX:
        raise TooLargeError(f"{rows} rows: at most {ROWS_MAX} in one request")


def _has_rows(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 3 and isinstance(given[2], list)


def _group(given: Any) -> GroupOffsets:
    if not _has_rows(given) or not given[2]:
        raise BadRequestError("the offsets of a group are [group, order, [row, ...]]")
    name, order, rows = given
    if not is_topic(name) or not is_number(order):
        raise BadRequestError("the offsets of a group begin with its name and a number")
    found = tuple(offset_row(row) for row in rows)
    if len({row[:2] for row in found}) != len(found):
        raise BadRequestError(f"offsets of group {name!r}: a partition stands twice")
    return GroupOffsets(name, order, found)


def offset_row(row: Any) -> OffsetRow:
    """Check one row, of ``group save`` or of a transaction.

    Raises:
        BadRequestError: it is not one.
    """
    if not isinstance(row, list) or len(row) != 5:
        raise BadRequestError("an offset is [topic, partition, generation, offset, deferred]")
    topic, partition, generation, offset, deferred = row
    if not is_topic(topic) or not is_number(partition) or not is_number(generation):
        raise BadRequestError("a partition that is held is [topic, partition, generation]")
    if not is_number(offset):
        raise BadRequestError(f"offset {str(offset)[:40]} is not a number from 0 on")
    if deferred is not None and (
        not isinstance(deferred, str) or len(deferred) > DEFERRED_SIZE_MAX or not is_whole(deferred)
    ):
        raise BadRequestError(f"what is deferred is text of at most {DEFERRED_SIZE_MAX} characters, or null")
    return OffsetRow(topic, partition, generation, offset, deferred)


def is_topic(value: Any) -> bool:
    """Whether it may name a topic."""
    return isinstance(value, str) and is_valid_name(value)


def is_number(value: Any) -> bool:
    """Whether it may be a partition, a generation or an offset."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LONG_END


def partitions_at_first(described: Mapping[str, Any], topic: str, default: int) -> int:
    """How many partitions a topic had when a home first handed one to a group; ``default`` if it never did.

    A home that has handed some out before it kept that number (it was alone then) had handed out all there were.
    """
    known = described.get("began", {}).get(topic)
    if known is not None:
        return int(known)
    rows = [row for row in described["partitions"] if row["topic"] == topic]
    handed = [row["partition"] for row in rows if row["generation"] or row["offset"] is not None]
    return max(handed) + 1 if handed else default


def in_pieces(rows: Iterable[Sequence[Any]]) -> list[list[Sequence[Any]]]:
    """Rows as the bodies of one request each, at least of one: few enough, and small enough together."""
    pieces: list[list[Sequence[Any]]] = [[]]
    size = 0
    for row in rows:
        row_size = len(json.dumps(row)) + 2
        if pieces[-1] and (size + row_size > PIECE_SIZE_BYTES or len(pieces[-1]) == PIECE_ROWS):
            pieces.append([])
            size = 0
        pieces[-1].append(row)
        size += row_size
    return pieces


def split_rows(body: bytearray | None) -> list[list[Any]]:
    """The rows of a body, unchecked; an empty one has none.

    Raises:
        BadRequestError: it is no array of arrays.
        TooLargeError: it is one of too many.
    """
    rows = read_json(body) if body else []
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise BadRequestError("the body is a JSON array of arrays")
    refuse_too_many(len(rows))
    return rows


def slot_row(row: list[Any]) -> TopicPartition:
    """``[topic, partition]``.

    Raises:
        BadRequestError: it is not one.
    """
    if len(row) != 2 or not is_topic(row[0]) or not is_number(row[1]):
        raise BadRequestError("a partition is [topic, partition]")
    return row[0], row[1]


def claimed_row(row: list[Any]) -> tuple[TopicPartition, int, tuple[int, str] | None]:
    """``[topic, partition, generation]``, and ``[..., offset, log]`` of a member that says how far it has read where.

    Raises:
        BadRequestError: it is not one.
    """
    slot, generation = numbered_row(row[:3])
    if len(row) == 3:
        return slot, generation, None
    if len(row) != 5 or not is_number(row[3]) or not isinstance(row[4], str) or _LOG.fullmatch(row[4]) is None:
        raise BadRequestError("a partition that is claimed is [topic, partition, generation, offset, log]")
    return slot, generation, (row[3], row[4])


def numbered_row(row: list[Any]) -> tuple[TopicPartition, int]:
    """``[topic, partition, generation]``, or with an offset in its place.

    Raises:
        BadRequestError: it is not one.
    """
    if len(row) != 3 or not is_number(row[2]):
        raise BadRequestError("a partition that is held is [topic, partition, generation]")
    return slot_row(row[:2]), row[2]


def deferred_row(row: list[Any]) -> tuple[TopicPartition, str | None, str | None]:
    """``[topic, partition, known, wanted]``.

    Raises:
        BadRequestError: it is not one.
    """
    if len(row) != 4:
        raise BadRequestError("what is deferred is changed by [topic, partition, known, wanted]")
    slot = slot_row(row[:2])
    known, wanted = (offset_row([*slot, 0, 0, text]).deferred for text in row[2:])
    return slot, known, wanted
