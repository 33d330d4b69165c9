"""The content of a batch: records to bytes and back. With ``batch`` and ``compression`` the only home of the format.

The uncompressed record section is written and read by ``aiokafka.record``: compiled if its wheel is
installed, else in pure Python, with the same bytes either way (tests/vectors). Compression is ours.

Record, all numbers zigzag varints: ``length, attributes, timestamp delta, offset delta, key length (-1: null), key,
value length (-1: null), value, header count, {key length, key, value length, value}``.

Two headers are txmq's own: ``tag`` (the message's tag) and ``txmq.txid`` (only on the first record of a batch, whose
messages all belong to that transaction).

Where values are large they stay where they are, and can be looked at uncopied (``LargeRecord``). The library copies
what it gives out: 0.6 us for a record of 16 KiB, 1.5 for one of 64, 4.5 for one of 256. ``read_large``, in plain
Python, takes 3.3 us for any, and gives out views.

Invariants:
    * ``decode`` gives out messages only of batches that are whole: CRC and place (where known) are right, header and
      content agree;
    * ``look_into`` refuses what ``decode_batch`` refuses, and nothing else;
    * inflating is bounded (``compression``);
    * records of a batch whose mean one is large are read by ``read_large``: their values are copied when they are
      asked for. A view is of the section's own memory: it is valid as long as it is kept, and keeps that memory. A
      record that does not end where its length says, or does not fill its section together with the others, is an
      error before it is given out; steps are bounded by the bytes that there are, not by what a field claims;
    * others are parsed in ``bytes`` or ``bytearray`` memory only: the compiled reader may look one byte past the end
      of a malformed batch, which there is a NUL that ends what it reads (it then refuses the batch); and it lets a
      length near 2^63 through to the allocator, whose MemoryError is a malformed record like any other.

Source: Apache Kafka protocol guide, "Record".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from aiokafka.record import default_records

from txmq.errors import InvalidBatchError
from txmq.log import compression as codecs
from txmq.log.batch import (
    CODEC_NONE,
    HEADER,
    HEADER_SIZE,
    INFLATED_SIZE_BYTES_MAX,
    checksum,
    fault,
)
from txmq.model import LargeMessage, Message
from txmq.runtime.ports import Buffer

Headers = Sequence[tuple[str, bytes]]
Record = tuple[bytes | None, bytes | None, Headers, int]  # key, value, headers, timestamp ms
TAG_HEADER = "tag"
TXID_HEADER = "txmq.txid"
DAMAGED = "damaged where it was stored or made: look with txmq log verify there, or read on behind it"
_SECTION_SIZE_BYTES_MAX = (1 << 31) - 1024  # lengths are signed 32 bits

_Builder: Any = default_records.DefaultRecordBatchBuilder
_Batch: Any = default_records.DefaultRecordBatch
_Malformed: Any = default_records.CorruptRecordException
_FAULTS = (_Malformed, ValueError, IndexError, OverflowError, MemoryError, InvalidBatchError)
LARGE_SIZE_BYTES_MIN: Final = 256 << 10  # of the mean record of a batch: from here on a view is cheaper than a copy
NOWHERE: Final = 1 << 60  # past every end
_VARINT_SIZE_BYTES_MAX: Final = 10


class RawBatch(NamedTuple):
    """A whole batch as it is stored, CRC and place checked; ``content`` is a view of the buffer it came in."""

    base_offset: int
    record_count: int
    max_timestamp_ms: int
    codec: int
    content: memoryview

    @property
    def end_offset(self) -> int:
        """The offset after its last record."""
        return self.base_offset + self.record_count


def encode(
    records: Sequence[Record], *, compression: str | None = None,
    producer_id: int = -1, producer_epoch: int = -1, base_sequence: int = -1, txid: str | None = None,
) -> bytearray:  # fmt: skip
    """Make one batch, at base offset 0.

    Args:
        records: at least one; timestamps in ms since 1970, not negative.
        compression: "gzip", "lz4", "zstd" or None. Content that does not get smaller stays as it is.
        txid: the transaction that all of them belong to.

    Raises:
        InvalidBatchError: no record, or a negative timestamp.
        TypeError: a key or value that is not bytes.
    """
    builder = _Builder(2, CODEC_NONE, 0, producer_id, producer_epoch, base_sequence, _SECTION_SIZE_BYTES_MAX)
    append = builder.append
    extra = [] if txid is None else [(TXID_HEADER, txid.encode())]
    for number, (key, value, headers, timestamp_ms) in enumerate(records):
        append(number, timestamp_ms, key, value, [*headers, *extra])
        if extra:
            extra = []
    return _finish(builder, compression)


def encode_values(
    pairs: Iterable[tuple[bytes | None, bytes]], timestamp_ms: int, *, compression: str | None = None,
    producer_id: int = -1, producer_epoch: int = -1, base_sequence: int = -1, txid: str | None = None,
) -> bytearray:  # fmt: skip
    """As ``encode``, for (key, value) pairs of one time and without headers."""
    builder = _Builder(2, CODEC_NONE, 0, producer_id, producer_epoch, base_sequence, _SECTION_SIZE_BYTES_MAX)
    append = builder.append
    headers: list[tuple[str, bytes]] = []
    first = headers if txid is None else [(TXID_HEADER, txid.encode())]
    for number, (key, value) in enumerate(pairs):
        append(number, timestamp_ms, key, value, headers if number else first)
    return _finish(builder, compression)


def _finish(builder: Any, compression: str | None) -> bytearray:
    batch: bytearray = builder.build()
    fields = HEADER.unpack_from(batch)
    if fields[12] < 1:
        raise InvalidBatchError("a batch needs at least one record")
    if fields[7] < 0:
        raise InvalidBatchError(f"timestamp {fields[7]} ms is negative")
    if compression is None:
        return batch
    codec = codecs.CODECS[compression]
    with memoryview(batch) as view:
        packed = codecs.compress(codec, view[HEADER_SIZE:])
    if packed is None:
        return batch
    batch[HEADER_SIZE:] = packed
    _rewrite(batch, (0, len(batch) - 12, -1, 2, 0, codec, *fields[6:]))
    return batch


def set_sequence(batch: bytearray, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
    """Rewrite a batch's producer fields, and its CRC."""
    fields = HEADER.unpack_from(batch)
    _rewrite(batch, (*fields[:9], producer_id, producer_epoch, base_sequence, fields[12]))


