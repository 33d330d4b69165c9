"""Tables and paragraphs as plain text: for a terminal of some width, or for a pipe.

Columns are parted by two blanks, without boxes. Through a pipe every row is one line, the first line names the columns,
and no title stands before it: ``txmq topic list | awk 'NR > 1 {print $1}'``. On a terminal cells are folded, between
words; where even that does not fit, each row becomes lines of ``column  value``.

Invariants:
    * no word is broken: one that is longer than the terminal leaves the folding to the terminal, which copies it whole;
    * pure: texts in, lines out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from unicodedata import combining, east_asian_width

GAP = "  "
NOTHING = "-"
_PIECES = re.compile(r"[^ ]+ *| +")
_NAME_PIECES = re.compile(r"[^_-]+[_-]*|[_-]+")  # of a column's name, which may be folded after these


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], width: int | None
) -> list[str]:
    """The lines of a table: the columns' names, a rule (on a terminal), the rows.

    Args:
        numeric: columns that stand right.
        width: of the terminal; None for a pipe.
    """
    widths = _natural(columns, rows)
    if width is None:
        rows = [[text or NOTHING for text in row] for row in rows]  # so that each row has as many words
        return [_line(cells, widths, numeric) for cells in (columns, *rows)]
    if _total(widths) > width:
        least = _least(columns, rows)
        if _total(least) > width:
            return [*_records(columns, rows, width)]
        widths = _shared(least, widths, width)
    head = _folded_row(columns, widths, numeric, _NAME_PIECES)
    rule = GAP.join("\u2500" * size for size in widths)
    return [*head, rule, *(line for row in rows for line in _folded_row(row, widths, numeric, _PIECES))]


def field_lines(fields: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    """The lines of one thing: ``name  value``, values folded between words."""
    size = max((display_width(name) for name, _ in fields), default=0)
    found = []
    for name, value in fields:
        lines = folded(value, None if width is None else width - size - len(GAP), _PIECES)
        found += [
            _line((name if number == 0 else "", line), (size, 0), (False, False)) for number, line in enumerate(lines)
        ]
    return found


def paragraph(text: str, width: int | None, indent: str = "", first: str = "") -> list[str]:
    """A sentence, folded between words, after ``indent``; its first line after ``first``, if that is given."""
    lines = folded(text, None if width is None else width - len(indent), _PIECES)
    return [(first or indent) + lines[0], *(indent + line for line in lines[1:])]


def folded(text: str, width: int | None, pieces: re.Pattern[str] = _PIECES) -> list[str]:
    """``text`` in lines of at most ``width``, unless a single piece is longer."""
    if width is None or display_width(text) <= width:
        return [text]
    lines, line = [], ""
    for piece in pieces.findall(text):
        if line and display_width((line + piece).rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece
    return [*lines, line.rstrip()]


def display_width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def _natural(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(display_width, (name, *(row[index] for row in rows)))) for index, name in enumerate(columns)]


def _least(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """How wide each column must be for none of its words to be broken."""
    return [
        max(_longest(name, _NAME_PIECES), *(_longest(row[index], _PIECES) for row in rows), 1)
        for index, name in enumerate(columns)
    ]


def _longest(text: str, pieces: re.Pattern[str]) -> int:
    return max((display_width(piece.rstrip()) for piece in pieces.findall(text)), default=0)


def _shared(least: Sequence[int], natural: Sequence[int], width: int) -> list[int]:
    """The rest of the width goes to the column that lacks most."""
    widths = list(least)
    for _ in range(width - _total(least)):
        lacking = max(range(len(widths)), key=lambda index: natural[index] - widths[index])
        if natural[lacking] <= widths[lacking]:
            break
        widths[lacking] += 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _folded_row(
    cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], pieces: re.Pattern[str]
) -> Iterator[str]:
    columns = [folded(cell, size, pieces) for cell, size in zip(cells, widths, strict=True)]
    for number in range(max(map(len, columns), default=0)):
        yield _line([lines[number] if number < len(lines) else "" for lines in columns], widths, numeric)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    return GAP.join(_padded(*found) for found in zip(cells, widths, numeric, strict=True)).rstrip()


def _padded(cell: str, width: int, is_right: bool) -> str:
    blanks = " " * (width - display_width(cell))
    return blanks + cell if is_right else cell + blanks


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield from field_lines(list(zip(columns, row, strict=True)), width)
