"""Where every field of every record of many batches lies, without a loop over records.

Theory of operation. A record begins with its length: where the next one begins is known only by following the chain.
The chains of all batches are followed in lockstep: step n finds the n-th record of every batch that has one. Where
fewer than ``LOCKSTEP_MIN`` batches are left a plain loop is faster; the same loop takes batches with a record of 8 KiB
or more, whose length has more than two bytes: bytes outnumber records there. Once the starts are known, fields are read
for all records at once; headers in lockstep again, the n-th header of every record that has one.

Fields are zigzag varints, read by the hundred thousand. One of one or two bytes (-8192 to 8191: nearly all there are)
is looked up in a table by the 16 bits that begin at it; one table entry is value and size. Longer ones are put together
byte by byte, for all of them at once. ``log.records.varint`` is the same for a single one, in plain Python.

Invariants:
    * a record that does not end where its length says, or does not fill its batch's section together with the others,
      is an error: whatever is given out lies inside its record;
    * steps are bounded by counts that fit in the bytes; nothing is allocated by what a field claims;
    * positions may be anything: what lies outside the buffer is read as its first or last byte, and never crashes;
    * a varint of more than ten bytes has ``NOWHERE`` as its end, which no check of bounds lets pass.

Source: Apache Kafka protocol guide, "Record"; Protocol Buffers, "Encoding".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from txmq.log.records import NOWHERE, varint
from txmq.spark.decode.chunk import Bytes, Ints, Piece

_SIZE_BYTES_MAX: Final = 10
_SIZE_BITS: Final = 2
LOCKSTEP_MIN: Final = 64
_HEADER_SIZE_MIN: Final = 2  # of a record's header: two varints
Flags = NDArray[np.bool_]


def _table() -> NDArray[np.int32]:
    pair = np.arange(1 << 16, dtype=np.int32)
    low, high = pair & 0xFF, pair >> 8
    size = np.where(low < 0x80, 1, np.where(high < 0x80, 2, 0))
    plain = np.where(size == 1, low, low & 0x7F | high << 7)
    value = np.where(size == 0, 0, plain >> 1 ^ -(plain & 1))
    return (value << _SIZE_BITS | size).astype(np.int32)


_TABLE: Final = _table()


def read_varints(raw: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """Read one varint at every position.

    Returns:
        values, and the positions after them.
    """
    entry = lookup_varints(raw, at)
    size = entry & 3
    values: Ints = (entry >> _SIZE_BITS).astype(np.int64)
    ends: Ints = at + size
    if not size.all():
        longer = np.flatnonzero(size == 0)
        values[longer], ends[longer] = _read_longer(raw, at[longer])
    return values, ends


def lookup_varints(raw: Bytes, at: Ints) -> NDArray[np.int32]:
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


# --- records and their fields -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """Records of a piece.

    Attributes:
        starts: where each begins; ``limits``: where it must end.
        batches: in which batch of the chunk it is; ``numbers``: its number there.
    """

    piece: Piece
    starts: Ints
    limits: Ints
    batches: Ints
    numbers: Ints

    def part(self, chosen: slice | Ints) -> Rows:
        """Some of them."""
        return Rows(self.piece, self.starts[chosen], self.limits[chosen], self.batches[chosen], self.numbers[chosen])

    def refuse(self, is_bad: Flags, reason: str) -> None:
        """Raise for the first bad one.

        Raises:
            CorruptRecordError: one is.
        """
        if is_bad.any():
            self.refuse_one(int(np.argmax(is_bad)), reason)

    def refuse_one(self, row: int, reason: str) -> NoReturn:
        """Raise for one row."""
        raise self.piece.chunk.error(int(self.batches[row]), f"record {int(self.numbers[row])} {reason}")


class Span(NamedTuple):
    """The places of nullable byte strings; nothing lies between start and end of one that is null."""

    starts: Ints
    ends: Ints
    is_null: Flags

    def chosen(self, which: Ints) -> Span:
        """Some of them."""
        return Span(self.starts[which], self.ends[which], self.is_null[which])


class Headers(NamedTuple):
    """All headers of some rows, in order: the row of each, and its place."""

    rows: Ints
    keys: Span
    values: Span


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of some rows; their offsets are dense, which was checked."""

    timestamps_ms: Ints
    key: Span
    value: Span
    headers: Headers


# --- records ---------------------------------------------------------------------------------------------------------


def rows_of(piece: Piece) -> Rows:
    """Find the beginning of every record. Whether the chains are sound ``fields_of`` finds out."""
    counts = piece.chunk.counts[piece.first : piece.last]
    firsts = np.cumsum(counts) - counts
    batches = np.repeat(np.arange(len(counts)), counts)
    starts = _follow(piece, counts, firsts)
    for batch in np.unique(batches[:-1][starts[1:] == starts[:-1]]):  # lengths that the table does not know
        first, count = int(firsts[batch]), int(counts[batch])
        starts[first : first + count] = _follow_one(piece, int(piece.starts[batch]), count)
    limits = np.empty_like(starts)
    limits[:-1] = starts[1:]
    limits[firsts + counts - 1] = piece.ends
    numbers = np.arange(len(starts)) - np.repeat(firsts, counts)
    return Rows(piece, starts, limits, batches + piece.first, numbers)