def _rewrite(batch: bytearray, fields: tuple[int, ...]) -> None:
    HEADER.pack_into(batch, 0, *fields)
    with memoryview(batch) as view:
        crc = checksum(view[21:])
    HEADER.pack_into(batch, 0, *fields[:4], crc, *fields[5:])


def decode(
    buffer: Buffer, topic: str, partition: int, *,
    topic_id: int | None = None, expected_offset: int | None = None,
    inflated_size_bytes_max: int = INFLATED_SIZE_BYTES_MAX,
) -> list[Message]:  # fmt: skip
    """Read every message of whole batches.

    Args:
        buffer: one or more consecutive batches, offsets without holes.
        topic_id: checks that the batches belong there; without it only their own CRC is checked.
        expected_offset: base offset that the first batch must have.
        inflated_size_bytes_max: most bytes a batch may inflate to.

    Raises:
        InvalidBatchError: a batch is damaged, out of place, or contradicts itself; nothing of the buffer is given out.
    """
    messages: list[Message] = []
    for batch in decode_raw(buffer, topic, partition, topic_id=topic_id, expected_offset=expected_offset):
        messages += decode_batch(batch, topic, partition, inflated_size_bytes_max)
    return messages


def decode_batch(
    batch: RawBatch, topic: str, partition: int, inflated_size_bytes_max: int = INFLATED_SIZE_BYTES_MAX
) -> list[Message]:
    """Every message of one batch; as ``decode``."""
    try:
        return _decode_batch(batch, topic, partition, inflated_size_bytes_max)
    except _FAULTS as error:
        raise _invalid(topic, partition, batch.base_offset, _reason(error)) from error


def look_into(batch: bytearray, size_bytes_max: int = INFLATED_SIZE_BYTES_MAX) -> None:
    """Refuse a batch that ``batch.check`` took and ``decode`` would not read; in a quarter of its time.

    Args:
        size_bytes_max: of the record section, as it came and inflated; a larger one is passed by.

    Raises:
        InvalidBatchError: its records are malformed, or contradict its header.
    """
    base, _, _, _, _, codec, _, _, max_ms, _, _, _, count = HEADER.unpack_from(batch)
    offset, limit = base, HEADER_SIZE + size_bytes_max
    if len(batch) > limit:
        return
    try:
        source = _inflated(codec, batch, INFLATED_SIZE_BYTES_MAX)
        if len(source) > limit:
            return
        for record in _read(source, count):
            if record.offset != offset or not -1 <= record.timestamp <= max_ms:
                raise _misplaced(record, offset, max_ms)
            offset += 1
        if offset != base + count:
            raise _miscounted(count, offset - base)
    except _FAULTS as error:
        raise InvalidBatchError(_reason(error)) from error


