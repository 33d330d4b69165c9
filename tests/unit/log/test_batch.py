"""Batches at the door and in their places."""

from __future__ import annotations

import pytest

from txmq.errors import CorruptRecordError, InvalidBatchError
from txmq.log import batch, records

from .support import NUMBER, TIME_MS, TOPIC_ID, make_batch, make_placed, with_fields

PLAIN = bytes(make_batch(3))
PACKED = bytes(records.encode([(b"k", b"v" * 500, (), TIME_MS)] * 3, compression="zstd"))


def flipped(source: bytes | bytearray, bit: int) -> bytearray:
    result = bytearray(source)
    result[bit // 8] ^= 1 << (bit % 8)
    return result


def test_check_tells_what_the_broker_needs() -> None:
    two: list[records.Record] = [(None, b"a", (), TIME_MS), (None, b"b", (), TIME_MS + 5)]
    made = records.encode(two, producer_id=9, producer_epoch=2, base_sequence=77)
    assert batch.check(made) == (2, TIME_MS + 5, 9, 2, 77, batch.stored_crc(made))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"base": 1}, "base offset 1"),
        ({"magic": 1}, "magic 1"),
        ({"magic": 3}, "magic 3"),
        ({"crc": 0}, "CRC"),
        ({"attributes": 2}, "codec 2"),
        ({"attributes": 5}, "codec 5"),
        ({"attributes": 8}, "only the codec bits"),
        ({"attributes": 16}, "only the codec bits"),
        ({"attributes": 32}, "only the codec bits"),
        ({"attributes": -32768}, "only the codec bits"),
        ({"count": 0, "delta": -1}, "0 records"),
        ({"count": -1, "delta": -2}, "-1 records"),
        ({"count": 4}, "last offset delta"),
        ({"delta": 3}, "last offset delta"),
        ({"first_ms": -2}, "timestamps"),
        ({"max_ms": TIME_MS - 1}, "timestamps"),
        ({"max_ms": (1 << 63) - 1}, "timestamps"),
        ({"producer": -2}, "producer id -2"),
        ({"epoch": -2}, "epoch -2"),
        ({"sequence": -2}, "sequence -2"),
        ({"count": 1000, "delta": 999}, "1000 records do not fit"),
        ({"count": 2**31 - 1, "delta": 2**31 - 2}, "do not fit"),
        ({"length": 0}, "length"),
        ({"length": -1}, "length"),
        ({"length": 2**31 - 1}, "length"),
    ],
)
def test_batch_that_breaks_rule_is_refused_and_rule_named(changed: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidBatchError, match=text):
        batch.check(with_fields(PLAIN, **changed))


