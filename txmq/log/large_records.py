"""Records whose values stay where they are, for batches in which values are large: they can be looked at uncopied.

The layout of a record is in ``records``. Its library copies what it gives out: 0.6 us for a record of 16 KiB, 1.5 for
one of 64, 4.5 for one of 256. This reader, in plain Python, takes 3.3 us for any, and gives out views.

Invariants:
    * a record that does not end where its length says, or does not fill its section together with the others, is an
      error before it is given out; steps are bounded by the bytes that there are, not by what a field claims;
    * a view is of the section's own memory: it is valid as long as it is kept, and keeps that memory.

Source: Apache Kafka protocol guide, "Record".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from txmq.errors import InvalidBatchError
from txmq.log.batch import HEADER, HEADER_SIZE
from txmq.runtime.ports import Buffer

SIZE_BYTES_MIN: Final = 256 << 10  # of the mean record of a batch: from here on a view is cheaper than a copy
NOWHERE: Final = 1 << 60  # past every end
_VARINT_SIZE_BYTES_MAX: Final = 10


class LargeRecord(NamedTuple):
    """One record; the names are those of the library's."""

    offset: int
    timestamp: int
    key: bytes | None
    value: memoryview | None
    headers: list[tuple[str, bytes | None]]


def read(batch: Buffer) -> Iterator[LargeRecord]:
    """The records of an uncompressed batch.

    Raises:
        InvalidBatchError, ValueError, IndexError: a record contradicts its batch or itself.
    """
    fields = HEADER.unpack_from(batch)
    base_offset, first_ms, count = fields[0], fields[7], fields[12]
    view, at = memoryview(batch).toreadonly(), HEADER_SIZE
    for number in range(count):
        length, at = varint(view, at)
        limit = at + length
        if length < 0 or limit > len(view):
            raise InvalidBatchError(f"record {number} is longer than its batch")
        delta_ms, at = varint(view, at + 1)
        delta, at = varint(view, at)
        key, at = _content(view, at, limit)
        value, at = _content(view, at, limit)
        headers, at = _headers(view, at, limit)
        if at != limit:
            raise InvalidBatchError(f"record {number} does not have the length it says")
        yield LargeRecord(base_offset + delta, first_ms + delta_ms, None if key is None else bytes(key), value, headers)
    if at != len(view):
        raise InvalidBatchError(f"{len(view) - at} bytes behind the last record")


def _content(view: memoryview, at: int, limit: int) -> tuple[memoryview | None, int]:
    """A key or a value, and where it ends."""
    size, at = varint(view, at)
    if size < 0:
        return None, at
    if at + size > limit:
        raise InvalidBatchError("a key or value is longer than its record")
    return view[at : at + size], at + size


def _headers(view: memoryview, at: int, limit: int) -> tuple[list[tuple[str, bytes | None]], int]:
    count, at = varint(view, at)
    if not 0 <= count <= limit - at:
        raise InvalidBatchError(f"{count} headers announced")
    found: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, at = _content(view, at, limit)
        value, at = _content(view, at, limit)
        if name is None:
            raise InvalidBatchError("a header without a key")
        found.append((str(name, "utf-8"), None if value is None else bytes(value)))
    return found, at


def varint(buffer: Buffer, at: int) -> tuple[int, int]:
    """Read one zigzag varint; its value and the position after it, ``NOWHERE`` if it is not whole."""
    plain = 0
    for number in range(_VARINT_SIZE_BYTES_MAX):
        if at + number >= len(buffer):
            break
        byte = buffer[at + number]
        plain |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return plain >> 1 ^ -(plain & 1), at + number + 1
    return 0, NOWHERE