def sound_batches(
    buffer: Buffer, topic: str, partition: int, *, topic_id: int
) -> tuple[list[RawBatch], InvalidBatchError | None]:
    """The batches before the first whose header, CRC or place is damaged, and that damage, if any."""
    batches: list[RawBatch] = []
    try:
        batches.extend(decode_raw(buffer, topic, partition, topic_id=topic_id))
    except InvalidBatchError as error:
        return batches, error
    return batches, None


def _reason(error: Exception) -> str:
    if isinstance(error, _Malformed):
        return str(error.args[0])
    return str(error) if isinstance(error, InvalidBatchError) else f"malformed record: {error}"


def decode_raw(
    buffer: Buffer, topic: str, partition: int, *, topic_id: int | None = None, expected_offset: int | None = None
) -> Iterator[RawBatch]:
    """Go over whole batches without looking at their records; checks and errors as ``decode``."""
    view, position, end = memoryview(buffer), 0, len(buffer)
    place = None if topic_id is None else (topic_id, partition)
    while position < end:
        reason = fault(view, position, place, expected_offset, full=True)
        if reason is not None:
            raise _invalid(topic, partition, expected_offset, f"{reason} (byte {position})")
        base, length, _, _, _, attributes, _, _, max_ms, _, _, _, count = HEADER.unpack_from(view, position)
        yield RawBatch(base, count, max_ms, attributes, view[position : position + 12 + length])
        expected_offset = base + count
        position += 12 + length


def _invalid(topic: str, partition: int, offset: int | None, reason: str) -> InvalidBatchError:
    where = "" if offset is None else f" at offset {offset}"
    return InvalidBatchError(f"{topic}-{partition}{where}: {reason}")


def _decode_batch(batch: RawBatch, topic: str, partition: int, inflated_size_bytes_max: int) -> list[Message]:
    """Hot, so all is in one loop."""
    messages: list[Message] = []
    offset, count, max_ms, codec, content = batch
    end, txid, append = offset + count, None, messages.append
    found = _read(_inflated(codec, content, inflated_size_bytes_max), count)
    make: Any = Message if type(found) is _Batch else LargeMessage
    for record in found:
        headers, timestamp_ms = record.headers, record.timestamp
        if record.offset != offset or not -1 <= timestamp_ms <= max_ms:
            raise _misplaced(record, offset, max_ms)
        tag, named = None, {}
        if headers:
            named = {name: value or b"" for name, value in headers}
            tag_bytes = named.pop(TAG_HEADER, None)
            tag = None if tag_bytes is None else tag_bytes.decode("utf-8", "replace")
            if TXID_HEADER in named:
                txid_bytes = named.pop(TXID_HEADER)
                if offset == batch.base_offset:
                    txid = txid_bytes.decode("ascii", "replace")
        append(make(topic, partition, offset, record.key, record.value, named, tag, timestamp_ms, txid))
        offset += 1
    if offset != end:
        raise _miscounted(count, count - (end - offset))
    return messages


def _inflated(codec: int, content: Buffer, inflated_size_bytes_max: int) -> Buffer:
    """A batch with a plain record section."""
    if codec == CODEC_NONE:
        return content
    with memoryview(content) as view:
        source = codecs.inflate(codec, view[HEADER_SIZE:], bytes(view[:HEADER_SIZE]), inflated_size_bytes_max)
    source[22] = CODEC_NONE  # the low byte of the attributes: what is read now is plain
    return source


def _read(source: Buffer, count: int) -> Iterable[Any]:
    """The records of a plain batch: by the library or, large ones, by ``read_large``."""
    if len(source) >= count * LARGE_SIZE_BYTES_MIN:
        return read_large(source)
    found: Iterable[Any] = _Batch(source)
    return found


def _misplaced(record: Any, offset: int, max_ms: int) -> InvalidBatchError:
    return InvalidBatchError(
        f"record {record.offset} of {record.timestamp} ms where {offset} until {max_ms} ms was to be"
    )


def _miscounted(count: int, found: int) -> InvalidBatchError:
    return InvalidBatchError(f"{count} records announced, {found} found")


class LargeRecord(NamedTuple):
    """One record; the names are those of the library's."""

    offset: int
    timestamp: int
    key: bytes | None
    value: memoryview | None
    headers: list[tuple[str, bytes | None]]


def read_large(batch: Buffer) -> Iterator[LargeRecord]:
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
