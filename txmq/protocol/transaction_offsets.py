"""The offsets that a transaction saves for consumer groups: before the parts in a body, and in meta.

Byte layout
    ``offsets=<bytes>`` says how many bytes of JSON stand before the parts (after the branches, in ``decide``):
    ``[[group, order, [[topic, partition, generation, offset, deferred], ...]], ...]``, the rows as in ``group save``.
    ``order`` is the member's own number of the moment at which it looked at its offsets: it grows.

Invariants
    * Strict: a partition of a group appears once; sizes are checked before anything is made of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from txmq.errors import BadRequestError, TooLargeError
from txmq.model import is_valid_name
from txmq.protocol.grammar import OFFSETS_SIZE_BYTES_MAX
from txmq.protocol.json_text import is_whole, read_json

Buffer = bytes | bytearray | memoryview

GROUPS_MAX = 64
ROWS_MAX = 4096  # in one request
DEFERRED_SIZE_MAX = 64 << 10
_LONG_END = 1 << 63


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
