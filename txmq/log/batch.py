"""Record batches as opaque units: check one at the door, stamp its place into it, walk over many.

A batch is the Kafka record batch, magic 2, the same bytes on the wire, in the journal and in the log. The broker never
looks at records: it checks header and CRC, patches the base offset and the placement CRC, both outside the batch's CRC.

Layout (big endian; 61 bytes, then the record section, compressed or not):

```
 0 q base offset          0 from a producer, the log's offset once placed
 8 i length               of everything after it: whole batch - 12
12 I placement CRC        CRC32C over (topic id u32, partition u32, bytes 0-11, magic, CRC), where Kafka has
                          PartitionLeaderEpoch
16 b magic                2
17 I CRC                  CRC32C over everything from byte 21
21 h attributes           bits 0-2 codec (0 none, 1 gzip, 3 lz4, 4 zstd); all others 0
23 i last offset delta    count - 1
27 q first timestamp      ms; -1 is "none"
35 q max timestamp        ms
43 q producer id          or -1
51 h producer epoch       or -1
53 i base sequence        or -1
57 i count
```

Invariants:
    * what ``check`` lets pass can be walked over: its length is its own, its count is that of its offsets, and no more
      than its bytes can be inflated to hold;
    * every bit of a stamped batch is under a CRC: bytes 0-16 and the CRC field under the placement CRC, the rest under
      the CRC. A batch moved to another partition, or to another offset, fails.

Source: Apache Kafka protocol guide, "Record Batch".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct

from crc32c import crc32c

from txmq.errors import CorruptRecordError, InvalidBatchError
from txmq.runtime.ports import Buffer

HEADER = Struct(">qiibIhiqqqhii")
HEADER_SIZE = 61
MAGIC = 2
CODEC_NONE, CODEC_GZIP, CODEC_LZ4, CODEC_ZSTD = 0, 1, 3, 4
RECORD_SIZE_MIN = 7  # seven varints of one byte each
INFLATED_SIZE_BYTES_MAX = 64 << 20
INFLATED_RATIO_MAX = 64
INFLATED_FREE_SIZE_BYTES = 1 << 20  # whatever the ratio: short and very regular content
TIMESTAMP_MS_MAX = 253_402_300_799_999  # the year 9999: the last that Python's and SQL's calendars can show

Placed = tuple[int, int, int, int, int]  # (position, length, base offset, count, max timestamp ms)

_ATTRIBUTES = frozenset({CODEC_NONE, CODEC_GZIP, CODEC_LZ4, CODEC_ZSTD})
_unpack = HEADER.unpack_from
_BASE_OFFSET = Struct(">q")
_U32 = Struct(">I")
_STORED = Struct(">qiIbIhi8xq14xi")  # the fields of a header that walking needs
_PLACE = Struct(">IIqibI")  # the fields that the placement CRC covers
_pack_base_offset = _BASE_OFFSET.pack_into
_pack_u32 = _U32.pack_into
_pack_place = _PLACE.pack
_UNKNOWN_PATH = "<buffer>"
_COPIED_SIZE_BYTES_MAX = 1024  # copying a small batch costs less than a view of it


def check(batch: bytearray) -> tuple[int, int, int, int, int, int]:
    """Check one batch as a producer sends it: header and CRC, not the records.

    Hot (once a put), so all is one expression and the reason is found out afterwards.

    Returns:
        (count, max timestamp ms, producer id, producer epoch, base sequence, CRC).

    Raises:
        InvalidBatchError: the text says which rule is broken.
    """
    size = len(batch)
    if size < HEADER_SIZE:
        raise InvalidBatchError(f"a batch of {size} bytes is shorter than its header of {HEADER_SIZE}")
    base, length, _, magic, crc, attributes, delta, first_ms, max_ms, producer, epoch, sequence, count = _unpack(batch)
    if (
        length != size - 12
        or magic != 2
        or base
        or attributes not in _ATTRIBUTES
        or count < 1
        or delta != count - 1
        or not -1 <= first_ms <= max_ms <= TIMESTAMP_MS_MAX
        or producer < -1
        or epoch < -1
        or sequence < -1
        or count * RECORD_SIZE_MIN > (inflated_size_max(size - HEADER_SIZE) if attributes else size - HEADER_SIZE)
        or crc32c(batch[21:] if size < _COPIED_SIZE_BYTES_MAX else memoryview(batch)[21:]) != crc
    ):
        raise InvalidBatchError(_broken_rule(batch))
    return count, max_ms, producer, epoch, sequence, crc


def _broken_rule(batch: Buffer) -> str:
    """Which rule of ``check`` a batch breaks, in words."""
    base, length, _, magic, crc, attributes, delta, first_ms, max_ms, producer, epoch, sequence, count = _unpack(batch)
    if length != len(batch) - 12:
        return f"the length field says {length + 12} bytes, the batch has {len(batch)}"
    if magic != MAGIC:
        return f"magic {magic} is not {MAGIC}"
    found = crc32c(memoryview(batch)[21:])
    if found != crc:
        return f"CRC {crc:#010x} does not match the content's {found:#010x}"
    if base:
        return f"base offset {base} is not 0"
    if attributes & ~7:
        return f"attributes {attributes:#x}: only the codec bits may be set"
    if attributes not in _ATTRIBUTES:
        return f"codec {attributes & 7} is not none, gzip, lz4 or zstd"
    if count < 1 or delta != count - 1:
        return f"{count} records with a last offset delta of {delta}"
    if not -1 <= first_ms <= max_ms <= TIMESTAMP_MS_MAX:
        return f"timestamps {first_ms} to {max_ms} are not times in ms"
    if min(producer, epoch, sequence) < -1:
        return f"producer id {producer}, epoch {epoch}, sequence {sequence}: -1 is the least"
    return f"{count} records do not fit in {len(batch) - HEADER_SIZE} bytes of codec {attributes}"


def inflated_size_max(packed_size: int) -> int:
    """Most bytes that a compressed record section of this size may inflate to."""
    return min(INFLATED_SIZE_BYTES_MAX, max(INFLATED_FREE_SIZE_BYTES, INFLATED_RATIO_MAX * packed_size))


def checksum(content: Buffer, value: int = 0) -> int:
    """CRC32C, continued from ``value``."""
    return crc32c(content, value)  # type: ignore[no-any-return]


def stored_crc(batch: Buffer) -> int:
    """The CRC field of a checked batch."""
    return _U32.unpack_from(batch, 17)[0]  # type: ignore[no-any-return]


def stamp(batch: bytearray, topic_id: int, partition: int, base_offset: int, crc: int) -> None:
    """Write a checked batch's place into it, in place. Hot (once a put).

    Args:
        crc: its own CRC, as ``check`` returned it.
    """
    _pack_base_offset(batch, 0, base_offset)
    _pack_u32(batch, 12, crc32c(_pack_place(topic_id, partition, base_offset, len(batch) - 12, 2, crc)))


def stamp_run(
    batches: Sequence[bytearray], counts: Sequence[int], crcs: Sequence[int], place: tuple[int, int, int]
) -> list[int]:
    """``stamp`` for batches that follow each other. Hot.

    Args:
        place: topic id, partition, base offset of the first.

    Returns:
        their base offsets.
    """
    topic_id, partition, offset = place
    offsets = []
    for batch, count, crc in zip(batches, counts, crcs, strict=True):
        _pack_base_offset(batch, 0, offset)
        _pack_u32(batch, 12, crc32c(_pack_place(topic_id, partition, offset, len(batch) - 12, 2, crc)))
        offsets.append(offset)
        offset += count
    return offsets


def place_checksum(topic_id: int, partition: int, base_offset: int, length: int, crc: int) -> int:
    """The placement CRC; ``length`` is the header's field (whole batch - 12)."""
    return crc32c(_pack_place(topic_id, partition, base_offset, length, 2, crc))  # type: ignore[no-any-return]


