"""Values that are looked at where they are: the same records as the library's, views, and bytes nobody should trust."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Sequence

import pytest
from aiokafka.record import default_records

from txmq.errors import InvalidBatchError
from txmq.log import batch, records
from txmq.model import LargeMessage, Message

from .support import TIME_MS, with_section

LARGE = bytes(range(256)) * (records.LARGE_SIZE_BYTES_MIN // 256)
VARIED: list[records.Record] = [
    (None, None, [], TIME_MS),
    (b"", b"", [("h", b""), ("ä", b"x" * 70)], TIME_MS + 500),
    (b"k" * 100, LARGE, [("tag", b"red")], TIME_MS + 70_000),
    *((b"k%d" % number, b"v" * number, [], TIME_MS) for number in range(130)),
]
SMALL = [VARIED[0], VARIED[1], *VARIED[3:7]]
SECTION = bytes(records.encode(SMALL)[batch.HEADER_SIZE :])
REFUSED = (InvalidBatchError, ValueError, IndexError)


def _large(count: int = 2, compression: str | None = None) -> bytes:
    rows: Sequence[records.Record] = [
        (b"key", b"%d" % number + LARGE, [("h", b"1")], TIME_MS) for number in range(count)
    ]
    return bytes(records.encode(rows, compression=compression))


def test_records_are_those_of_the_library() -> None:
    made = records.encode(VARIED)
    theirs = [
        (record.offset, record.timestamp, record.key, record.value, record.headers)
        for record in default_records.DefaultRecordBatch(made)
    ]
    ours = [
        (offset, ms, key, None if value is None else bytes(value), headers)
        for offset, ms, key, value, headers in records.read_large(made)
    ]
    assert ours == theirs


@pytest.mark.parametrize("compression", [None, "gzip", "lz4", "zstd"])
def test_large_values_are_views_until_asked_for(compression: str | None) -> None:
    messages = records.decode(_large(compression=compression), "t", 3)
    assert [type(message) for message in messages] == [LargeMessage] * 2
    for number, message in enumerate(messages):
        view = message.value_view
        assert view is not None
        assert view.readonly
        assert view == b"%d" % number + LARGE
        assert message.value == b"%d" % number + LARGE
        assert message.value is message.value
        assert (message.key, message.headers, message.offset) == (b"key", {"h": b"1"}, number)


def test_small_value_has_a_view_as_well() -> None:
    (message, empty) = records.decode(records.encode([(None, b"v", [], 1), (b"k", None, [], 1)]), "t", 0)
    assert type(message) is Message
    assert (message.value_view, empty.value_view) == (memoryview(b"v"), None)
    (null,) = records.decode(records.encode([(LARGE, None, [], 1)]), "t", 0)
    assert (type(null), null.value, null.value_view) == (LargeMessage, None, None)


def test_view_outlives_its_message_and_answer() -> None:
    answer = _large(1)
    (message,) = records.decode(answer, "t", 0)
    view = message.value_view
    del answer, message
    gc.collect()
    assert view is not None
    assert bytes(view) == b"0" + LARGE


def test_value_that_was_asked_for_frees_the_answer() -> None:
    answer = _large(1)
    held = sys.getrefcount(answer)
    (message,) = records.decode(answer, "t", 0)
    assert sys.getrefcount(answer) > held
    assert f"{len(LARGE) + 1} bytes" in repr(message)
    assert sys.getrefcount(answer) > held
    assert message.value is not None
    assert sys.getrefcount(answer) == held
    assert message.value_view == memoryview(message.value)


def test_large_message_is_a_message_like_any() -> None:
    (message,) = records.decode(_large(1), "t", 0)
    plain = Message("t", 0, 0, b"key", b"0" + LARGE, {"h": b"1"}, None, TIME_MS, None)
    assert message == plain
    assert pickle.loads(pickle.dumps(records.decode(_large(1), "t", 0)[0])) == plain
    assert copy.copy(message) == plain
    message.value = b"another"
    assert (message.value, message.value_view) == (b"another", memoryview(b"another"))


def test_every_flipped_bit_is_refused_or_read_within_bounds() -> None:
    for at in range(len(SECTION)):
        for bit in range(8):
            section = bytearray(SECTION)
            section[at] ^= 1 << bit
            try:
                found = list(records.read_large(with_section(records.encode(SMALL), bytes(section))))
            except REFUSED:
                continue
            assert sum(len(record.value or b"") + len(record.key or b"") for record in found) < len(section)


@pytest.mark.parametrize("cut", [1, 100, 1 << 18])
def test_section_that_is_cut_or_has_more_is_refused(cut: int) -> None:
    made = bytearray(_large())
    section = bytes(made[batch.HEADER_SIZE :])
    for damaged in (section[:-cut], section + bytes(cut)):
        with pytest.raises(InvalidBatchError):
            records.decode(with_section(made, damaged), "t", 0)


def _record(*parts: bytes) -> bytes:
    """A record of these fields after its length, in a batch that is large by what follows."""
    content = b"".join(parts)
    return _varint(len(content)) + content


def _varint(value: int) -> bytes:
    plain, found = (value << 1) ^ (value >> 63), bytearray()
    while plain >= 0x80:
        found.append(plain & 0x7F | 0x80)
        plain >>= 7
    return bytes(found) + bytes([plain])


_HEAD = b"\0" + _varint(0) + _varint(0)
_VALUE = _varint(len(LARGE)) + LARGE


@pytest.mark.parametrize(
    "section",
    [
        _record(_HEAD, _varint(-1), _varint(len(LARGE) + 9), LARGE, _varint(0)),
        _record(_HEAD, _varint(-1), _varint(1 << 40), LARGE, _varint(0)),
        _record(_HEAD, _varint(-1), _VALUE, _varint(1 << 40)),
        _record(_HEAD, _varint(-1), _VALUE, _varint(-1)),
        _record(_HEAD, _varint(-1), _VALUE, _varint(1), _varint(-1), _varint(-1)),
        _record(_HEAD, _varint(-1), _VALUE, _varint(1), _varint(1), b"\xff", _varint(-1)),
        _record(_HEAD, _varint(-1), _VALUE, _varint(0), b"more"),
        _record(b"\0", _varint(0), _varint(1), _varint(-1), _VALUE, _varint(0)),
        _varint(-5) + LARGE,
        b"\xff" * 11 + LARGE,
    ],
    ids=[
        "value too long", "value much too long", "too many headers", "less than no headers", "header without a key",
        "key of no text", "bytes left over", "another offset", "negative length", "endless varint",
    ],
)  # fmt: skip
def test_record_that_contradicts_itself_is_refused(section: bytes) -> None:
    made = records.encode([(None, LARGE, [], 0)])
    with pytest.raises(InvalidBatchError, match="t-0 at offset 0"):
        records.decode(with_section(made, section), "t", 0)


@pytest.mark.parametrize("value", [0, -1, 1, 63, -64, 64, 8191, -8192, 1 << 31, -(1 << 63), (1 << 63) - 1])
def test_varints_of_every_length_are_read(value: int) -> None:
    encoded = _varint(value)
    assert records.varint(b"\x80" + encoded, 1) == (value, 1 + len(encoded))
    assert records.varint(encoded[:-1], 0)[1] == records.NOWHERE
