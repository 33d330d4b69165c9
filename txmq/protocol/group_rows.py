"""The rows in the bodies of ``group``: JSON arrays that say which partition, under which generation, how far.

Invariants
    * A row that is handed out names a topic by a valid name, and a partition by a number from 0 on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from txmq.errors import BadRequestError
from txmq.model import TopicPartition
from txmq.protocol.json_text import read_json
from txmq.protocol.transaction_offsets import is_number, is_topic, offset_row, refuse_too_many

PIECE_SIZE_BYTES = 60 << 10  # every broker takes it, whatever its ``request_size_bytes_max``
PIECE_ROWS = 1000
_LOG: Final = re.compile(r"[0-9]{1,10}\.[0-9a-f]{16}")  # ``LogHistory.log``


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
