"""Records to batches and back; and what stands in a batch that should not."""

from __future__ import annotations

import gzip
import tracemalloc
from contextlib import nullcontext
from typing import Any

import cramjam
import pytest
from aiokafka.record import default_records
from hypothesis import given, settings
from hypothesis import strategies as st

from txmq.errors import InvalidBatchError
from txmq.log import batch, compression, records
from txmq.model import Message

from .support import PURE, TIME_MS, make_batch, make_placed, with_fields, with_section

VARIED: list[records.Record] = [
    (b"k%d" % number, b"value %d " % number * number, [("h", b"x")] if number % 3 else [], TIME_MS + number)
    for number in range(50)
]
ROWS = [(key, value, dict(headers), timestamp_ms) for key, value, headers, timestamp_ms in VARIED]
SECTION = bytes(records.encode(VARIED)[batch.HEADER_SIZE :])
CODECS = pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])


def rows(messages: list[Message]) -> list[tuple[Any, ...]]:
    return [(m.key, m.value, m.headers, m.timestamp_ms) for m in messages]


def pack(codec: str, content: bytes) -> bytes:
    return bytes(getattr(cramjam, codec).compress(content, 1))


def packed_batch(codec: str, stream: bytes) -> bytearray:
    """The batch of ``VARIED`` with ``stream`` for its record section."""
    return with_section(records.encode(VARIED), stream, compression.CODECS[codec])


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, "gzip", "lz4", "zstd"])
def test_what_is_encoded_is_decoded(codec: str | None) -> None:
    made = records.encode(VARIED, compression=codec)
    assert batch.check(made)[:2] == (50, TIME_MS + 49)
    assert made[22] == compression.CODECS.get(codec or "", 0)
    found = records.decode(made, "t", 4)
    assert rows(found) == ROWS
    assert [m.offset for m in found] == list(range(50))


names = st.text(max_size=20).filter(lambda name: name not in ("tag", "txmq.txid"))
blobs = st.one_of(st.none(), st.binary(max_size=300))
any_headers = st.dictionaries(names, st.binary(max_size=9), max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(blobs, blobs, any_headers, st.integers(0, 1 << 45)), min_size=1, max_size=20))
def test_any_records_come_back(given_rows: list[tuple[bytes | None, bytes | None, dict[str, bytes], int]]) -> None:
    for codec in (None, "gzip", "lz4", "zstd"):  # drawing the records takes longer than this
        made = records.encode([(k, v, list(h.items()), t) for k, v, h, t in given_rows], compression=codec)
        batch.check(made)
        assert rows(records.decode(made, "t", 0)) == given_rows, codec


def test_values_alone_become_equal_bytes() -> None:
    pairs: list[tuple[bytes | None, bytes]] = [(b"k", b"v"), (None, b"w" * 200), (b"", b"")]
    full: list[records.Record] = [(key, value, (), TIME_MS) for key, value in pairs]
    assert records.encode_values(pairs, TIME_MS) == records.encode(full)
    assert records.encode_values(
        pairs, TIME_MS, compression="zstd", producer_id=1, producer_epoch=2, base_sequence=3
    ) == (records.encode(full, compression="zstd", producer_id=1, producer_epoch=2, base_sequence=3))


def test_several_batches_are_one_run_of_messages() -> None:
    found = records.decode(make_placed(5, 2) + make_placed(7, 3), "t", 3, topic_id=7, expected_offset=5)
    assert [m.offset for m in found] == [5, 6, 7, 8, 9]
    assert records.decode(b"", "t", 3) == []


def test_transaction_stands_on_first_record_and_is_told_of_all() -> None:
    made = records.encode([(b"k", b"1", [("h", b"x")], TIME_MS), (b"k", b"2", (), TIME_MS)], txid="a-b-c-d")
    assert bytes(made).count(b"txmq.txid") == 1
    found = records.decode(made, "t", 0)
    assert [(m.txid, m.headers) for m in found] == [("a-b-c-d", {"h": b"x"}), ("a-b-c-d", {})]


def test_a_transaction_named_on_a_later_record_is_not_believed() -> None:
    made = records.encode([(b"k", b"1", (), TIME_MS), (b"k", b"2", [("txmq.txid", b"forged")], TIME_MS)])
    assert [(m.txid, m.headers) for m in records.decode(made, "t", 0)] == [(None, {}), (None, {})]


