"""Answers: what the broker writes, the client reads; anything else is a fault, found at once."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txmq.errors import (
    BadRequestError,
    BrokerError,
    OffsetOutOfRangeError,
    RemoteProtocolError,
    UnknownTopicError,
)
from txmq.protocol import answers
from txmq.protocol.answers import Answer, AnswerReader, broker_error
from txmq.protocol.grammar import ERROR_SIZE_BYTES_MAX
from txmq.protocol.requests import Violation

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).resolve().parents[2] / "vectors" / "wire.json").read_text("utf-8")
)
LIMIT = 1 << 20


def _bytes(vector: dict[str, Any]) -> bytes:
    return str(vector["bytes"]).encode("latin-1")


def _answer(vector: dict[str, Any]) -> Answer:
    code, opaque, body, is_value = vector["answer"]
    return code, opaque.encode(), body.encode("latin-1"), is_value


ANSWERS = [pytest.param(_bytes(v), _answer(v), id=v["name"]) for v in VECTORS["answers"]]
FAULTS = [pytest.param(_bytes(v), id=v["name"]) for v in VECTORS["faults"]]
TRAILER, AFTER = b"value 2 Z9\r\nhi", (200, b"Z9", b"hi", True)


def _read(pieces: list[bytes]) -> tuple[list[Answer], bool, bool]:
    """Feed pieces, each in a buffer that is overwritten at once; returns (answers, failed, unfinished)."""
    reader = AnswerReader(LIMIT)
    found: list[Answer] = []
    for piece in pieces:
        buffer = bytearray(piece)
        try:
            found += reader.feed(memoryview(buffer))
        except RemoteProtocolError:
            break
        buffer[:] = b"\xaa" * len(buffer)
    failed = reader.failure is not None
    return found, failed, reader.has_unfinished and not failed


def _one_by_one(stream: bytes) -> list[bytes]:
    return [stream[index : index + 1] for index in range(len(stream))]


@pytest.mark.parametrize(("stream", "answer"), ANSWERS)
def test_answer_is_equal_whole_by_byte_and_in_two_pieces(stream: bytes, answer: Answer) -> None:
    assert _read([stream]) == ([answer], False, False)
    assert _read(_one_by_one(stream)) == ([answer], False, False)
    assert _read([TRAILER + stream + TRAILER]) == ([AFTER, answer, AFTER], False, False)
    for cut in range(1, len(stream)):
        assert _read([stream[:cut], stream[cut:] + TRAILER]) == ([answer, AFTER], False, False), cut


@pytest.mark.parametrize(("stream", "answer"), ANSWERS)
def test_answer_cut_short_at_any_byte_is_unfinished_never_fault(stream: bytes, answer: Answer) -> None:
    for end in range(len(stream)):
        assert _read([stream[:end]]) == ([], False, end > 0), end


@pytest.mark.parametrize(("stream", "answer"), ANSWERS)
def test_any_flipped_bit_gives_answers_or_a_fault_however_cut(stream: bytes, answer: Answer) -> None:
    for bit in range(len(stream) * 8):
        flipped = bytearray(stream + TRAILER)
        flipped[bit // 8] ^= 1 << bit % 8
        whole = _read([bytes(flipped)])
        assert whole == _read(_one_by_one(bytes(flipped))), bit
        assert whole[0] != [answer, AFTER], bit


@pytest.mark.parametrize("stream", FAULTS)
def test_anything_else_is_a_fault_whole_and_byte_by_byte(stream: bytes) -> None:
    assert _read([stream + TRAILER]) == ([], True, False)
    assert _read(_one_by_one(stream)) == ([], True, False)


@pytest.mark.parametrize("stream", FAULTS)
def test_answers_before_a_fault_come_first_and_then_the_fault(stream: bytes) -> None:
    reader = AnswerReader(LIMIT)
    assert reader.feed(TRAILER + stream) == [AFTER]
    assert isinstance(reader.failure, RemoteProtocolError)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            reader.feed(TRAILER)


@pytest.mark.parametrize(
    ("beginning", "last"),
    [(b"", b"H"), (b"result 200 ", b"-"), (b"value", b"s"), (b"result 2", b"1"), (b"value 0 A\r", b"\r")],
)
def test_a_fault_is_found_at_its_first_byte(beginning: bytes, last: bytes) -> None:
    reader = AnswerReader()
    assert reader.feed(beginning) == []
    with pytest.raises(RemoteProtocolError):
        reader.feed(last)


def test_a_value_of_many_pieces_is_one_body() -> None:
    body = bytes(range(256)) * 4000
    stream = answers.value_header(len(body), b"A1") + body + answers.encode_all([(b"A2", 7)])
    pieces = [stream[start : start + 65_536] for start in range(0, len(stream), 65_536)]
    assert _read(pieces) == ([(200, b"A1", body, True), (200, b"A2", b"7\n", False)], False, False)


@given(opaque=st.from_regex(rb"[0-9A-Za-z]{1,16}", fullmatch=True), offset=st.integers(0, 10**20 - 1), body=st.binary())
def test_what_the_broker_writes_the_client_reads(opaque: bytes, offset: int, body: bytes) -> None:
    stream = answers.encode_all([(opaque, offset), (opaque, body), (opaque, answers.Records(body))])
    lines = body if not body or body.endswith(b"\n") else body + b"\n"
    read = [(200, opaque, b"%d\n" % offset, False), (200, opaque, lines, False), (200, opaque, body, True)]
    assert _read([stream]) == (read, False, False)


def test_offsets_are_as_long_as_their_digits_in_any_order() -> None:
    offsets = [0, 1, 9, 10, 99, 100, 5, 0, 10**19, 12]
    expected = [answers.result(200, b"A1", b"%d" % offset) for offset in offsets]
    assert answers.encode_all([(b"A1", offset) for offset in offsets]) == b"".join(expected)


def test_refusal_is_its_error_and_violation_keeps_its_own_opaque() -> None:
    error, broken = UnknownTopicError("t"), Violation(413, "too-large", "body", b"B2")
    assert answers.encode_all([(b"A1", error), (b"A1", broken)]) == answers.error(error, b"A1") + answers.violation(
        broken
    )


def test_body_ends_its_last_line_once_and_counts_that() -> None:
    assert answers.result(200, b"A1", b"pong") == b"result 200 5 A1\r\npong\n"
    assert answers.result(200, b"A1", b"a 0 0 1\n") == b"result 200 8 A1\r\na 0 0 1\n"
    assert answers.result(200, b"A1") == b"result 200 0 A1\r\n"  # nothing: the line itself has ended
    assert answers.encode_all([(b"A1", 10)]) == b"result 200 3 A1\r\n10\n"
    assert answers.error(UnknownTopicError("t"), b"A1") == b"result 404 16 A1\r\nunknown-topic t\n"


def _all_errors(base: type[BrokerError]) -> list[type[BrokerError]]:
    """Those that a broker tells; what a client's module derives from one never crosses the wire."""
    children = [child for child in base.__subclasses__() if child.__module__ == base.__module__]
    return [base, *(found for child in children for found in _all_errors(child))]


