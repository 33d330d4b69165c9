"""Transaction bodies: strict, bounded, and the same on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import BadRequestError, LocalProtocolError, RemoteProtocolError
from txmq.protocol.transaction_bodies import (
    ANY_KEYS,
    KEYS_MAX,
    NO_KEYS,
    PARTS_MAX,
    Buffer,
    Part,
    PartResult,
    encode_part,
    encode_result_line,
    parse_outcome,
    parse_parts,
    parse_result_lines,
)

TWO = b"orders 3 5 keys=7,4294967295\r\nhelloaudit 0 2 id=9\r\n\r\n"


def test_a_body_is_its_parts_in_order() -> None:
    assert parse_parts(TWO) == [
        Part("orders", 3, bytearray(b"hello"), frozenset({7, 4294967295}), 0),
        Part("audit", 0, bytearray(b"\r\n"), NO_KEYS, 9),
    ]
    assert parse_parts(b"t 0 1 keys=*\r\nx") == [Part("t", 0, bytearray(b"x"), ANY_KEYS, 0)]
    assert parse_parts(b"t 0 1 keys=* id=4\r\nx") == [Part("t", 0, bytearray(b"x"), ANY_KEYS, 4)]
    assert parse_parts(b"") == []


_KEYS = st.none() | st.frozensets(st.integers(0, 2**32 - 1), max_size=KEYS_MAX + 1)
_PARTS = st.tuples(
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True),
    st.integers(0, 10**10 - 1),
    st.binary(min_size=1, max_size=50),
    _KEYS,
    st.integers(0, 10**10 - 1),
)


@given(parts=st.lists(_PARTS, max_size=5))
def test_what_is_encoded_is_parsed(parts: list[tuple[str, int, bytes, frozenset[int] | None, int]]) -> None:
    buffers: list[Buffer] = []
    for part in parts:
        buffers += encode_part(*part)
    expected = [
        Part(topic, partition, bytearray(batch), ANY_KEYS if keys is None or len(keys) > KEYS_MAX else keys, topic_id)
        for topic, partition, batch, keys, topic_id in parts
    ]
    assert parse_parts(bytearray().join(buffers)) == expected
    assert parse_parts(memoryview(b"".join(buffers))) == expected


def test_batches_are_copies_that_may_be_written_into() -> None:
    body = bytearray(b"t 0 2\r\nhi")
    (part,) = parse_parts(body)
    part.batch[:] = b"XXX"
    assert body == b"t 0 2\r\nhi"


def test_body_cut_at_any_byte_is_whole_parts_or_refused() -> None:
    for end in range(len(TWO)):
        if end in (0, TWO.index(b"audit")):
            assert parse_parts(TWO[:end]) == parse_parts(TWO)[: bool(end)]
        else:
            with pytest.raises(BadRequestError):
                parse_parts(TWO[:end])


def test_any_flipped_bit_gives_other_parts_or_is_refused() -> None:
    whole = parse_parts(TWO)
    for bit in range(len(TWO) * 8):
        flipped = bytearray(TWO)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert parse_parts(flipped) != whole, bit
        except BadRequestError:
            continue


@pytest.mark.parametrize(
    "body",
    [
        b"t 0 0\r\n", b"t 0 05\r\nhello", b"t 00 5\r\nhello", b"t 0 -5\r\nhello", b"t -1 5\r\nhello", b"t 0 5\nhello",
        b"t  0 5\r\nhello", b" t 0 5\r\nhello", b"t 0 5 \r\nhello", b"t 0 5 keys=\r\nhello", b"t 0 5 keys=1,\r\nhello",
        b"t 0 5 keys=2,1\r\nhello", b"t 0 5 keys=1,1\r\nhello", b"t 0 5 keys=4294967296\r\nhello",
        b"t 0 5 keys=01\r\nhello",
        b"t 0 5 keys=*,1\r\nhello", b"t 0 5 id=0\r\nhello", b"t 0 5 id=01\r\nhello", b"t 0 5 id=\r\nhello",
        b"t 0 5 id=1 keys=1\r\nhello", b"t 0 5 key=1\r\nhello", b"t 0 5\r\nhelloX", b"t 0 5\r\nhell",
        b"t 0 99999999999\r\nx",
        b"t\x00 0 5\r\nhello", b"t\xff 0 5\r\nhello", b"n" * 201 + b" 0 5\r\nhello", b"\r\n", b"hello",
        b"t 0 1 keys=" + b",".join(b"%d" % key for key in range(KEYS_MAX + 1)) + b"\r\nx",
    ],
)  # fmt: skip
def test_what_is_not_a_sequence_of_parts_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_parts(body)


def test_the_number_of_parts_is_bounded() -> None:
    assert len(parse_parts(b"t 0 1\r\nx" * PARTS_MAX)) == PARTS_MAX
    with pytest.raises(BadRequestError, match="at most 10000"):
        parse_parts(b"t 0 1\r\nx" * (PARTS_MAX + 1))


@pytest.mark.parametrize(
    ("topic", "partition", "batch", "keys", "topic_id"),
    [
        ("a b", 0, b"x", (), 0), ("", 0, b"x", (), 0), ("caf\xe9", 0, b"x", (), 0), ("a\r\nb", 0, b"x", (), 0),
        ("n" * 201, 0, b"x", (), 0), ("t", -1, b"x", (), 0), ("t", 10**10, b"x", (), 0), ("t", 0, b"", (), 0),
        ("t", 0, b"x", (-1,), 0), ("t", 0, b"x", (2**32,), 0), ("t", 0, b"x", (), -1), ("t", 0, b"x", (), 10**10),
    ],
)  # fmt: skip
def test_part_that_cannot_be_carried_is_refused_by_its_sender(
    topic: str, partition: int, batch: bytes, keys: tuple[int, ...], topic_id: int
) -> None:
    with pytest.raises(LocalProtocolError):
        encode_part(topic, partition, batch, frozenset(keys), topic_id)


def test_results_are_read_as_they_were_written() -> None:
    body = encode_result_line("orders", 3, 2**64 - 1, 7) + encode_result_line("audit", 0, 0, 1)
    assert body == b"orders 3 18446744073709551615 7\naudit 0 0 1\n"
    results = [PartResult("orders", 3, 2**64 - 1, 7), PartResult("audit", 0, 0, 1)]
    assert parse_result_lines(body) == results
    assert parse_outcome(b"committed\n" + body) == ("committed", results)
    assert [parse_outcome(b"%b\n" % word)[0] for word in (b"rolled-back", b"prepared", b"unknown")] == [
        "rolled-back", "prepared", "unknown",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"orders 3 5",
        b"orders 3 5 0\n",
        b"orders 3 5 7\r\n",
        b"orders 3 -5 7\n",
        b"\n",
        b"orders 3 5 7\nx",
        b"t 0 0 01\n",
    ],
)
def test_what_is_no_result_line_is_the_peers_fault(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_result_lines(body)


@pytest.mark.parametrize(
    "body", [b"", b"committed", b"commited\n", b"prepared\nt 0 0 1\n", b"unknown\nx\n", b"committed\nx\n"]
)
def test_what_is_no_outcome_is_the_peers_fault(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_outcome(body)
