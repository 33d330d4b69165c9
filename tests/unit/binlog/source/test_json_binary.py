"""MySQL's binary JSON, made by hand: numbers, opaque values, and what is no document.

tests/services/binlog/test_json.py holds it against a server.
"""

from __future__ import annotations

import struct

import pytest

from txmq.binlog.source.events import UNREADABLE
from txmq.binlog.source.json_binary import double_text, json_text

DECIMAL, DATE, TIME, DATETIME, BLOB = 246, 10, 11, 12, 252


def opaque(kind: int, data: bytes) -> bytes:
    return bytes([0x0F, kind, len(data)]) + data


def packed(kind: int, number: int) -> bytes:
    return opaque(kind, number.to_bytes(8, "little", signed=True))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"", "null"),
        (b"\x04\x01", "true"),
        (b"\x05\xff\xff", "-1"),
        (b"\x0a" + b"\xff" * 8, "18446744073709551615"),
        (b"\x0b" + struct.pack("<d", 7), "7.0"),
        (b"\x0c\x05a\"\n\xc3\xbc", '"a\\"\\nü"'),
        (b"\x0c\x81\x01" + b"x" * 129, f'"{"x" * 129}"'),
        (opaque(DECIMAL, b"\x03\x02\x81\x32"), "1.50"),
        (packed(DATE, ((2026 * 13 + 11) << 5 | 29) << 41), '"2026-11-29"'),
        (packed(DATETIME, ((2026 * 13 + 11) << 5 | 29) << 41 | 9 << 36 | 5 << 30 | 5), '"2026-11-29 09:05:00.000005"'),
        (packed(TIME, -(838 << 36 | 59 << 30 | 59 << 24)), '"-838:59:59.000000"'),
        (opaque(BLOB, b"\x00\xff"), '"base64:type252:AP8="'),
        (bytes.fromhex("00 0100 0c00 0b00 0100 05 0700 61"), '{"a": 7}'),
        (bytes.fromhex("02 0200 0c00 04 0000 0c 0a00 0178"), '[null, "x"]'),
        (bytes.fromhex("03 01000000 0d000000 08 ffffffff"), "[4294967295]"),
    ],
)  # fmt: skip
def test_documents_are_as_the_server_shows_them(document: bytes, text: str) -> None:
    assert json_text(document) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"), (-0.0, "-0.0"), (1.5, "1.5"), (1e14, "100000000000000.0"), (1e15, "1e15"), (-1.5e300, "-1.5e300"),
        (1265859497100750.8, "1265859497100750.8"), (1e-15, "0.000000000000001"), (1e-16, "1e-16"),
        (-4.2296295055270675e-08, "-0.000000042296295055270675"), (5e-324, "5e-324"),
    ],
)  # fmt: skip
def test_numbers_have_exponents_where_the_server_writes_them(value: float, text: str) -> None:
    assert double_text(value) == text


@pytest.mark.parametrize(
    "document",
    [
        b"\x0d", b"\x04\x03", b"\x05\x01", b"\x0c\x02x", b"\x0c\xff", opaque(DECIMAL, b"\x03\x02\x81"), b"\x0c\x01\xff",
        opaque(BLOB, b"ab")[:-1], bytes.fromhex("02 0100 ff00 04 0000"),
        bytes.fromhex("00 0100 0c00 0b00 0900 05 0700 61"),
        bytes.fromhex("02 0100 0700 02 0000"),  # it holds itself
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused(document: bytes) -> None:
    with pytest.raises(UNREADABLE):
        json_text(document)