@pytest.mark.parametrize("cls", _all_errors(BrokerError), ids=lambda cls: cls.wire_name)
def test_every_error_crosses_the_wire_as_itself(cls: type[BrokerError]) -> None:
    ((code, opaque, body, is_value),) = AnswerReader().feed(answers.error(cls("topic 'orders' is odd"), b"A1"))
    error = broker_error(code, body)
    assert (code, opaque, is_value) == (cls.code, b"A1", False)
    assert (type(error), str(error), error.retriable) == (cls, "topic 'orders' is odd", cls.retriable)


def test_text_from_outside_leaves_as_one_printable_line() -> None:
    evil = "topic 'a\r\nresult 200 0 A1\x1b[31m\x00\x7f\u202e\u0442\U0001f600'"
    ((_, _, body, _),) = AnswerReader().feed(answers.error(UnknownTopicError(evil), b"A1"))
    assert body[:-1].decode("ascii").isprintable()
    assert body == (
        b"unknown-topic topic 'a\\r\\nresult 200 0 A1\\x1b[31m\\x00\\x7f\\u202e\\u0442\\U0001f600'\n"
    )  # fmt: skip


@pytest.mark.parametrize("text", ["x" * 5000, "\n" * 5000, "\U0001f600" * 1000])
def test_a_long_text_is_cut_at_a_kilobyte(text: str) -> None:
    ((_, _, body, _),) = AnswerReader().feed(answers.error(OffsetOutOfRangeError(text), b"A1"))
    assert len(body) == ERROR_SIZE_BYTES_MAX
    assert body.startswith(b"offset-out-of-range ") and body.endswith(b"...\n")  # noqa: PT018


def test_a_violation_is_answered_like_an_error() -> None:
    violation = Violation(400, "bad-request", "unknown\nverb", b"-")
    assert answers.violation(violation) == answers.error(BadRequestError("unknown\nverb"), b"-")


@st.composite
def _streams(draw: st.DrawFn) -> bytes:
    sound = st.sampled_from([_bytes(v) for v in VECTORS["answers"]])
    stream = b"".join(draw(st.lists(st.one_of(sound, sound, sound, st.binary(max_size=8)), max_size=8)))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=2)):
        stream = stream[:place] + bytes([byte]) + stream[place + 1 :]
    return stream


@settings(max_examples=300, deadline=None)
@given(stream=_streams(), cuts=st.lists(st.integers(0, 300), max_size=20))
def test_answers_do_not_depend_on_the_cuts_of_the_stream(stream: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert _read([stream[start:end] for start, end in pairwise(places)]) == _read([stream])
