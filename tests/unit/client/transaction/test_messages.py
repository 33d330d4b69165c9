"""The messages of an open transaction: parts, keys, and the offsets of the decision."""

from __future__ import annotations

from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.client.transaction.messages import NOTHING_STREAMED, MessageBuffer
from txmq.log.batch import checksum
from txmq.log.records import Record, decode
from txmq.model import SendStatus
from txmq.protocol.transaction_bodies import KEYS_MAX, PartResult, encode_part

TXID = "00000000000000c1-00000000000000a1-7-1"
LARGE = 1 << 20


def record(value: bytes, key: bytes | None = None) -> Record:
    return (key, value, [], 1_700_000_000_000)


def test_part_keys_are_checksums_including_one_for_no_key() -> None:
    buffer = MessageBuffer(None, lambda _topic: 0)
    for key in (b"a", b"b", b"a", None):
        buffer.add("orders", 0, record(b"v", key))
    (part,) = buffer.take_parts(TXID, LARGE)
    assert part.keys == frozenset({checksum(b"a"), checksum(b"b"), checksum(b"")})


@pytest.mark.parametrize(("count", "is_listed"), [(KEYS_MAX, True), (KEYS_MAX + 1, False)])
def test_more_keys_than_fit_are_any(count: int, is_listed: bool) -> None:
    buffer = MessageBuffer(None, lambda _topic: 0)
    for number in range(count):
        buffer.add("orders", 0, record(b"v", b"%d" % number))
    (part,) = buffer.take_parts(TXID, LARGE)
    assert (part.keys is not None) is is_listed


class Topics(str, Enum):  # noqa: UP042 - the text of its members is "Topics.ORDERS"
    ORDERS = "orders"


def test_topic_that_is_an_enumerations_member_is_its_value() -> None:
    """A block alone said "no topic 'Topics.ORDERS'"."""
    buffer = MessageBuffer(None, lambda _topic: 0)
    results = [buffer.add(topic, 0, record(b"1")) for topic in (Topics.ORDERS, "orders", Topics.ORDERS)]
    (part,) = buffer.take_parts(TXID, LARGE)
    assert {type(part.topic), *(type(result.topic) for result in results)} == {str}
    assert b"".join(map(bytes, encode_part(*part))).startswith(b"orders 0 ")


def test_what_was_taken_is_not_taken_again() -> None:
    buffer = MessageBuffer(None, lambda _topic: 0)
    buffer.add("orders", 0, record(b"1"))
    assert buffer.size_bytes > 0
    assert len(buffer.take_parts(TXID, LARGE)) == 1
    assert (buffer.size_bytes, buffer.take_parts(TXID, LARGE)) == (0, [])


def test_a_partition_without_a_line_keeps_its_results_pending() -> None:
    """Its topic was deleted before the decision."""
    buffer = MessageBuffer(None, lambda _topic: 0)
    buffer.add("gone", 0, record(b"1"))
    buffer.add("orders", 0, record(b"2"))
    buffer.place([PartResult("orders", 0, 7, 1)])
    assert [(r.offset, r.status) for r in buffer.results] == [
        (None, SendStatus.PENDING), (7, SendStatus.ACKNOWLEDGED)
    ]  # fmt: skip


def test_what_was_streamed_is_stated_as_the_broker_counts_it() -> None:
    streamed = NOTHING_STREAMED.with_part(b"one").with_part(b"three")
    assert streamed.extensions() == {"parts": 2, "bytes": 8, "crc": checksum(b"onethree", 0)}


_SENDS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(0, 3000), st.booleans()), max_size=40
)


@given(_SENDS, st.integers(200, 5000))
def test_order_and_offsets_survive_any_cutting_into_parts(
    sends: list[tuple[str, int, int, bool]], part_size: int
) -> None:
    buffer = MessageBuffer(None, lambda _topic: 0)
    log: dict[tuple[str, int], list[bytes | None]] = {}
    lines: list[PartResult] = []
    expected: list[bytes] = []

    def take() -> None:
        for part in buffer.take_parts(TXID, part_size):
            place = log.setdefault((part.topic, part.partition), [])
            messages = decode(part.batch, part.topic, part.partition)
            assert {message.txid for message in messages} == {TXID}
            assert len(messages) == 1 or len(part.batch) <= part_size + 100
            lines.append(PartResult(part.topic, part.partition, len(place), len(messages)))
            place.extend(message.value for message in messages)

    for number, (topic, partition, size, is_taken) in enumerate(sends):
        expected.append(b"%d " % number + bytes(size))
        buffer.add(topic, partition, record(expected[-1]))
        if is_taken:
            take()
    take()
    buffer.place(lines)
    found = [log[result.topic, result.partition][result.offset or 0] for result in buffer.results]
    assert found == expected