def fault(
    buffer: Buffer, position: int, place: tuple[int, int] | None, expected_offset: int | None, *, full: bool
) -> str | None:
    """The fault of the stored batch at ``position``; None if it is whole and in its place.

    Args:
        place: (topic id, partition) to check the placement CRC for; None if they are not known.
        expected_offset: last offset before it + 1; None if that is not known.
        full: also the CRC over all its bytes.
    """
    left = len(buffer) - position
    if left < HEADER_SIZE:
        return f"{left} bytes are no batch"
    base, length, placed, magic, crc, attributes, delta, _, count = _STORED.unpack_from(buffer, position)
    if magic != MAGIC:
        return f"magic {magic} is not {MAGIC}"
    if length < HEADER_SIZE - 12 or length + 12 > left:
        return f"a batch of {length + 12} bytes where {left} are left"
    if place is not None and placed != place_checksum(*place, base, length, crc):
        return "the placement CRC does not match"
    if full and crc32c(memoryview(buffer)[position + 21 : position + 12 + length]) != crc:
        return "the CRC does not match"
    if expected_offset is not None and base != expected_offset:
        return f"base offset {base} where {expected_offset} follows"
    if count < 1 or delta != count - 1 or attributes not in _ATTRIBUTES:
        return f"{count} records, last offset delta {delta}, attributes {attributes:#x}"
    return None


def walk(
    buffer: Buffer, topic_id: int, partition: int, expected_offset: int | None, *,
    full: bool = False, path: str = _UNKNOWN_PATH, path_position: int = 0,
) -> Iterator[Placed]:  # fmt: skip
    """Go over whole placed batches, checking that each is in its place.

    Args:
        expected_offset: base offset of the first; None takes the first as it comes.
        full: also check every batch's own CRC; without it damage inside a batch is not seen.
        path: named in the error; ``path_position`` is where in it the buffer begins.

    Raises:
        CorruptRecordError: a check failed, or the buffer ends inside a batch.
    """
    position, end, place = 0, len(buffer), (topic_id, partition)
    while position < end:
        reason = fault(buffer, position, place, expected_offset, full=full)
        if reason is not None:
            raise CorruptRecordError(path, path_position + position, reason)
        base, length, _, _, _, _, _, max_ms, count = _STORED.unpack_from(buffer, position)
        yield position, length + 12, base, count, max_ms
        expected_offset = base + count
        position += length + 12


def headers(buffer: Buffer, position: int = 0) -> Iterator[Placed]:
    """Go over the headers without checking anything; ends before the first that is not wholly in the buffer.

    Bodies may lie beyond the buffer. For bytes whose place is vouched for by the journal.
    """
    last = len(buffer) - HEADER_SIZE
    unpack = _STORED.unpack_from
    while position <= last:
        base, length, _, _, _, _, _, max_ms, count = unpack(buffer, position)
        if length < HEADER_SIZE - 12:
            return
        yield position, length + 12, base, count, max_ms
        position += length + 12
