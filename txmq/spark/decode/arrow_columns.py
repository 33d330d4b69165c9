"""Record batches as Arrow columns: the vectorised decoder of everything that Spark reads, and the columns there are.

Theory of operation. ``chunk`` checks batches, ``fields`` finds where each field of each record lies; here the columns
are made of it. Keys and values are one Arrow array over the raw buffer, whose offsets are key start, key end, value
start, value end, key start ... : ``take`` of every fourth element copies them out.

A transaction's id stands on the first record of each of its batches (header ``txmq.txid``) and is given to all their
rows; it is not among the headers that are given out. A time of -1 ("none") is null, and so are the headers of a record
that has none, as in Spark's Kafka source.

Spark tells a Python source neither which columns a query uses nor which it aggregates, so everything declared is made
and shipped. ``columns`` (an option) and ``.schema(...)`` declare less.

Invariants: rows come in order of their offsets, without a hole; all of a piece is checked before any row of it is given
out, also rows that are cut off; a record batch holds ``ROWS_MAX`` rows at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from txmq.errors import ConfigError
from txmq.log.records import TXID_HEADER
from txmq.spark.decode.chunk import Bytes, Chunk, Ints, pieces
from txmq.spark.decode.fields import Headers, Rows, Span, fields_of, rows_of

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

ROWS_MAX: Final = 100_000
_TXID: Final = np.frombuffer(TXID_HEADER.encode(), np.uint8)
_HEADER: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
TYPES: Final[dict[str, Any]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "headers": pa.list_(pa.field("element", _HEADER)),
    "txid": pa.string(),
}
"""Every column there is, by name, in order."""
_HEADERS: Final = "headers"


def decode(chunk: Chunk, columns: Sequence[str], start: int, end: int) -> Iterator[pa.RecordBatch]:
    """The chunk's records as columns.

    Args:
        columns: names of ``TYPES``, in the order wanted.
        start: rows of a lower offset are cut off, and so are those from ``end`` on.

    Raises:
        CorruptRecordError: a batch contradicts itself; names file and position, and which record.
    """
    schema = pa.schema([(name, TYPES[name]) for name in columns])
    for piece in pieces(chunk):
        rows = rows_of(piece)
        txids = np.full(piece.last - piece.first, None, object)
        offset = int(chunk.bases[piece.first])
        parts = -(-len(rows.starts) // ROWS_MAX)
        size = -(-len(rows.starts) // parts)  # equal parts: a small rest costs as much as a large one
        for first in range(0, len(rows.starts), size):
            part = rows.part(slice(first, first + size))
            maker = _Columns(part, txids, offset + first)
            low, high = max(start - maker.offset, 0), min(end - maker.offset, len(part.starts))
            if low < high:
                arrays = [maker.make(name) for name in columns]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema).slice(low, high - low)


class _Columns:
    """The columns of some rows, each made when it is asked for.

    Args:
        txids: by batch of the piece; what the rows say of them is added.
        offset: of the first row.
    """

    def __init__(self, rows: Rows, txids: Any, offset: int) -> None:
        self._rows, self._fields, self._txids, self.offset = rows, fields_of(rows), txids, offset
        self._count = len(rows.starts)
        self._kept = self._without_txids(self._fields.headers)
        self._names = self._header_names()
        self._pairs: Any = None

    def make(self, name: str) -> pa.Array:
        """One column."""
        array: pa.Array = getattr(self, f"_{name}")()
        return array

    def _key(self) -> pa.Array:
        return self._taken(0, self._fields.key)

    def _value(self) -> pa.Array:
        return self._taken(2, self._fields.value)

    def _topic(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._rows.piece.chunk.origin.topic, pa.string()), self._count)

    def _partition(self) -> pa.Array:
        return pa.array(np.full(self._count, self._rows.piece.chunk.origin.partition, np.int32))

    def _offset(self) -> pa.Array:
        return pa.array(np.arange(self.offset, self.offset + self._count))

    def _timestamp(self) -> pa.Array:
        times_ms = self._fields.timestamps_ms
        is_null = times_ms < 0
        return pa.array(times_ms * 1000, mask=is_null if is_null.any() else None).view(TYPES["timestamp"])

    def _txid(self) -> pa.Array:
        if all(txid is None for txid in self._txids):
            return pa.nulls(self._count, pa.string())
        return pa.array(self._txids, pa.string()).take(pa.array(self._rows.batches - self._rows.piece.first))

    def _taken(self, which: int, span: Span) -> pa.Array:
        if self._pairs is None:
            self._pairs = _paired(self._rows.piece.raw, self._fields.key, self._fields.value)
        return _take(self._pairs, which, span)

    def _headers(self) -> pa.Array:
        kept, raw = self._kept, self._rows.piece.raw
        counts = np.bincount(kept.rows, minlength=self._count)
        offsets = np.zeros(self._count + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        values = _take(_paired(raw, kept.keys, kept.values), 2, kept.values)
        entries = pa.StructArray.from_arrays([self._names, values], fields=list(_HEADER))
        none = pa.array(counts == 0)
        return pa.ListArray.from_arrays(pa.array(offsets), entries, type=TYPES["headers"], mask=none)

    # --- headers -----------------------------------------------------------------------------------------------------

    def _header_names(self) -> pa.Array:
        """Made in any case: a name that is no text is damage, whatever columns are wanted."""
        kept = self._kept
        names = _take(_paired(self._rows.piece.raw, kept.keys, kept.values), 0, kept.keys)
        try:
            return names.cast(pa.string())
        except pa.ArrowInvalid:
            for row, name in zip(kept.rows.tolist(), names.to_pylist(), strict=True):
                if not _is_text(name):
                    self._rows.refuse_one(row, "has a header whose name is not UTF-8")
            raise

    def _without_txids(self, headers: Headers) -> Headers:
        """Take the transactions' ids out of the headers, and those on a batch's first record down."""
        raw, key, value = self._rows.piece.raw, headers.keys, headers.values
        named = np.flatnonzero(key.ends - key.starts == len(_TXID))
        named = named[(raw[key.starts[named][:, None] + np.arange(len(_TXID))] == _TXID).all(axis=1)]
        if not len(named):
            return headers
        for header in named[self._rows.numbers[headers.rows[named]] == 0].tolist():
            text = raw[value.starts[header] : value.ends[header]].tobytes().decode("ascii", "replace")
            self._txids[self._rows.batches[headers.rows[header]] - self._rows.piece.first] = text
        kept = np.delete(np.arange(len(headers.rows)), named)
        return Headers(headers.rows[kept], key.chosen(kept), value.chosen(kept))


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _paired(raw: Bytes, first: Span, second: Span) -> pa.Array:
    """One array over the raw buffer: elements 4n and 4n+2 are the n-th of ``first`` and of ``second``."""
    offsets = np.zeros(4 * len(first.starts), np.int32)
    offsets[0::4], offsets[1::4], offsets[2::4], offsets[3::4] = first.starts, first.ends, second.starts, second.ends
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(raw)]
    return pa.Array.from_buffers(pa.binary(), max(len(offsets) - 1, 0), buffers)


def _take(pairs: pa.Array, which: int, span: Span) -> pa.Array:
    chosen: Ints = np.arange(which, 4 * len(span.starts), 4)
    is_null = span.is_null if span.is_null.any() else None
    return pairs.take(pa.array(chosen, mask=is_null))


# --- the columns as Spark sees them -----------------------------------------------------------------------------------


def _spark_types() -> dict[str, DataType]:
    from pyspark.sql import types

    header = types.StructType(
        [types.StructField("key", types.StringType()), types.StructField("value", types.BinaryType())]
    )
    return {
        "key": types.BinaryType(),
        "value": types.BinaryType(),
        "topic": types.StringType(),
        "partition": types.IntegerType(),
        "offset": types.LongType(),
        "timestamp": types.TimestampType(),
        _HEADERS: types.ArrayType(header),
        "txid": types.StringType(),
    }


def schema_of(names: tuple[str, ...] | None, has_headers: bool) -> StructType:
    """The columns that are read if none are declared with ``.schema(...)``.

    Raises:
        ConfigError: the option ``columns`` names one that does not exist, or one twice.
    """
    from pyspark.sql.types import StructField, StructType

    if names is None:
        names = tuple(name for name in TYPES if has_headers or name != _HEADERS)
    for name in names:
        if name not in TYPES or names.count(name) > 1:
            raise ConfigError(f"option columns: {name!r} is not one of {', '.join(TYPES)}, once each")
    known = _spark_types()
    return StructType([StructField(name, known[name]) for name in names])


def names_of(schema: StructType) -> tuple[str, ...]:
    """The columns a reader must make, in order; checks what a user declared with ``.schema(...)``.

    Raises:
        ConfigError: a column that does not exist, or of another type.
    """
    known = _spark_types()
    for field in schema.fields:
        if field.dataType != known.get(field.name) or not field.nullable:
            listed = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
            declared = f"{field.name} {field.dataType.simpleString()}{'' if field.nullable else ' not null'}"
            raise ConfigError(f"schema: {declared} is not one of the columns there are: {listed}")
    return tuple(field.name for field in schema.fields)