@pytest.mark.parametrize("count", [2**31 - 1, (1 << 20) // batch.RECORD_SIZE_MIN + 1])
def test_compressed_batch_claims_no_more_than_it_can_hold(count: int) -> None:
    with pytest.raises(InvalidBatchError, match="records do not fit"):
        batch.check(with_fields(PACKED, count=count, delta=count - 1))
    batch.check(
        with_fields(PACKED, count=(1 << 20) // batch.RECORD_SIZE_MIN, delta=(1 << 20) // batch.RECORD_SIZE_MIN - 1)
    )


@pytest.mark.parametrize("source", [PLAIN, PACKED], ids=["plain", "zstd"])
def test_every_flipped_bit_outside_the_placement_is_refused(source: bytes) -> None:
    batch.check(bytearray(source))
    for bit in range(len(source) * 8):
        if not 12 <= bit // 8 < 16:  # Kafka's PartitionLeaderEpoch: stamp overwrites it
            with pytest.raises(InvalidBatchError):
                batch.check(flipped(source, bit))


def test_a_batch_cut_or_continued_anywhere_is_refused() -> None:
    for size in range(len(PLAIN)):
        with pytest.raises(InvalidBatchError):
            batch.check(bytearray(PLAIN[:size]))
    with pytest.raises(InvalidBatchError, match="length"):
        batch.check(bytearray(PLAIN + b"x"))


def test_no_timestamp_and_the_last_one_are_taken() -> None:
    assert batch.check(with_fields(PLAIN, first_ms=-1, max_ms=-1))[1] == -1
    assert batch.check(with_fields(PLAIN, max_ms=batch.TIMESTAMP_MS_MAX))[1] == batch.TIMESTAMP_MS_MAX


def test_walking_shows_every_batch_of_a_chain() -> None:
    chain = make_placed(10, 2) + make_placed(12, 1, b"x" * 400) + make_placed(13, 5)
    sizes = [len(make_placed(10, 2)), len(make_placed(12, 1, b"x" * 400)), len(make_placed(13, 5))]
    found = list(batch.walk(chain, TOPIC_ID, NUMBER, 10, full=True))
    assert found == [
        (0, sizes[0], 10, 2, TIME_MS),
        (sizes[0], sizes[1], 12, 1, TIME_MS),
        (sizes[0] + sizes[1], sizes[2], 13, 5, TIME_MS),
    ]
    assert list(batch.headers(chain)) == found


def test_every_flipped_bit_of_placed_batch_is_found_by_walking() -> None:
    chain = make_placed(10, 2) + make_placed(12)
    for bit in range(len(chain) * 8):
        with pytest.raises(CorruptRecordError):
            list(batch.walk(flipped(chain, bit), TOPIC_ID, NUMBER, 10, full=True))


def test_every_flipped_bit_of_placed_batch_is_found_by_decoding() -> None:
    chain = make_placed(10, 2) + make_placed(12)
    assert len(records.decode(chain, "t", NUMBER, topic_id=TOPIC_ID, expected_offset=10)) == 3
    for bit in range(len(chain) * 8):
        with pytest.raises(InvalidBatchError):
            records.decode(flipped(chain, bit), "t", NUMBER, topic_id=TOPIC_ID)


def test_header_walk_alone_finds_every_flipped_bit_of_header() -> None:
    placed = make_placed(10, 2)
    for bit in range(21 * 8):
        with pytest.raises(CorruptRecordError):
            list(batch.walk(flipped(placed, bit), TOPIC_ID, NUMBER, 10))


def test_a_chain_cut_anywhere_inside_a_batch_is_an_error() -> None:
    chain = make_placed(10, 2) + make_placed(12)
    boundary = len(make_placed(10, 2))
    for size in range(1, len(chain)):
        if size != boundary:
            with pytest.raises(CorruptRecordError):
                list(batch.walk(chain[:size], TOPIC_ID, NUMBER, 10))
            with pytest.raises(InvalidBatchError):
                records.decode(chain[:size], "t", NUMBER)


@pytest.mark.parametrize(("topic_id", "number", "offset"), [(8, NUMBER, 10), (TOPIC_ID, 4, 10), (TOPIC_ID, NUMBER, 11)])
def test_a_batch_in_another_place_is_found(topic_id: int, number: int, offset: int) -> None:
    with pytest.raises(CorruptRecordError):
        list(batch.walk(make_placed(10), topic_id, number, offset))


def test_a_batch_left_out_of_a_chain_is_found() -> None:
    with pytest.raises(CorruptRecordError, match="12 where 11 follows") as caught:
        list(
            batch.walk(
                make_placed(10) + make_placed(12), TOPIC_ID, NUMBER, None, path="log/7/3/a.log", path_position=50
            )
        )
    assert (caught.value.path, caught.value.position) == ("log/7/3/a.log", 50 + len(make_placed(10)))


def test_stamping_changes_nothing_under_the_crc() -> None:
    made = make_batch(4)
    before = bytes(made)
    crc = batch.check(made)[5]
    batch.stamp(made, 1, 2, 2**62, crc)
    assert bytes(made[8:12]) + bytes(made[16:]) == before[8:12] + before[16:]
    batch.stamp(made, 1, 2, 0, crc)
    assert batch.check(made)[5] == crc


def test_headers_end_before_what_is_not_there() -> None:
    chain = make_placed(0) + make_placed(1, 1, b"x" * 300)
    first = len(make_placed(0))
    assert len(list(batch.headers(chain[: first + 60]))) == 1
    assert len(list(batch.headers(chain[: first + 61]))) == 2  # its body may lie beyond
    assert list(batch.headers(bytes(200))) == []
    assert list(batch.headers(b"\xff" * 200)) == []
