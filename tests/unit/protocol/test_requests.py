"""The request reader: what it takes, what it refuses, and that the way the stream was cut changes neither."""

from __future__ import annotations

import json
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txmq.protocol import requests
from txmq.protocol.grammar import LINE_SIZE_BYTES_MAX, OFFSETS_SIZE_BYTES_MAX, VERBS, Verb
from txmq.protocol.requests import OWN_BYTES, ByteBudget, Limits, Request, RequestReader, Violation

Item = Request | Violation
VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).resolve().parents[2] / "vectors" / "wire.json").read_text("utf-8")
)
LIMIT = 1 << 20


def _reader(limit: int = LIMIT, budget: int = 1 << 30) -> RequestReader:
    return RequestReader(Limits(request_size_bytes_max=limit), ByteBudget(budget))


def _bytes(vector: dict[str, Any]) -> bytes:
    """The stream of a vector: text in latin-1, ``repeat`` times where that is given."""
    return str(vector["bytes"]).encode("latin-1") * int(vector.get("repeat", 1))


def _request(vector: dict[str, Any]) -> Request:
    verb, arguments, extensions, body, opaque = vector["request"]
    return (
        verb.encode(),
        [word.encode() for word in arguments],
        None if extensions is None else {name.encode(): value.encode() for name, value in extensions.items()},
        None if body is None else bytearray(body.encode("latin-1")),
        opaque.encode(),
    )


def _read(pieces: list[bytes], reader: RequestReader | None = None) -> tuple[list[Item], bool]:
    """Feed pieces, each in a buffer that is overwritten at once; returns the items and whether the reader is idle."""
    reader = reader or _reader()
    items: list[Item] = []
    for piece in pieces:
        buffer = bytearray(piece)
        items += reader.feed(memoryview(buffer))
        buffer[:] = b"\xaa" * len(buffer)
    return items, reader.is_idle


def _copied(reader: RequestReader) -> RequestReader:
    """One that has read the same."""
    made = copy(reader)
    made._budget = copy(reader._budget)
    if reader._pending is not None:
        parsed, body = reader._pending
        made._pending = parsed, bytearray(body)
    return made


def _one_by_one(stream: bytes) -> list[bytes]:
    return [stream[index : index + 1] for index in range(len(stream))]


REQUESTS = [pytest.param(_bytes(v), _request(v), id=v["name"]) for v in VECTORS["requests"]]
VIOLATIONS = [pytest.param(_bytes(v), v["code"], v["opaque"].encode(), id=v["name"]) for v in VECTORS["violations"]]
TRAILER = b"ping Z9\r\n"
REFUSED = [
    pytest.param(_bytes(v) + bytes(v["body_size"]), v["opaque"].encode(), id=v["name"]) for v in VECTORS["refused"]
]
UNKNOWN = [pytest.param(_bytes(v), id=v["name"]) for v in VECTORS["unknown"]]
AFTER: Request = (b"ping", [], None, None, b"Z9")


def test_the_vectors_hold_every_verb_and_every_extension() -> None:
    requests = [_request(v) for v in VECTORS["requests"]]
    seen = {(verb, name) for verb, _, extensions, _, _ in requests for name in (extensions or {})}
    assert {verb for verb, *_ in requests} == set(VERBS)
    assert {(verb.name, name) for verb in VERBS.values() for name in verb.extensions} <= seen


@pytest.mark.parametrize(("stream", "request_"), REQUESTS)
def test_request_is_equal_whole_by_byte_and_in_two_pieces(stream: bytes, request_: Request) -> None:
    assert _read([stream]) == ([request_], True)
    assert _read(_one_by_one(stream)) == ([request_], True)
    for cut in range(1, len(stream)):
        assert _read([stream[:cut], stream[cut:]]) == ([request_], True), cut


@pytest.mark.parametrize(("stream", "request_"), REQUESTS)
def test_what_follows_a_request_is_the_next_one(stream: bytes, request_: Request) -> None:
    assert _read([stream + TRAILER]) == ([request_, AFTER], True)
    assert _read(_one_by_one(stream + TRAILER)) == ([request_, AFTER], True)
    assert _read([TRAILER + stream + stream]) == ([AFTER, request_, request_], True)