def test_a_transaction_does_not_spill_into_the_next_batch() -> None:
    one = records.encode([(b"k", b"1", (), TIME_MS)], txid="a-b-c-d")
    assert [m.txid for m in records.decode(one + with_fields(make_batch(), base=1), "t", 0)] == ["a-b-c-d", None]


def test_the_tag_is_a_header_and_survives_bad_utf8() -> None:
    made = records.encode([(None, b"", [("tag", b"red")], TIME_MS), (None, b"", [("tag", b"\xff")], TIME_MS)])
    assert [(m.tag, m.headers) for m in records.decode(made, "t", 0)] == [("red", {}), ("\ufffd", {})]


def test_the_sequence_can_be_set_later() -> None:
    for codec in (None, "zstd"):
        made = records.encode(VARIED, compression=codec)
        records.set_sequence(made, 11, 3, 2**31 - 1)
        assert made == records.encode(
            VARIED, compression=codec, producer_id=11, producer_epoch=3, base_sequence=2**31 - 1
        )
        assert batch.check(made)[2:5] == (11, 3, 2**31 - 1)


def test_raw_batches_are_views_with_their_fields() -> None:
    chain = make_placed(5, 2) + make_placed(7, 3)
    found = list(records.decode_raw(chain, "t", 3, topic_id=7))
    assert [(b.base_offset, b.record_count, b.max_timestamp_ms, b.codec) for b in found] == [
        (5, 2, TIME_MS, 0),
        (7, 3, TIME_MS, 0),
    ]
    assert b"".join(b.content for b in found) == chain


def test_nothing_and_negative_times_are_refused() -> None:
    with pytest.raises(InvalidBatchError, match="at least one"):
        records.encode([])
    with pytest.raises(InvalidBatchError, match="negative"):
        records.encode([(b"k", b"v", (), -5)])
    with pytest.raises(KeyError):
        records.encode(VARIED, compression="snappy")


# --- batches that contradict themselves ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [0, 4])
@pytest.mark.parametrize("count", [49, 51, 1])
def test_another_count_than_announced(codec: int, count: int) -> None:
    section = pack("zstd", SECTION) if codec else SECTION
    made = with_fields(with_section(records.encode(VARIED), section, codec), count=count, delta=count - 1)
    batch.check(made)  # opaque at the door
    with pytest.raises(InvalidBatchError, match="t-0 at offset 0"):
        records.decode(made, "t", 0)
    with pytest.raises(InvalidBatchError, match=r"record|read"):
        records.look_into(made)


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("is_larger", [True, False])
def test_only_what_is_small_enough_inflated_is_looked_into(codec: str | None, is_larger: bool) -> None:
    made = records.encode([(None, b"v" * 1000, (), TIME_MS)], compression=codec)
    lying = with_fields(made, count=2, delta=1)
    size = len(records.encode([(None, b"v" * 1000, (), TIME_MS)])) - batch.HEADER_SIZE
    expected = nullcontext() if is_larger else pytest.raises(InvalidBatchError, match="read")
    with expected:
        records.look_into(lying, size - is_larger)


