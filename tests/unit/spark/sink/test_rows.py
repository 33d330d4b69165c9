"""Rows become parts: where a producer would send them, in order, in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from txmq.client.transaction.messages import EncodedPart
from txmq.errors import BadRequestError, LocalProtocolError, TooLargeError, UnknownTopicError
from txmq.log import records
from txmq.model import Message
from txmq.protocol.transaction_bodies import PARTS_MAX
from txmq.spark.sink.rows import Chunk, Gatherer

TXID = "0123456789abcdef-fedcba9876543210-1-1"
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
LIMIT = 1 << 20


def partitions_of(topic: str) -> int:
    """Topics a (4 partitions) and b (1)."""
    counts = {"a": 4, "b": 1}
    if topic not in counts:
        raise UnknownTopicError(topic)
    return counts[topic]


def chunks(batches: list[Any], topic: str | None = "a", limit: int = LIMIT) -> list[Chunk]:
    """What a task makes of them."""
    return [*Gatherer(topic, partitions_of, limit).chunks(iter(batches))]


def written(made: list[Chunk], *, compression: str | None = None) -> dict[tuple[str, int], list[Message]]:
    """The messages of all chunks, by place."""
    found: dict[tuple[str, int], list[Message]] = {}
    for chunk in made:
        for part in parts(chunk, compression=compression):
            found.setdefault(part[:2], []).extend(records.decode(part.batch, part.topic, part.partition))
    return found


def parts(chunk: Chunk, *, compression: str | None = None, limit: int = LIMIT) -> list[EncodedPart]:
    """A chunk's parts."""
    return chunk.parts(TXID, 17, compression, limit)


def batch(**columns: Any) -> Any:
    """An Arrow batch."""
    return pa.record_batch(list(columns.values()), names=list(columns))


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
def test_rows_go_where_a_producer_sends_them_in_order(kind: Any, compression: str | None) -> None:
    keys = [f"k{n % 50}".encode() for n in range(1000)]
    values = [f"v{n}".encode() for n in range(1000)]
    made = chunks([batch(value=pa.array(values).cast(kind), key=pa.array(keys).cast(kind))])
    found = written(made, compression=compression)
    expected: dict[tuple[str, int], list[tuple[bytes, bytes]]] = {}
    for key, value in zip(keys, values, strict=True):
        expected.setdefault(("a", crc32c(key) % 4), []).append((key, value))
    assert {partition: [(m.key, m.value) for m in messages] for partition, messages in found.items()} == expected
    assert {(m.txid, m.timestamp_ms) for messages in found.values() for m in messages} == {(TXID, 17)}


def test_without_keys_rows_spread_slice_by_slice() -> None:
    found = written(chunks([batch(value=pa.array([b"x" * 1000] * 4000))]))
    assert set(found) == {("a", n) for n in range(4)}
    assert sum(map(len, found.values())) == 4000


def test_topics_partitions_and_headers_of_their_own() -> None:
    rows = batch(
        headers=pa.array([[("h", b"1"), ("txmq.txid", b"forged")], None, [("h", None)], []], HEADERS),
        topic=pa.array(["a", "b", "a", "a"]), partition=pa.array([3, None, None, 1], pa.int32()),
        value=pa.array([b"0", b"1", None, b"3"]), key=pa.array([b"k", None, b"k", None]),
    )  # fmt: skip
    found = written(chunks([rows], topic=None))
    told = {partition: [(m.key, m.value, m.headers, m.txid) for m in messages] for partition, messages in found.items()}
    assert told == {
        ("a", 3): [(b"k", b"0", {"h": b"1"}, TXID)],
        ("b", 0): [(None, b"1", {}, TXID)],
        ("a", crc32c(b"k") % 4): [(b"k", None, {"h": b""}, TXID)],
        ("a", 1): [(None, b"3", {}, TXID)],
    }


def test_chunks_are_bounded_however_many_rows_come() -> None:
    live: list[int] = []

    def endless() -> Iterator[Any]:
        for number in range(40):
            live.append(number)
            yield batch(value=pa.array([bytes(1000)] * 500))

    gatherer = Gatherer("a", partitions_of, 256 << 10)
    count = 0
    for index, chunk in enumerate(gatherer.chunks(endless())):
        assert chunk.size_bytes <= 256 << 10
        assert len(live) <= index + 2, "batches are read ahead"
        count += chunk.count
    assert count == 20_000


def test_large_row_has_its_own_chunk_and_oversized_one_fails() -> None:
    made = chunks([batch(value=pa.array([b"a", bytes(500_000), b"b", b"c"]))], limit=100_000)
    assert [chunk.count for chunk in made] == [1, 1, 2]
    assert [len(part.batch) < 300 or len(part.batch) > 500_000 for chunk in made for part in parts(chunk)] == [True] * 4
    with pytest.raises(TooLargeError, match=r"a row for topic 'a', partition \d: a message of 500\d\d\d bytes"):
        parts(made[1], limit=400_000)


def test_rows_for_very_many_places_fit_a_request() -> None:
    partitions = pa.array([n % 20_000 for n in range(40_000)], pa.int32())
    gatherer = Gatherer("a", lambda _: 20_000, 4 << 20)
    made = [*gatherer.chunks(iter([batch(value=pa.array([b""] * 40_000), partition=partitions)]))]
    assert sum(chunk.count for chunk in made) == 40_000
    assert max(len(chunk.partitions) for chunk in made) < PARTS_MAX


def test_large_rows_among_small_ones_have_chunks_of_their_own() -> None:
    values = [b"s" * 100] * 3000
    values[1500:1502] = [bytes(300_000), bytes(300_000)]  # neighbours: together they would not fit a request
    made = chunks([batch(value=pa.array(values))], limit=100_000)
    assert all(chunk.size_bytes <= 100_000 or chunk.count == 1 for chunk in made)
    assert [message.value for partition in written(made).values() for message in partition].count(bytes(300_000)) == 2
    assert sum(chunk.count for chunk in made) == 3000


def test_parts_beyond_the_size_limit_become_several_batches() -> None:
    (made,) = chunks([batch(value=pa.array([bytes(900)] * 100), key=pa.array([b"k"] * 100))])
    cut = parts(made, limit=10_000)
    assert len(cut) > 9
    assert max(len(part.batch) for part in cut) <= 10_000
    assert all(records.decode(part.batch, "a", 0)[0].txid == TXID for part in cut)


def test_no_rows_make_no_chunk() -> None:
    assert chunks([]) == []
    assert chunks([batch(value=pa.array([], pa.binary()))]) == []


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (batch(value=pa.array([b"v"]), topic=pa.array([None], pa.string())), BadRequestError),
        (batch(value=pa.array([b"v"]), topic=pa.array(["nosuch"])), UnknownTopicError),
        (batch(value=pa.array([b"v"]), topic=pa.array(["a"]), partition=pa.array([4], pa.int32())), LocalProtocolError),
        (
            batch(value=pa.array([b"v"]), topic=pa.array(["a"]), partition=pa.array([-1], pa.int32())),
            LocalProtocolError,
        ),
    ],
)
def test_a_row_that_has_no_place_is_refused(rows: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        chunks([rows], topic=None)
