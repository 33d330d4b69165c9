"""The vectorised decoder against the plain one (``log.records.decode``), and against bytes that nobody should trust."""

from __future__ import annotations

import random
from typing import Any

import cramjam
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from txmq.errors import CorruptRecordError, InvalidBatchError
from txmq.log import batch, records
from txmq.model import Message
from txmq.spark.decode import arrow_columns, chunk, fields

TOPIC_ID, NUMBER, TIME_MS = 7, 3, 1_700_000_000_000
ORIGIN = chunk.Origin("orders.log", "orders", TOPIC_ID, NUMBER)
ALL = tuple(arrow_columns.TYPES)
Row = tuple[Any, ...]


def placed(batches: list[bytearray], first_offset: int = 0) -> bytes:
    """Batches as a partition holds them."""
    offset = first_offset
    for made in batches:
        made[:8] = bytes(8)
        batch.stamp(made, TOPIC_ID, NUMBER, offset, batch.stored_crc(made))
        offset += batch.HEADER.unpack_from(made)[12]
    return b"".join(map(bytes, batches))


def read(content: bytes, *, start: int = 0, end: int = 1 << 60, names: tuple[str, ...] = ALL) -> list[Row]:
    """All rows; raises the chunk's damage."""
    rows: list[Row] = []
    position, expected = 0, None
    while position < len(content):
        taken = chunk.check(content[position:], ORIGIN, expected, position=position)
        for table in arrow_columns.decode(taken, names, start, end):
            rows += zip(*(column.to_pylist() for column in table.columns), strict=True)
        if taken.damage is not None:
            raise taken.damage
        assert taken.size_bytes, "nothing was taken, and nothing was wrong"
        position, expected = position + taken.size_bytes, taken.next_offset
    return rows


def as_row(message: Message) -> Row:
    """What the decoder should make of a message."""
    headers = dict(message.headers)
    if message.tag is not None:
        headers["tag"] = message.tag.encode()
    time_ms = None if message.timestamp_ms < 0 else message.timestamp_ms
    return (
        message.key, message.value, message.topic, message.partition, message.offset, time_ms, headers, message.txid
    )  # fmt: skip


def plain(row: Row) -> Row:
    """A row as ``as_row`` has it."""
    key, value, topic, partition, offset, time, headers, txid = row
    named = {entry["key"]: entry["value"] or b"" for entry in headers or ()}
    time_ms = None if time is None else round(time.timestamp() * 1000)
    return key, value, topic, partition, offset, time_ms, named, txid


def expected_rows(content: bytes) -> list[Row]:
    return [as_row(message) for message in records.decode(content, "orders", NUMBER, topic_id=TOPIC_ID)]


