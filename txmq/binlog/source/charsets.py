"""Character sets of the database as decoders.

Sets of one byte for each character are decoded by a table that the server itself gives, so that a value reads as in a
SELECT; the others by Python's codecs.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_CODECS: Final = {
    "utf8mb4": "utf-8", "utf8mb3": "utf-8", "utf8": "utf-8", "ucs2": "utf-16-be", "utf16": "utf-16-be",
    "utf16le": "utf-16-le", "utf32": "utf-32-be", "big5": "big5", "gbk": "gbk", "gb2312": "gb2312",
    "gb18030": "gb18030", "euckr": "cp949", "sjis": "shift_jis", "cp932": "cp932", "ujis": "euc_jp",
}  # fmt: skip
UNDEFINED: Final = "\ufffe"  # marks, in a table, a byte that is no character: decoding one is an error


@dataclass(frozen=True, slots=True)
class Charset:
    """A character set; ``decode`` raises ``ValueError`` for bytes that are no text in it."""

    name: str
    character_bytes_max: int
    decode: Callable[[bytes], str]


def charset(name: str, character_bytes_max: int, table: str | None) -> Charset:
    """The set of that name.

    Args:
        name: as the server calls it.
        character_bytes_max: of one character.
        table: for a set of one byte, the 256 characters.
    """
    if table is not None:
        characters = table
        return Charset(name, character_bytes_max, lambda raw: codecs.charmap_decode(raw, "strict", characters)[0])
    codec = _CODECS.get(name)
    if codec is None:
        return Charset(name, character_bytes_max, _refusal(name))
    return Charset(name, character_bytes_max, lambda raw: raw.decode(codec))


def _refusal(name: str) -> Callable[[bytes], str]:
    def refuse(_raw: bytes) -> str:
        raise ValueError(f"its character set {name} cannot be decoded here")

    return refuse
