"""Character sets: what the server says of each code, codecs of Unicode, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest

from txmq.binlog.source.charsets import Ask, charset

SPAN = re.compile(r"SELECT (\d+) AS n(?: UNION ALL SELECT (\d+))*\)")


def told(characters: Mapping[bytes, str | None]) -> Ask:
    """A server that converts these codes, and shows a question mark for each other one."""

    def ask(sql: str) -> Sequence[Any]:
        spans = [range(int(found[1]), int(found[2] or found[1]) + 1) for found in SPAN.finditer(sql)]
        return [(bytes(raw).hex(), characters.get(bytes(raw), "?")) for raw in product(*spans)]

    return ask


def ascii_and(**more: str | None) -> dict[bytes, str | None]:
    """The characters of ASCII, and codes in hex."""
    return {bytes([byte]): chr(byte) for byte in range(128)} | {bytes.fromhex(code[1:]): more[code] for code in more}


def test_a_set_of_one_byte_is_decoded_by_its_table() -> None:
    made = charset("cp9999", 1, told(ascii_and(x80="€")))
    assert made.decode(b"a?\x80") == "a?€"
    with pytest.raises(ValueError, match="0x81"):
        made.decode(b"a\x81")


def test_codes_of_several_bytes_are_as_the_server_says() -> None:
    made = charset("ujis", 3, told(ascii_and(xa1c0="\\", x8eb1="ｱ", x8fb0a1="丂")))
    assert made.decode(bytes.fromhex("61a1c0628eb18fb0a1")) == "a\\bｱ丂"
    assert made.decode(b"plain") == "plain"
    assert made.is_one_to_one is False  # a backslash is there twice
    longer = charset("ujis", 3, told(ascii_and(x8eb1="ｱ", x8eb1e7="ｱ")))  # MySQL says so
    assert longer.is_one_to_one
    with pytest.raises(ValueError, match="begin with no character"):
        longer.decode(bytes.fromhex("8eb1e7"))


@pytest.mark.parametrize("raw", ["61a1c1", "61a1", "a1", "ff", "8fb0"])
def test_what_the_server_cannot_convert_is_refused(raw: str) -> None:
    made = charset("big5", 2, told(ascii_and(xa1c0="x", xa140=None)))
    with pytest.raises(ValueError, match=r"begin with no character of big5"):
        made.decode(bytes.fromhex(raw))


def test_gb18030_is_counted_through_beyond_its_tables() -> None:
    made = charset("gb18030", 4, told(ascii_and(xd6d0="中", x8135f437="\ue7c7")))
    assert made.decode("a中\U0001f600".encode("gb18030") + bytes.fromhex("8135f437")) == "a中\U0001f600\ue7c7"


@pytest.mark.parametrize(
    ("name", "codec"),
    [("utf8mb4", "utf-8"), ("utf16", "utf-16-be"), ("utf16le", "utf-16-le"), ("utf32", "utf-32-be")],
)
def test_unicode_is_decoded_without_asking(name: str, codec: str) -> None:
    made = charset(name, 4, lambda _: pytest.fail("the server was asked"))
    assert made.decode("a\U0001f600".encode(codec)) == "a\U0001f600"
    with pytest.raises(ValueError, match="decode"):
        made.decode("a\U0001f600".encode(codec)[:-1])


def test_a_pair_of_utf16_is_no_character_of_ucs2() -> None:
    made = charset("ucs2", 2, told({}))
    assert made.decode("aé€".encode("utf-16-be")) == "aé€"
    with pytest.raises(ValueError, match="surrogate is no character of ucs2"):
        made.decode("\U0001f600".encode("utf-16-be"))


def test_an_unknown_set_is_refused_when_it_is_used() -> None:
    made = charset("utf9", 5, told({}))
    with pytest.raises(ValueError, match="utf9 cannot be decoded here"):
        made.decode(b"a")