@pytest.mark.parametrize(("stream", "request_"), REQUESTS)
def test_request_cut_short_at_any_byte_is_unfinished_never_error(stream: bytes, request_: Request) -> None:
    for end in range(len(stream)):
        assert _read([stream[:end]]) == ([], end == 0), end


@pytest.mark.parametrize(("stream", "request_"), REQUESTS)
def test_any_flipped_bit_gives_requests_or_a_violation_however_cut(stream: bytes, request_: Request) -> None:
    before = _reader()  # has read, byte by byte, what is before the flipped one
    for bit in range(len(stream) * 8):
        flipped = bytearray(stream + TRAILER)
        flipped[bit // 8] ^= 1 << bit % 8
        whole = _read([bytes(flipped)])
        assert whole == _read(_one_by_one(bytes(flipped[bit // 8 :])), _copied(before)), bit
        assert whole[0] != [request_, AFTER], bit
        for item in whole[0]:
            assert isinstance(item, Violation) is (type(item) is not tuple), bit
        if bit % 8 == 7:
            assert before.feed(stream[bit // 8 : bit // 8 + 1]) == [request_] * (bit == len(stream) * 8 - 1)


@pytest.mark.parametrize("stream", UNKNOWN)
def test_unknown_verb_is_refused_and_later_requests_are_served(stream: bytes) -> None:
    whole = TRAILER + stream + TRAILER + stream
    for pieces in ([whole], _one_by_one(whole), *([whole[:cut], whole[cut:]] for cut in range(len(whole)))):
        items, is_idle = _read(pieces)
        first, refused, last, again = items
        assert (first, last) == (AFTER, AFTER)
        assert isinstance(refused, Violation)
        assert (refused.code, refused.error_name, refused.opaque, refused.closes) == (400, "bad-request", b"-", False)
        assert again == refused
        assert is_idle


@pytest.mark.parametrize("line", [b"batch orders 0 %d A1\r\n", b"store %d A1\n", b"pup orders 0 key=k %d A1\r\n"])
def test_body_of_unknown_verb_is_never_read_as_requests(line: bytes) -> None:
    """A newer peer's: a message that it carried was stored as what it said."""
    body = b"put orders 0 raw 5 A2\r\nhello"
    (refused,), _ = _read([line % len(body) + body + TRAILER])
    assert isinstance(refused, Violation)
    assert (refused.code, refused.closes) == (400, True)


@pytest.mark.parametrize(("stream", "code", "opaque"), VIOLATIONS)
def test_a_violation_is_told_once_and_the_reader_is_dead(stream: bytes, code: int, opaque: bytes) -> None:
    reader = _reader()
    items, _ = _read([TRAILER + stream], reader)
    assert items[0] == AFTER
    violation = items[-1]
    assert isinstance(violation, Violation) and len(items) == 2  # noqa: PT018
    assert (violation.code, violation.opaque) == (code, opaque)
    assert violation.text.isascii() and violation.text.isprintable()  # noqa: PT018
    assert reader.feed(TRAILER) == []
    assert reader.is_idle


@pytest.mark.parametrize(("stream", "code", "opaque"), VIOLATIONS)
def test_violation_does_not_depend_on_how_stream_was_cut(stream: bytes, code: int, opaque: bytes) -> None:
    whole = _read([stream + TRAILER])
    assert _read(_one_by_one(stream + TRAILER)) == whole
    for cut in range(1, len(stream), 1 + len(stream) // 200):
        assert _read([stream[:cut], stream[cut:] + TRAILER]) == whole, cut


@pytest.mark.parametrize(
    ("beginning", "last"),
    [
        (b"", b"\x00"),
        (b"", b"\x16"),  # a TLS hello
        (b"GET", b" "),
        (b"SSH-2.0-OpenSSH_9.2p1", b" "),
        (b"ping", b"\t"),
        (b"ping A1\r", b"\r"),
        (b"put t\xff"[:5], b"\xff"),
        (b"ping " + b"A" * (LINE_SIZE_BYTES_MAX - 6), b"A"),
    ],
    ids=["zero", "tls", "http", "ssh", "tab", "two returns", "not ascii", "4 KiB"],
)
def test_impossible_request_is_refused_at_its_first_byte(beginning: bytes, last: bytes) -> None:
    reader = _reader()
    assert reader.feed(beginning) == []
    (violation,) = reader.feed(last)
    assert isinstance(violation, Violation)
    assert violation.code == 400


def test_a_line_of_exactly_the_limit_is_read() -> None:
    line = b"meta " + b"t" * (LINE_SIZE_BYTES_MAX - 9) + b" A\r\n"
    assert len(line) == LINE_SIZE_BYTES_MAX
    assert _read([line])[0] == _read(_one_by_one(line))[0] == [(b"meta", [line.split(b" ")[1]], None, None, b"A")]
    for tail in (b"t A\r\n", b" AA\r\n", b" AA\rX"):
        longer = line[:-4] + tail
        whole = _read([longer])
        assert isinstance(whole[0][0], Violation)
        assert _read(_one_by_one(longer)) == whole


def test_body_of_limit_is_read_and_longer_one_refused() -> None:
    assert _read([b"put t 0 100 A\r\n" + bytes(100)], _reader(limit=100))[0][0][3] == bytes(100)
    for arrived in (0, 101, 1000):
        (violation,) = _read([b"put t 0 101 A\r\n" + bytes(arrived)], _reader(limit=100))[0]
        assert isinstance(violation, Violation)
        assert (violation.code, violation.error_name, violation.opaque) == (413, "too-large", b"A")


@pytest.mark.parametrize(("stream", "opaque"), REFUSED)
def test_body_that_the_verb_does_not_take_is_read_past(stream: bytes, opaque: bytes) -> None:
    budget = ByteBudget(0)
    reader = RequestReader(Limits(request_size_bytes_max=2 * LIMIT, batch_size_bytes_max=LIMIT), budget)
    line_end = stream.index(b"\n") + 1
    (refused,) = reader.feed(stream[:line_end])
    assert isinstance(refused, Violation)
    assert (refused.code, refused.error_name, refused.opaque, refused.closes) == (413, "too-large", opaque, False)
    for start in range(line_end, len(stream), 60_000):
        assert not reader.is_idle
        assert reader.feed(stream[start : start + 60_000]) == []
    assert reader.is_idle
    assert reader.feed(TRAILER) == [AFTER]
    assert reader.feed(TRAILER + stream + TRAILER) == [AFTER, refused, AFTER]


def _with_body(verb: Verb, size: int) -> bytes:
    """A sound line of the verb with a body of that size."""
    words = next(_bytes(v) for v in VECTORS["requests"] if v["request"][0].encode() == verb.name).split(b"\r\n")[0]
    *head, _, opaque = words.split(b" ")
    return b" ".join([*head, b"%d" % size, opaque]) + b"\r\n"


@pytest.mark.parametrize("verb", [verb for verb in VERBS.values() if verb.has_body], ids=lambda v: v.name.decode())
def test_body_one_byte_over_its_verbs_limit_is_413_early(verb: Verb) -> None:
    limits = Limits(request_size_bytes_max=4 << 20, batch_size_bytes_max=2 << 20)
    limit = limits.batch_size_bytes_max if verb.name == b"put" else verb.body_size_bytes_max or 4 << 20
    reader = RequestReader(limits, ByteBudget(1 << 30))
    (request,) = reader.feed(_with_body(verb, limit) + bytes(limit))
    assert not isinstance(request, Violation)
    assert len(request[3] or b"") == limit
    (refused,) = reader.feed(_with_body(verb, limit + 1))
    assert isinstance(refused, Violation)
    assert (refused.code, refused.closes) == (413, limit == 4 << 20)


def test_text_before_the_parts_has_a_limit_of_its_own() -> None:
    for verb in (verb for verb in VERBS.values() if b"offsets" in verb.extensions):
        *head, length, opaque = _with_body(verb, 1 << 19).split(b" ")
        assert verb.number_max == {b"offsets": OFFSETS_SIZE_BYTES_MAX}
        for size, is_refused in ((OFFSETS_SIZE_BYTES_MAX, False), (OFFSETS_SIZE_BYTES_MAX + 1, True)):
            words = [word for word in head if not word.startswith(b"offsets=")]
            line = b" ".join([*words, b"offsets=%d" % size, length, opaque])
            (item,) = _reader().feed(line + bytes(1 << 19))
            assert isinstance(item, Violation) is is_refused


def test_two_requests_in_one_piece_and_one_request_in_many() -> None:
    put = b"put orders 3 5 A1\r\nhello"
    request: Request = (b"put", [b"orders", b"3"], None, bytearray(b"hello"), b"A1")
    assert _read([put * 3]) == ([request] * 3, True)
    assert _read([put[:-1], put[-1:] + put[:7], put[7:]]) == ([request] * 2, True)


def test_body_longer_than_its_length_leaves_garbage_that_is_refused() -> None:
    stream = b"put orders 0 4 A1\r\nhello\r\n"
    whole = _read([stream])
    assert whole == _read(_one_by_one(stream))
    request, violation = whole[0]
    assert (request[3], type(violation), violation[0]) == (b"hell", Violation, 400)


def test_long_name_takes_the_table_and_gives_an_equal_request() -> None:
    for length in (1, 199, 200, 201, 1000):
        name = b"n" * length
        assert _read([b"put %b 3 2 A1\r\nhi" % name])[0] == [(b"put", [name, b"3"], None, bytearray(b"hi"), b"A1")]


def test_put_with_an_id_is_read_as_any() -> None:
    request = (b"put", [b"orders", b"3"], {b"id": b"7"}, bytearray(b"hello"), b"A1")
    stream = b"put orders 3 id=7 5 A1\r\nhello" * 2
    assert _read([stream]) == _read(_one_by_one(stream)) == ([request] * 2, True)
    (violation,) = _read([b"put t 0 id=7 101 A\r\n" + bytes(101)], _reader(limit=100))[0]
    assert violation[0] == 413


PLAIN_PREPARE = (
    b"prepare 0123456789abcdef-fedcba9876543210-1-1 last-resource resource=orders-db "
    b"uuid=00112233445566778899aabbccddeeff table=txmq_marker deadline=1700000000000 %b4 A1\r\nbody"
)


PLAIN_DECIDE = b"decide 0123456789abcdef-fedcba9876543210-1-1 branches=2 %b4 A1\r\nbody"
PLAIN_COMPLETE = b"complete 0123456789abcdef-fedcba9876543210-1-1 uuid=00112233445566778899aabbccddeeff A1\r\n"
COMMIT_OF_HOMES = (
    b"commit 0123456789abcdef-fedcba9876543210-1-1 "
    b"homes=0123456789abcdef-0000000000000001-1-1,0123456789abcdef-0000000000000002-1-1 %b4 A1\r\nbody"
)
PLAIN_PUT = b"put orders 3 4 A1\r\nbody"
PUT_WITH_ID = b"put orders 3 id=7 4 A1\r\nbody"
PLAIN_COMMIT = b"commit 0123456789abcdef-fedcba9876543210-1-1 %b4 A1\r\nbody"
DELAYABLE = b"commit 0123456789abcdef-fedcba9876543210-1-1 delayable %b4 A1\r\nbody"
PREPARE_OF_BRANCH = (
    b"prepare 0123456789abcdef-fedcba9876543210-1-1 branch of=0123456789abcdef-0000000000000001-1-1 "
    b"deadline=1700000000000 %b4 A1\r\nbody"
)


@pytest.mark.parametrize("floor", [b"", b"floor=0 ", b"floor=18446744073709551616 "])
@pytest.mark.parametrize("plain", [PLAIN_PUT, PUT_WITH_ID, PLAIN_COMMIT, DELAYABLE])
def test_short_way_of_request_gives_what_table_gives(
    plain: bytes, floor: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = plain % floor if b"%b" in plain else plain
    by_the_table = _read(_one_by_one(stream))  # a line without its body goes through the table
    monkeypatch.setattr(requests, "parse_line", None)  # which is not asked for a whole one
    assert _read([stream * 2]) == (by_the_table[0] * 2, True)


@settings(max_examples=300, deadline=None)
@given(
    plain=st.sampled_from(
        [
            *(
                p % b"floor=7 "
                for p in (
                    PLAIN_PREPARE, PLAIN_DECIDE, DELAYABLE, COMMIT_OF_HOMES, PREPARE_OF_BRANCH,
                )
            ),
            PLAIN_COMPLETE, PLAIN_PUT, PUT_WITH_ID,
        ]
    ),
    at=st.integers(0, 160), byte=st.sampled_from(list(b" =-A0\r\n\x7f")), is_cut=st.booleans(),
)  # fmt: skip
def test_what_is_not_plain_is_read_or_refused_as_ever(plain: bytes, at: int, byte: int, is_cut: bool) -> None:
    stream = bytearray(plain)
    at %= len(stream)
    stream[at : at + is_cut] = bytes([byte])
    assert _read([bytes(stream)]) == _read(_one_by_one(bytes(stream)))


def test_empty_lines_between_requests_are_skipped_as_people_type_them() -> None:
    stream = b"\r\n\n\r\nput t 0 raw 5 1\r\nhello\r\n\r\nstats\n\n"
    expected = (
        [(b"put", [b"t", b"0"], {b"raw": b""}, bytearray(b"hello"), b"1"), (b"stats", [], None, None, b"-")],
        True,
    )
    assert _read([stream]) == expected
    assert _read(_one_by_one(stream)) == expected


def test_bodies_are_the_callers_own() -> None:
    first, second = _read([b"put t 0 2 A\r\nhi" * 2])[0]
    assert isinstance(first[3], bytearray)
    first[3][:] = b"XXX"
    assert second[3] == b"hi"


def test_a_declared_length_takes_nothing_from_the_budget() -> None:
    budget = ByteBudget(1)
    reader = RequestReader(Limits(), budget)
    assert reader.feed(b"put t 0 16777216 A\r\n" + bytes(OWN_BYTES)) == []
    assert budget.used == 0


def test_budget_counts_arrived_bytes_and_returns_them_with_the_request() -> None:
    budget = ByteBudget(1 << 20)
    reader = RequestReader(Limits(), budget)
    assert reader.feed(b"put t 0 20000 A\r\n" + bytes(10_000)) == []
    assert budget.used == 10_000 - OWN_BYTES
    assert reader.feed(bytes(9_999)) == []
    assert budget.used == 19_999 - OWN_BYTES
    (request,) = reader.feed(bytes(1))
    assert request[3] == bytes(20_000)
    assert budget.used == 0


def test_budget_used_up_refuses_large_body_and_not_small_one() -> None:
    budget = ByteBudget(10_000)
    large, other, small = (RequestReader(Limits(), budget) for _ in range(3))
    assert large.feed(b"put t 0 20000 A\r\n" + bytes(OWN_BYTES + 10_000)) == []
    assert small.feed(b"put t 0 4000 B\r\n" + bytes(3_999)) == []
    (violation,) = other.feed(b"put t 0 20000 C\r\n" + bytes(OWN_BYTES + 1))
    assert isinstance(violation, Violation)
    assert (violation.code, violation.error_name, violation.opaque) == (429, "overloaded", b"C")
    assert len(small.feed(bytes(1))) == 1
    assert budget.used == 10_000
    (violation,) = large.feed(bytes(1))
    assert isinstance(violation, Violation)
    assert budget.used == 0, "the refused one gives back what it held"


def test_a_connection_that_ends_gives_back_what_it_held() -> None:
    budget = ByteBudget(1 << 20)
    reader = RequestReader(Limits(), budget)
    reader.feed(b"put t 0 20000 A\r\n" + bytes(10_000))
    assert not reader.is_idle
    reader.close()
    reader.close()
    assert (budget.used, reader.is_idle, reader.feed(b"ping A\r\n")) == (0, True, [])


@st.composite
def _streams(draw: st.DrawFn) -> bytes:
    """Vectors, garbage and mutations of vectors, one after the other."""
    sound = st.sampled_from([_bytes(v) for v in VECTORS["requests"]])
    wrong = st.sampled_from([_bytes(v)[:300] for v in VECTORS["violations"]])
    stream = b"".join(draw(st.lists(st.one_of(sound, sound, sound, wrong, st.binary(max_size=30)), max_size=8)))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=2)):
        stream = stream[:place] + bytes([byte]) + stream[place + 1 :]
    return stream


@settings(max_examples=300, deadline=None)
@given(stream=_streams(), cuts=st.lists(st.integers(0, 2000), max_size=20))
def test_items_do_not_depend_on_the_cuts_of_the_stream(stream: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(places)]
    assert _read(pieces) == _read([stream])