def test_sound_batches_before_the_damage_are_given_out() -> None:
    chain = make_placed(0, 2) + make_placed(2, 2) + make_placed(4, 2)
    assert records.sound_batches(chain, "t", 3, topic_id=7)[1] is None
    chain[2 * len(chain) // 3 - 1] ^= 1  # the last byte of the second batch
    (first,), damage = records.sound_batches(chain, "t", 3, topic_id=7)
    assert [message.offset for message in records.decode_batch(first, "t", 3)] == [0, 1]
    assert first.end_offset == 2
    assert "t-3 at offset 2" in str(damage)


def test_batch_that_lies_about_its_records_gives_out_none() -> None:
    lying = with_fields(make_placed(2, 2), count=3, delta=2)  # its first two records can be read
    batch.stamp(lying, 7, 3, 2, batch.stored_crc(lying))
    (_, second), damage = records.sound_batches(make_placed(0, 2) + lying, "t", 3, topic_id=7)
    assert damage is None
    with pytest.raises(InvalidBatchError, match="t-3 at offset 2"):
        records.decode_batch(second, "t", 3)


def test_offsets_that_are_not_one_after_the_other() -> None:
    twice = SECTION_OF_ONE + SECTION_OF_ONE  # both say they are number 0
    made = with_section(make_batch(2), twice)
    batch.check(made)
    with pytest.raises(InvalidBatchError, match="record 0 of"):
        records.decode(made, "t", 0)


SECTION_OF_ONE = bytes(make_batch()[batch.HEADER_SIZE :])


def test_a_time_beyond_the_announced_one() -> None:
    made = with_fields(records.encode(VARIED), max_ms=TIME_MS + 48)
    with pytest.raises(InvalidBatchError, match="record 49 of"):
        records.decode(made, "t", 0)


@pytest.mark.parametrize(
    "record",
    [
        b"\x0c\x00\x00\x00\xc8\x01\x01\x00",  # a key of 100 bytes
        b"\x7e\x00\x00\x00\x01\x01\x00",  # a record of 63 bytes
        b"\x0a\x00\x00\x00\x01\x01\x00",  # shorter than it says
        b"\x0c\x00\x00\x00\x01\x01\x03",  # -2 headers
        b"\x0e\x00\x00\x00\x01\x01\x80\x80",  # a number that does not end
        b"\x1a\x00\x00\x00\x01\x01\xff\xff\xff\xff\xff\xff\xff",  # a number over 64 bits
        b"\x14\x00\x00\x00\x01\x01\x02\x02\xff\x00",  # a header name that is no UTF-8
        b"\x01\x00\x00\x00\x01\x01\x00",  # a length of -1
        b"\xff\xff\xff\xff\x0f\x00\x00\x00\x01\x01\x00",  # a length of -2^31
        b"\x0c\x00\x00\x00\xff\xff\xff\xff\x0f\x01\x00",  # a key of -2^31 bytes
        b"\x0c\x00\x00\x00\x01\x01\xfe\xff\xff\xff\x0f",  # 2^31 - 1 headers
    ],
)
def test_a_record_that_cannot_be(record: bytes, either: None) -> None:
    with pytest.raises(InvalidBatchError):
        records.decode(with_section(make_batch(), record), "t", 0)


@pytest.fixture(params=["compiled", "pure"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure":
        monkeypatch.setattr(records, "_Batch", PURE.DefaultRecordBatch)


@settings(max_examples=1000, deadline=None)
@given(st.binary(min_size=7, max_size=80), st.integers(1, 4))
def test_any_bytes_for_records_are_read_alike_or_refused_alike(section: bytes, count: int) -> None:
    made = with_fields(with_section(make_batch(count), section), max_ms=batch.TIMESTAMP_MS_MAX)
    assert outcome(default_records.DefaultRecordBatch, made) == outcome(PURE.DefaultRecordBatch, made)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(SECTION) - 1), st.integers(0, 255))
def test_any_changed_record_byte_is_read_or_refused_alike(position: int, value: int) -> None:
    section = SECTION[:position] + bytes([value]) + SECTION[position + 1 :]
    made = with_fields(with_section(records.encode(VARIED), section), max_ms=batch.TIMESTAMP_MS_MAX)
    assert outcome(default_records.DefaultRecordBatch, made) == outcome(PURE.DefaultRecordBatch, made)


def outcome(implementation: object, made: bytearray) -> list[tuple[Any, ...]] | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_Batch", implementation)
        try:
            found = rows(records.decode(made, "t", 0))
        except InvalidBatchError:
            with pytest.raises(InvalidBatchError):
                records.look_into(made)
            return None
        records.look_into(made)
        return found


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "bomb_size"), [("zstd", 1 << 30), ("lz4", 1 << 28), ("gzip", 1 << 28)])
def test_a_bomb_is_given_up_while_it_inflates(codec: str, bomb_size: int) -> None:
    made = packed_batch(codec, pack(codec, bytes(bomb_size)))
    allowed = min(64 << 20, max(1 << 20, 64 * len(made)))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidBatchError, match="inflate"):
            records.decode(made, "t", 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * allowed + (1 << 20) < bomb_size


@CODECS
def test_the_absolute_limit_holds_below_the_ratio(codec: str) -> None:
    made = records.encode(VARIED, compression=codec)
    assert len(records.decode(made, "t", 0, inflated_size_bytes_max=len(SECTION))) == 50
    with pytest.raises(InvalidBatchError, match="inflate"):
        records.decode(made, "t", 0, inflated_size_bytes_max=len(SECTION) - 1)


@CODECS
def test_overly_regular_records_are_not_compressed(codec: str) -> None:
    pairs: list[tuple[bytes | None, bytes]] = [(None, bytes(4 << 20))]
    made = records.encode_values(pairs, TIME_MS, compression=codec)
    batch.check(made)
    (message,) = records.decode(made, "t", 0)
    assert message.value == bytes(4 << 20)


@CODECS
def test_short_regular_content_may_compress_any_number_of_times(codec: str) -> None:
    made = records.encode_values([(b"k", bytes(100))] * 5000, TIME_MS, compression=codec)
    assert made[22] == compression.CODECS[codec]
    assert len(records.decode(made, "t", 0)) == 5000


def test_content_that_does_not_shrink_stays_as_it_is() -> None:
    made = records.encode([(b"k", b"v", (), TIME_MS)], compression="zstd")
    assert made == records.encode([(b"k", b"v", (), TIME_MS)])


@CODECS
def test_a_stream_cut_anywhere_is_refused(codec: str) -> None:
    stream = pack(codec, SECTION)
    assert len(records.decode(packed_batch(codec, stream), "t", 0)) == 50
    for size in range(len(stream)):
        with pytest.raises(InvalidBatchError):
            records.decode(packed_batch(codec, stream[:size]), "t", 0)


@CODECS
@pytest.mark.parametrize("garbage", [b"\x00", b"x", b"garbage behind it" * 10])
def test_garbage_behind_the_stream_is_refused(codec: str, garbage: bytes) -> None:
    with pytest.raises(InvalidBatchError):
        records.decode(packed_batch(codec, pack(codec, SECTION) + garbage), "t", 0)


@CODECS
def test_a_second_stream_behind_the_first_is_refused(codec: str) -> None:
    with pytest.raises(InvalidBatchError):
        records.decode(packed_batch(codec, pack(codec, SECTION) * 2), "t", 0)


@CODECS
def test_a_compressed_stream_within_a_stream_is_refused(codec: str) -> None:
    with pytest.raises(InvalidBatchError):
        records.decode(packed_batch(codec, pack(codec, pack(codec, SECTION))), "t", 0)
    whole = bytes(records.encode(VARIED, compression=codec))
    with pytest.raises(InvalidBatchError):
        records.decode(packed_batch(codec, pack(codec, whole)), "t", 0)


@pytest.mark.parametrize("difference", [-100, -1, 1, 100])
def test_stated_size_that_is_not_real_one_is_refused(difference: int) -> None:
    zstd = bytearray(pack("zstd", SECTION))
    assert zstd[4] == 0x60, "a frame with a content size of two bytes"
    zstd[5:7] = (len(SECTION) - 256 + difference).to_bytes(2, "little")
    lz4 = bytearray(pack("lz4", SECTION))
    assert lz4[4] & 8 == 0, "cramjam states no content size"
    gz = bytearray(gzip.compress(SECTION))
    gz[-4:] = (len(SECTION) + difference).to_bytes(4, "little")
    for codec, stream in (("zstd", zstd), ("gzip", gz)):
        with pytest.raises(InvalidBatchError):
            records.decode(packed_batch(codec, bytes(stream)), "t", 0)


def test_another_codec_than_named_is_refused() -> None:
    for codec in ("gzip", "lz4", "zstd"):
        for other in {"gzip", "lz4", "zstd"} - {codec}:
            with pytest.raises(InvalidBatchError):
                records.decode(packed_batch(other, pack(codec, SECTION)), "t", 0)


@CODECS
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_stream_is_read_right_or_refused(codec: str, data: st.DataObject) -> None:
    """Streams carry no checksum of their own everywhere; what must not be is another exception."""
    stream = bytearray(pack(codec, SECTION))
    stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    outcome(default_records.DefaultRecordBatch, packed_batch(codec, bytes(stream)))
