"""The rows in the bodies of ``group``: JSON arrays that say which partition, under which generation, how far.

Invariants
    * A row that is handed out names a topic by a valid name, and a partition by a number from 0 on.
"""

from __future__ import annotations

from typing import Any

from txmq.errors import BadRequestError
from txmq.protocol.json_text import read_json
from txmq.protocol.offsets import is_number, is_topic, offset_row

Slot = tuple[str, int]  # topic, partition


def split_rows(body: bytearray | None) -> list[list[Any]]:
    """The rows of a body, unchecked; an empty one has none.

    Raises:
        BadRequestError: it is no array of arrays.
    """
    rows = read_json(body) if body else []
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise BadRequestError("the body is a JSON array of arrays")
    return rows


def slot_row(row: list[Any]) -> Slot:
    """``[topic, partition]``.

    Raises:
        BadRequestError: it is not one.
    """
    if len(row) != 2 or not is_topic(row[0]) or not is_number(row[1]):
        raise BadRequestError("a partition is [topic, partition]")
    return row[0], row[1]


def claim_row(row: list[Any]) -> tuple[Slot, int]:
    """``[topic, partition, generation]``, or with an offset in its place.

    Raises:
        BadRequestError: it is not one.
    """
    if len(row) != 3 or not is_number(row[2]):
        raise BadRequestError("a partition that is held is [topic, partition, generation]")
    return slot_row(row[:2]), row[2]


def aside_row(row: list[Any]) -> tuple[Slot, str | None, str | None]:
    """``[topic, partition, known, wanted]``.

    Raises:
        BadRequestError: it is not one.
    """
    if len(row) != 4:
        raise BadRequestError("what is aside is changed by [topic, partition, known, wanted]")
    slot = slot_row(row[:2])
    known, wanted = (offset_row([*slot, 0, 0, text]).aside for text in row[2:])
    return slot, known, wanted
