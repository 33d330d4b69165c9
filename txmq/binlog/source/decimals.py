"""DECIMAL as it stands in rows and in JSON: groups of nine digits in four bytes, the outer ones in fewer.

The sign's bit is set in what is not negative; of a negative number all bits are turned. Source: MySQL server,
``strings/decimal.cc``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

_DIGITS: Final = 9  # of a full group, in four bytes
_PARTIAL_BYTES: Final = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)  # for so many digits of a group that is not full


@lru_cache(1024)
def decimal_reader(precision: int, scale: int) -> tuple[int, Callable[[bytes], str]]:
    """How many bytes a number of so many digits has, so many of them after the point; and what reads them."""
    whole_groups, whole_rest = divmod(precision - scale, _DIGITS)
    part_groups, part_rest = divmod(scale, _DIGITS)
    widths = [(_PARTIAL_BYTES[whole_rest], whole_rest), *[(4, _DIGITS)] * (whole_groups + part_groups)]
    widths.append((_PARTIAL_BYTES[part_rest], part_rest))
    size = sum(count for count, _ in widths)
    groups, below = [], size * 8  # of each group: where it stands, its bits, its digits
    for count, digits in widths:
        below -= count * 8
        if count:
            groups.append((below, (1 << count * 8) - 1, digits))
    sign, ones = 1 << (size * 8 - 1), (1 << size * 8) - 1

    def text(data: bytes) -> str:
        number = int.from_bytes(data, "big") ^ sign
        minus = ""
        if number & sign:
            number ^= ones
            minus = "-"
        text = "".join([f"{number >> shift & mask:0{digits}d}" for shift, mask, digits in groups])
        if scale:
            return f"{minus}{text[:-scale].lstrip('0') or '0'}.{text[-scale:]}"
        return f"{minus}{text.lstrip('0') or '0'}"

    return size, text


def decimal_text(data: bytes, precision: int, scale: int) -> str:
    """One number.

    Raises:
        ValueError: it has another number of bytes.
    """
    size, text = decimal_reader(precision, scale)
    if len(data) != size:
        raise ValueError(f"a decimal({precision},{scale}) of {len(data)} bytes")
    return text(data)
