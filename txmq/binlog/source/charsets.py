"""Character sets of the database as decoders.

The server's own conversion counts: of each set that is not Unicode it is asked once what each code is, so that a value
reads as in a SELECT. Python's codecs of the same name differ from it, and from one vendor to the other. A code that the
server can store but not convert (it shows ``?``) is an error: nobody could tell the value from its text.

Sources: MariaDB 10.11, "Supported Character Sets"; MySQL 9.7 Reference Manual, "The gb18030 Character Set".
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_CODECS: Final = {
    "utf8mb4": "utf-8", "utf8mb3": "utf-8", "utf8": "utf-8", "utf16": "utf-16-be", "utf16le": "utf-16-le",
    "utf32": "utf-32-be",
}  # fmt: skip
UNDEFINED: Final = "\ufffe"  # marks, in a table, a byte that is no character: decoding one is an error
_GB18030: Final = "gb18030"
_SHAPES: Final = {  # of codes by their bytes, each with its first and last value
    1: ((0, 255),),
    2: ((0x80, 0xFF), (0, 0xFF)),
    3: ((0x8E, 0x8F), (0xA1, 0xFE), (0xA1, 0xFE)),  # of ujis and eucjpms
    4: ((0x81, 0x84), (0x30, 0x39), (0x81, 0xFE), (0x30, 0x39)),  # of gb18030: those of two bytes in UTF-16
}

Decoder = Callable[[bytes], str]
Ask = Callable[[str], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Charset:
    """A character set; ``decode`` raises ``ValueError`` for bytes that are no text in it.

    Args:
        is_one_to_one: no two codes are the same character, so that a text is one value.
    """

    name: str
    character_bytes_max: int
    decode: Decoder
    is_one_to_one: bool = True


def charset(name: str, character_bytes_max: int, ask: Ask) -> Charset:
    """The set of that name.

    Args:
        name: as the server calls it.
        character_bytes_max: of one character.
        ask: gives the rows of a statement.
    """
    if name in _CODECS:
        codec = _CODECS[name]
        return Charset(name, character_bytes_max, lambda raw: raw.decode(codec))
    if name == "ucs2":
        return Charset(name, character_bytes_max, _ucs2)
    if character_bytes_max > 3 and name != _GB18030:
        return Charset(name, character_bytes_max, _refusal(name))
    codes = _codes(name, character_bytes_max, ask)
    is_one_to_one = len(set(codes.values())) == len(codes)
    decode = _by_bytes(codes) if character_bytes_max == 1 else _by_codes(name, codes)
    return Charset(name, character_bytes_max, decode, is_one_to_one)


def is_converted_exactly(name: str) -> bool:
    """Whether the server's conversion to utf8mb4 loses nothing, whatever bytes are stored."""
    return name in ("utf8mb4", "utf8mb3", "utf8")


def _codes(name: str, bytes_max: int, ask: Ask) -> dict[bytes, str]:
    """Each code that the server can convert, and its character."""
    found = {}
    for size in range(1, bytes_max + 1):
        spans = _SHAPES[size]
        tables = ", ".join(f"({_numbers(first, last)}) AS b{place}" for place, (first, last) in enumerate(spans))
        code = "CONCAT(" + ", ".join(f"LPAD(HEX(b{place}.n), 2, '0')" for place in range(size)) + ")"
        made = f"CONVERT(UNHEX({code}) USING {name})"
        is_whole = f"HEX({made}) = {code}"  # MySQL cuts off what is no character, MariaDB replaces it
        rows = ask(f"SELECT {code}, CONVERT({made} USING utf8mb4) FROM {tables} WHERE {is_whole}")  # noqa: S608 - our own
        for shown, text in rows:
            raw = bytes.fromhex(shown)
            is_longer = any(
                raw[:end] in found for end in range(1, size)
            )  # MySQL shows 8eb1 and 8eb1e7 alike in eucjpms
            if text is not None and len(text) == 1 and (text != "?" or raw == b"?") and not is_longer:
                found[raw] = text
    return found


def _numbers(first: int, last: int) -> str:
    return f"SELECT {first} AS n" + "".join(f" UNION ALL SELECT {number}" for number in range(first + 1, last + 1))


def _by_bytes(codes: Mapping[bytes, str]) -> Decoder:
    table = "".join(codes.get(bytes([byte]), UNDEFINED) for byte in range(256))
    return lambda raw: codecs.charmap_decode(raw, "strict", table)[0]


def _by_codes(name: str, codes: Mapping[bytes, str]) -> Decoder:
    sizes = sorted({len(code) for code in codes})
    has_ascii = all(codes.get(bytes([byte])) == chr(byte) for byte in range(128))

    def decode(raw: bytes) -> str:
        if has_ascii and raw.isascii():
            return raw.decode("ascii")
        found, at = [], 0
        while at < len(raw):
            for size in sizes:
                text = codes.get(raw[at : at + size])
                if text is not None:
                    break
            else:
                text, size = _beyond(name, raw[at : at + 4]), 4
            found.append(text)
            at += size
        return "".join(found)

    return decode


def _beyond(name: str, raw: bytes) -> str:
    """A code that is in no table: in gb18030 those from U+10000 on are counted through."""
    if name == _GB18030 and raw[:1] >= b"\x90":
        return raw.decode(_GB18030)
    raise ValueError(f"the bytes {raw.hex()} begin with no character of {name}")


def _ucs2(raw: bytes) -> str:
    text = raw.decode("utf-16-be")
    if len(text) * 2 != len(raw):  # two codes that are a pair in UTF-16 are no characters here
        raise ValueError("a surrogate is no character of ucs2")
    return text


def _refusal(name: str) -> Decoder:
    def refuse(_raw: bytes) -> str:
        raise ValueError(f"its character set {name} cannot be decoded here")

    return refuse