def _follow(piece: Piece, counts: Ints, firsts: Ints) -> Ints:
    """Follow all chains; those with long lengths get stuck."""
    starts = np.empty(int(counts.sum()), np.int64)
    order = np.argsort(-counts, kind="stable")
    at, first, count = piece.starts[order], firsts[order], counts[order]
    steps = int(count[LOCKSTEP_MIN - 1]) if len(count) >= LOCKSTEP_MIN else 0
    alive = len(count) - np.searchsorted(count[::-1], np.arange(steps), side="right")
    for step, left in enumerate(alive.tolist()):
        here = at[:left]
        starts[first[:left] + step] = here
        entry = lookup_varints(piece.raw, here)
        here += (entry & 3) + (entry >> 2)
    for batch in range(int(np.count_nonzero(count > steps))):
        row, left = int(first[batch]) + steps, int(count[batch]) - steps
        starts[row : row + left] = _follow_one(piece, int(at[batch]), left)
    return starts


def _follow_one(piece: Piece, at: int, count: int) -> list[int]:
    """Follow one chain. Hot if batches are large: a record costs what it costs in lockstep with 100 batches."""
    view = memoryview(piece.raw)  # type: ignore[arg-type]
    found, last = [at], len(view) - 1
    for _ in range(count - 1):
        if 0 <= at < last:
            low = view[at]
            if low < 0x80:
                at += 1 + (low >> 1)
            elif (high := view[at + 1]) < 0x80:
                at += 2 + ((low & 0x7F | high << 7) >> 1)
            else:
                length, at = varint(view, at)
                at = at + length if 0 <= length <= last else NOWHERE
        found.append(at)
    return found


def fields_of(rows: Rows) -> Fields:
    """Read the fields of all rows.

    Raises:
        CorruptRecordError: a record contradicts its batch or itself.
    """
    raw, chunk = rows.piece.raw, rows.piece.chunk
    length, at = read_varints(raw, rows.starts)
    rows.refuse((length < 0) | (at + length != rows.limits), "does not have the length it says")
    rows.refuse(raw.take(at, mode="clip") > 0x7F, "has attributes that are no plain byte")
    delta_ms, at = read_varints(raw, at + 1)
    number, at = read_varints(raw, at)
    rows.refuse(number != rows.numbers, "has another offset")
    timestamps_ms = chunk.first_ms[rows.batches] + delta_ms
    rows.refuse((timestamps_ms < -1) | (timestamps_ms > chunk.max_ms[rows.batches]), "has a time outside its batch's")
    key, at = _span(rows, at)
    value, at = _span(rows, at)
    count, at = read_varints(raw, at)
    rows.refuse((count < 0) | (count > (rows.limits - at) // _HEADER_SIZE_MIN), "has another number of headers")
    headers, at = _headers(rows, at, count)
    rows.refuse(at != rows.limits, "ends before its length does")
    return Fields(timestamps_ms, key, value, headers)


def _span(rows: Rows, at: Ints) -> tuple[Span, Ints]:
    size, at = read_varints(rows.piece.raw, at)
    is_null = size < 0
    size[is_null] = 0
    rows.refuse(size > rows.limits - at, "has a key or value longer than itself")
    ends = at + size
    return Span(at, ends, is_null), ends


# --- headers ---------------------------------------------------------------------------------------------------------


def _headers(rows: Rows, at: Ints, counts: Ints) -> tuple[Headers, Ints]:
    """Read all headers; also where each row's last one ends."""
    found: list[Headers] = []
    at, step = at.copy(), 0
    while len(left := np.flatnonzero(counts > step)) >= LOCKSTEP_MIN:
        part = rows.part(left)
        key, value_at = _span(part, at[left])
        part.refuse(key.is_null, "has a header without a key")
        value, at[left] = _span(part, value_at)
        found.append(Headers(left, key, value))
        step += 1
    for row in left.tolist():
        some, at[row] = _headers_of_one(rows, row, int(at[row]), int(counts[row]) - step)
        found.append(some)
    return _in_order(found), at


def _headers_of_one(rows: Rows, row: int, at: int, count: int) -> tuple[Headers, int]:
    """The same in a loop, for a row when few are left."""
    view, limit = memoryview(rows.piece.raw), int(rows.limits[row])  # type: ignore[arg-type]
    spans: list[tuple[int, int, bool]] = []
    for _ in range(2 * count):  # key, value, key, value ...
        size, at = varint(view, at)
        if size > limit - at or (size < 0 and len(spans) % 2 == 0):
            rows.refuse_one(row, "has a header longer than itself, or without a key")
        spans.append((at, at + max(size, 0), size < 0))
        at += max(size, 0)
    return Headers(np.full(count, row, np.int64), _as_span(spans[::2]), _as_span(spans[1::2])), at


def _as_span(spans: list[tuple[int, int, bool]]) -> Span:
    columns = np.array(spans, np.int64).reshape(-1, 3).T
    return Span(columns[0], columns[1], columns[2] != 0)


def _in_order(found: list[Headers]) -> Headers:
    if not found:
        return Headers(np.empty(0, np.int64), _as_span([]), _as_span([]))
    if len(found) == 1:
        return found[0]
    rows = np.concatenate([some.rows for some in found])
    order = np.argsort(rows, kind="stable")
    keys, values = (_joined([some.keys for some in found]), _joined([some.values for some in found]))
    return Headers(rows[order], keys.chosen(order), values.chosen(order))


def _joined(spans: list[Span]) -> Span:
    return Span(*(np.concatenate([span[column] for span in spans]) for column in range(3)))
