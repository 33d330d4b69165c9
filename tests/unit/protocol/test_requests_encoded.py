"""The client's encoder: what it writes the broker reads as it was meant, and what cannot be carried is not sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txmq.errors import LocalProtocolError
from txmq.protocol.requests import (
    ByteBudget,
    Limits,
    Request,
    RequestReader,
    Violation,
    Word,
    put_line,
    request,
    transaction_line,
)
from txmq.runtime.ports import Buffer
from txmq.xid import TxId

TXID = "0123456789abcdef-fedcba9876543210-1-1"


def _read(buffers: list[Buffer]) -> list[Request | Violation]:
    reader = RequestReader(Limits(), ByteBudget(1 << 30))
    items = reader.feed(b"".join(buffers))
    assert reader.is_idle
    return items


@pytest.mark.parametrize(
    ("verb", "arguments", "extensions", "body", "opaque", "line"),
    [
        ("hello", (1, "me"), {"session": "new"}, None, b"A1", b"hello 1 me session=new A1"),
        ("put", ("orders", 3), None, [b"he", bytearray(b"l"), memoryview(b"lo")], b"A1", b"put orders 3 5 A1"),
        ("put", (b"orders", 3), {"raw": None, "key": 42}, [b"hello"], b"A1", b"put orders 3 raw key=42 5 A1"),
        (
            "get",
            ("orders", 0, 2**64 - 1, 100),
            {"wait": 50},
            None,
            b"z",
            b"get orders 0 18446744073709551615 100 wait=50 z",
        ),
        ("commit", (TXID,), {"floor": 7}, [], b"A1", f"commit {TXID} floor=7 0 A1".encode()),
        ("outcome", (TXID,), {"fence": None}, None, b"A1", f"outcome {TXID} fence A1".encode()),
        ("topic", ("create", "t"), {"partitions": 4}, None, b"A1", b"topic create t partitions=4 A1"),
        ("recover", (), {}, None, b"A1", b"recover A1"),
        ("stats", (), None, None, b"", b"stats"),
        ("stats", ("*",), None, None, b"A1", b"stats * A1"),
        ("stats", ("json",), None, None, b"A1", b"stats json A1"),
        ("version", (), None, None, b"A1", b"version A1"),
    ],
)
def test_a_request_is_read_as_it_was_meant(
    verb: str,
    arguments: tuple[Word, ...],
    extensions: Mapping[str, Word | None] | None,
    body: list[Buffer] | None,
    opaque: bytes,
    line: bytes,
) -> None:
    buffers = request(verb, *arguments, extensions=extensions, body=body, opaque=opaque)
    assert buffers == [line + b"\r\n", *(body or [])]
    (item,) = _read(buffers)
    assert not isinstance(item, Violation)
    assert item[0] == verb.encode()
    assert item[3] == (None if body is None else b"".join(body))
    assert item[4] == (opaque or b"-")


@pytest.mark.parametrize(
    ("verb", "arguments", "options"),
    [
        ("nosuch", (), {}),
        ("put", ("a b", 0), {"body": [b""]}),
        ("put", ("a\r\nping A2\r\n", 0), {"body": [b""]}),
        ("put", ("a\nb", 0), {"body": [b""]}),
        ("put", ("a\x00b", 0), {"body": [b""]}),
        ("put", ("caf\xe9", 0), {"body": [b""]}),
        ("put", (b"caf\xe9", 0), {"body": [b""]}),
        ("put", ("", 0), {"body": [b""]}),
        ("put", ("a" * 4096, 0), {"body": [b""]}),
        ("put", ("a=b", 0), {"body": [b""]}),
        ("put", ("orders", -1), {"body": [b""]}),
        ("put", ("orders", 10**10), {"body": [b""]}),
        ("put", ("orders",), {"body": [b""]}),
        ("put", ("orders", 0, 5), {"body": [b""]}),
        ("put", ("orders", 0, "raw"), {"body": [b""]}),
        ("put", ("orders", 0), {}),
        ("put", ("orders", 0), {"body": [b""], "extensions": {"key": "a b"}}),
        ("put", ("orders", 0), {"body": [b""], "extensions": {"key": "a", "raw": "x"}}),
        ("put", ("orders", 0), {"body": [b""], "extensions": {"key": "a\r\nb"}}),
        ("put", ("orders", 0), {"body": [b""], "extensions": {"key": b"\xff"}}),
        ("put", ("orders", 0), {"body": [b""], "extensions": {"key": None}}),
        ("put", ("orders", 0), {"body": [b""], "extensions": {"nosuch": 1}}),
        ("put", ("orders", 0), {"body": [b""], "extensions": {"key=a tx": "b"}}),
        ("put", ("orders", 0), {"body": [b""], "opaque": b""}),
        ("put", ("orders", 0), {"body": [b""], "opaque": b"A-1"}),
        ("put", ("orders", 0), {"body": [b""], "opaque": b"0123456789abcdefg"}),
        ("rollback", (TXID,), {"body": [b""]}),
        ("get", ("orders", 0, 10**20, 1), {}),
        ("stats", ("a", "b"), {}),
        ("stats", (), {}),
        ("ping ", (), {}),
        ("recover", (), {"extensions": {"limit": -1}}),
    ],
)
def test_what_protocol_cannot_carry_is_refused_before_anything_is_sent(
    verb: str, arguments: tuple[Word, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(LocalProtocolError):
        request(verb, *arguments, **{"opaque": b"A1", **options})


_WORDS = st.one_of(
    st.text(max_size=8), st.binary(max_size=8), st.integers(-5, 10**11), st.sampled_from(["*", "a", "raw"])
)


@settings(max_examples=500, deadline=None)
@given(
    verb=st.sampled_from(["put", "get", "commit", "outcome", "topic", "stats", "ping", "recover"]),
    arguments=st.lists(_WORDS, max_size=4),
    extensions=st.dictionaries(
        st.sampled_from(["raw", "key", "wait", "fence", "limit", "x"]), st.none() | _WORDS, max_size=2
    ),
    body=st.none() | st.lists(st.binary(max_size=5), max_size=2),
    opaque=st.sampled_from([b"A1", b"", b"-"]),
)
def test_whatever_is_asked_for_is_carried_whole_or_refused(
    verb: str, arguments: list[Word], extensions: dict[str, Word | None], body: list[Buffer] | None, opaque: bytes
) -> None:
    try:
        buffers = request(verb, *arguments, extensions=extensions, body=body, opaque=opaque)
    except LocalProtocolError:
        return
    (item,) = _read(buffers)
    assert not isinstance(item, Violation)
    meant = [_text(word) for word in arguments]
    assert item[0] == verb.encode()
    assert item[1] == ([] if verb == "stats" and meant in ([b"*"], [b"-"]) else meant)
    assert (item[2] or {}) == {
        name.encode(): b"" if value is None else _text(value) for name, value in extensions.items()
    }
    assert item[3] == (None if body is None else b"".join(body))


def _text(word: Word) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def test_line_of_put_is_one_of_request() -> None:
    assert [put_line(b"orders", 3, 5, b"A1"), b"hello"] == request("put", "orders", 3, body=[b"hello"], opaque=b"A1")
    meant = request("put", "orders", 3, body=[b"hello"], opaque=b"A1", extensions={"id": 7})
    assert [put_line(b"orders", 3, 5, b"A1", 7), b"hello"] == meant


@given(
    st.integers(1, 2**64 - 1), st.dictionaries(st.sampled_from(["floor", "parts", "bytes", "crc"]), st.integers(0, 9))
)
def test_the_unchecked_lines_of_transactions_are_the_checked_ones(counter: int, numbers: dict[str, int]) -> None:
    txid = str(TxId(2**64 - 1, 0, 2**48 - 1, counter))
    prepared: dict[str, str | int] = {
        "resource": "orders-db",
        "uuid": "0f" * 16,
        "table": "t",
        "deadline": 17,
    }
    asked: list[tuple[str, tuple[str, ...], Mapping[str, str | int], bytes | None]] = [
        ("commit", (), numbers, b""),
        ("prepare", ("last-resource",), prepared | numbers, b"part"),
        ("decide", (), {"branches": 2} | numbers, b"branches"),
        ("complete", (), {"uuid": "0f" * 16}, None),
    ]
    for verb, arguments, stated, body in asked:
        buffers = None if body is None else [body]
        line, *_ = request(verb, txid, *arguments, extensions=stated, body=buffers, opaque=b"z1")
        head = " ".join((verb, txid, *arguments))
        assert transaction_line(head, stated, None if body is None else len(body), b"z1") == line
