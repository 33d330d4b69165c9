"""Character sets: tables of the server's, codecs, and what is refused."""

from __future__ import annotations

import pytest

from txmq.binlog.source.charsets import UNDEFINED, charset


def test_a_set_of_one_byte_is_decoded_by_its_table() -> None:
    table = "".join(chr(byte) for byte in range(128)) + "€" + UNDEFINED * 127
    made = charset("cp9999", 1, table)
    assert made.decode(b"a\x80") == "a€"
    with pytest.raises(ValueError, match="0x81"):
        made.decode(b"a\x81")


@pytest.mark.parametrize(
    ("name", "raw"),
    [("utf8mb4", "a\U0001f600".encode()), ("utf16", "a\U0001f600".encode("utf-16-be")), ("gbk", "a汉".encode("gbk"))],
)
def test_a_set_of_several_bytes_is_decoded_by_a_codec(name: str, raw: bytes) -> None:
    made = charset(name, 4, None)
    assert made.decode(raw).startswith("a")
    with pytest.raises(ValueError, match="decode"):
        made.decode(raw[:-1])


def test_an_unknown_set_is_refused_when_it_is_used() -> None:
    made = charset("eucjpms", 3, None)
    with pytest.raises(ValueError, match="eucjpms cannot be decoded here"):
        made.decode(b"a")