blobs = st.one_of(st.none(), st.binary(max_size=200), st.sampled_from([b"x" * 63, b"y" * 64, b"z" * 8191, b"w" * 9000]))
names = st.text(max_size=8).filter(lambda name: name not in (records.TAG_HEADER, records.TXID_HEADER))
some_headers = st.dictionaries(names, st.binary(max_size=9), max_size=3).map(lambda found: list(found.items()))
some_records = st.tuples(blobs, blobs, some_headers, st.integers(TIME_MS, TIME_MS + 100_000))
some_batches = st.tuples(
    st.lists(some_records, min_size=1, max_size=12),
    st.sampled_from([None, "gzip", "lz4", "zstd"]),
    st.sampled_from([None, None, "2819c0a9a0b6e771-db0886df688c2384-1-3"]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(some_batches, min_size=1, max_size=9), rows_max=st.integers(1, 40))
def test_what_the_plain_decoder_reads_comes_out(
    made: list[Any], rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_columns, "ROWS_MAX", rows_max)
    monkeypatch.setattr(chunk, "PIECE_SIZE_BYTES", 300)
    content = placed([records.encode(rows, compression=codec, txid=txid) for rows, codec, txid in made], 17)
    expected = expected_rows(content)
    for lockstep_min in (1, 3, 1000):  # drawing takes longer than reading
        monkeypatch.setattr(fields, "LOCKSTEP_MIN", lockstep_min)
        assert [plain(row) for row in read(content)] == expected, lockstep_min


def test_rows_outside_the_range_are_cut_with_the_transaction_known() -> None:
    rows: list[records.Record] = [(None, b"%d" % number, [], TIME_MS) for number in range(20)]
    content = placed([records.encode(rows, txid="a-b-1-2"), records.encode(rows)], 100)
    found = read(content, start=115, end=123, names=("offset", "txid"))
    assert found == [(offset, "a-b-1-2" if offset < 120 else None) for offset in range(115, 123)]
    assert read(content, start=140) == []


def test_a_time_that_is_none_is_null() -> None:
    made = records.encode([(b"k", b"v", [], 0)])
    made[27:43] = (-1).to_bytes(8, "big", signed=True) * 2
    made[17:21] = batch.checksum(memoryview(made)[21:]).to_bytes(4, "big")
    assert [row[5] for row in read(placed([made]))] == [None]


def test_only_columns_asked_for_are_made_and_in_that_order() -> None:
    taken = chunk.check(placed([records.encode([(b"k", b"v", [], TIME_MS)])]), ORIGIN, 0)
    (table,) = arrow_columns.decode(taken, ("offset", "key"), 0, 9)
    assert table.schema.names == ["offset", "key"]


# --- bytes that nobody should trust ----------------------------------------------------------------------------------

SAMPLE = placed(
    [
        records.encode(
            [(b"k%d" % n, b"v" * n, [("h", b"x"), ("tag", b"t")], TIME_MS + n) for n in range(4)], txid="t-1"
        ),
        records.encode([(None, b"v" * 300, [], TIME_MS)] * 3),
        records.encode([(b"key", b"value " * 40, [], TIME_MS)] * 5, compression="lz4"),
    ]
)


def test_every_flipped_bit_is_found() -> None:
    for position in range(len(SAMPLE)):
        damaged = bytearray(SAMPLE)
        damaged[position] ^= 1 << position % 8
        taken = chunk.check(bytes(damaged), ORIGIN, 0)
        # Also a length that leads beyond the end: the placement CRC is over it.
        assert taken.damage is not None, position
        assert taken.damage.position <= position


@pytest.mark.parametrize("size", range(1, len(SAMPLE), 31))
def test_cut_off_input_is_no_damage_and_its_size_known(size: int) -> None:
    taken = chunk.check(SAMPLE[:size], ORIGIN, 0)
    assert taken.damage is None
    assert taken.size_bytes in (0, *taken.ends)
    if size - taken.size_bytes >= batch.HEADER_SIZE:
        assert taken.size_bytes + taken.wanted_bytes in (
            len(SAMPLE),
            *chunk.check(SAMPLE, ORIGIN, 0).ends,
        )


@pytest.mark.parametrize(
    ("origin", "expected_offset", "reason"),
    [
        (chunk.Origin("f", "t", TOPIC_ID + 1, NUMBER), 0, "placement"),
        (chunk.Origin("f", "t", TOPIC_ID, NUMBER + 1), 0, "placement"),
        (ORIGIN, 1, "base offset 0 where 1 follows"),
    ],
)
def test_batches_of_another_place_are_refused(origin: chunk.Origin, expected_offset: int, reason: str) -> None:
    taken = chunk.check(SAMPLE, origin, expected_offset, position=4096)
    assert taken.damage is not None
    assert reason in str(taken.damage)
    assert (taken.size_bytes, taken.damage.position) == (0, 4096)


def with_section(section: bytes, count: int, codec: int = 0) -> bytes:
    """One placed batch around any record section, its CRC right."""
    made = bytearray(records.encode([(b"", b"", [], TIME_MS)] * count)[: batch.HEADER_SIZE]) + section
    made[8:12] = (len(made) - 12).to_bytes(4, "big")
    made[22] = codec
    made[17:21] = batch.checksum(memoryview(made)[21:]).to_bytes(4, "big")
    return placed([made])


@pytest.mark.parametrize("lockstep_min", [1, 1000])
def test_records_changed_behind_the_crc_are_decoded_as_plain(
    lockstep_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "LOCKSTEP_MIN", lockstep_min)
    rows: list[records.Record] = [(b"k%d" % n, b"v" * 70, [("h", b"x")] * (n % 3), TIME_MS) for n in range(6)]
    section = bytes(records.encode(rows)[batch.HEADER_SIZE :])
    dice, refused = random.Random(5), 0
    for _ in range(600):
        changed = bytearray(section)
        for _ in range(dice.randrange(1, 4)):
            changed[dice.randrange(len(changed))] = dice.choice((0, 1, 2, 127, 128, 255, dice.randrange(256)))
        content = with_section(bytes(changed[: dice.choice((len(changed), dice.randrange(1, len(changed))))]), 6)
        try:
            expected = expected_rows(content)
        except InvalidBatchError:
            expected = None
        try:
            found = [plain(row) for row in read(content)]
        except CorruptRecordError:
            refused += 1
            found = None
        assert found == expected, bytes(changed).hex()
    assert refused > 200


@pytest.mark.parametrize(
    "section",
    [b"\xff" * 200, b"\x80" * 200, b"\x00" * 200, b"\x01" * 200, b"\xff" * 9 + b"\x01" + b"\xfe" * 190],
)
@pytest.mark.parametrize("lockstep_min", [1, 1000])
def test_hostile_lengths_end_in_an_error(section: bytes, lockstep_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "LOCKSTEP_MIN", lockstep_min)
    with pytest.raises(CorruptRecordError, match=r"orders.log: damaged at byte 0: record \d+ .*; batch at offset 0"):
        read(with_section(section, 20))


def record(*, length: int | None = None, delta_ms: int = 0, key_size: int = 1, is_longer: bool = False) -> bytes:
    """The one record of a batch: key ``k``, value ``v``, no headers; or one that lies."""
    content = b"\x00" + bytes([delta_ms << 1 ^ delta_ms >> 7]) + b"\x00" + bytes([key_size << 1]) + b"k" + b"\x02v\x00"
    return bytes([(len(content) if length is None else length) << 1]) + content + (b"\x00" if is_longer else b"")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (record(length=7), "does not have the length it says"),
        (record(length=9), "does not have the length it says"),
        (record(is_longer=True), "does not have the length it says"),
        (record(length=9, is_longer=True), "ends before its length does"),
        (record(delta_ms=1), "has a time outside its batch's"),
        (record(key_size=60), "has a key or value longer than itself"),
        (record()[:4] + b"\xff" * 9 + b"\x00", "does not have the length it says"),
    ],
)
@pytest.mark.parametrize("lockstep_min", [1, 1000])
def test_a_record_that_lies_is_refused(
    section: bytes, text: str, lockstep_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "LOCKSTEP_MIN", lockstep_min)
    assert read(with_section(record(), 1))[0][:2] == (b"k", b"v")
    with pytest.raises(CorruptRecordError, match=f"record 0 {text}"):
        read(with_section(section, 1))
    with pytest.raises(InvalidBatchError):
        expected_rows(with_section(section, 1))


