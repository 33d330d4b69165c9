"""Zigzag varints by the hundred thousand: what ``arrow_columns`` reads records with.

Theory of operation. A varint of one or two bytes (-8192 to 8191: nearly all there are) is looked up in a table by the
16 bits that begin at it; one table entry is value and size. Longer ones are put together byte by byte, for all of them
at once. ``large_records.varint`` is the same for a single one, in plain Python.

Invariants:
    * positions may be anything: what lies outside the buffer is read as its first or last byte, and never crashes;
    * a varint of more than ten bytes has ``NOWHERE`` as its end, which no check of bounds lets pass.

Source: Protocol Buffers, "Encoding"; Apache Kafka protocol guide, "Record".
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from txmq.log.large_records import NOWHERE

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_SIZE_BYTES_MAX: Final = 10
_SIZE_BITS: Final = 2


def _table() -> NDArray[np.int32]:
    pair = np.arange(1 << 16, dtype=np.int32)
    low, high = pair & 0xFF, pair >> 8
    size = np.where(low < 0x80, 1, np.where(high < 0x80, 2, 0))
    plain = np.where(size == 1, low, low & 0x7F | high << 7)
    value = np.where(size == 0, 0, plain >> 1 ^ -(plain & 1))
    return (value << _SIZE_BITS | size).astype(np.int32)


_TABLE: Final = _table()


def read(raw: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """Read one varint at every position.

    Returns:
        values, and the positions after them.
    """
    entry = lookup(raw, at)
    size = entry & 3
    values: Ints = (entry >> _SIZE_BITS).astype(np.int64)
    ends: Ints = at + size
    if not size.all():
        longer = np.flatnonzero(size == 0)
        values[longer], ends[longer] = _read_longer(raw, at[longer])
    return values, ends


def lookup(raw: Bytes, at: Ints) -> NDArray[np.int32]:
    """Value << 2 | size of the varint at every position; 0 if it has more than two bytes."""
    pair: Any = raw.take(at, mode="clip").astype(np.uint16)
    pair |= raw.take(at + 1, mode="clip").astype(np.uint16) << 8
    found: NDArray[np.int32] = _TABLE.take(pair)
    return found


def _read_longer(raw: Bytes, at: Ints) -> tuple[Ints, Ints]:
    plain = np.zeros(len(at), np.uint64)
    ends = np.full(len(at), NOWHERE, np.int64)
    for number in range(_SIZE_BYTES_MAX):
        byte = raw.take(at + number, mode="clip")
        is_open = ends == NOWHERE
        plain[is_open] |= (byte[is_open] & 0x7F).astype(np.uint64) << np.uint64(7 * number)
        is_last = is_open & (byte < 0x80)
        ends[is_last] = at[is_last] + number + 1
        if not (is_open & ~is_last).any():
            break
    values = (plain >> np.uint64(1)).astype(np.int64) ^ -(plain & np.uint64(1)).astype(np.int64)
    return values, ends