def test_a_bomb_is_given_up() -> None:
    packed = cramjam.zstd.compress(bytes(8 << 20), 1)
    with pytest.raises(CorruptRecordError, match="does not inflate to at most"):
        read(with_section(bytes(packed), 1, batch.CODEC_ZSTD))


def test_a_count_that_cannot_be_allocates_nothing() -> None:
    made = bytearray(records.encode([(b"k", b"v", [], TIME_MS)]))
    made[23:27], made[57:61] = (2**31 - 2).to_bytes(4, "big"), (2**31 - 1).to_bytes(4, "big")
    made[17:21] = batch.checksum(memoryview(made)[21:]).to_bytes(4, "big")
    batch.stamp(made, TOPIC_ID, NUMBER, 0, batch.stored_crc(made))
    taken = chunk.check(bytes(made), ORIGIN, 0)
    assert taken.damage is not None
    assert len(taken.counts) == 0


# --- varints ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=30))
def test_varints_of_every_length_are_read_as_one_by_one(values: list[int]) -> None:
    encoded, places = bytearray(), []
    for value in values:
        places.append(len(encoded))
        rest = (value << 1 ^ value >> 63) & (1 << 64) - 1
        while rest > 0x7F:
            encoded.append(rest & 0x7F | 0x80)
            rest >>= 7
        encoded.append(rest)
    found, ends = fields.read_varints(np.frombuffer(bytes(encoded), np.uint8), np.array(places))
    assert found.tolist() == values
    assert ends.tolist() == [*places[1:], len(encoded)]
    assert [records.varint(bytes(encoded), at) for at in places] == list(zip(values, ends.tolist(), strict=True))
