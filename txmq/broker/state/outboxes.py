"""How far the outboxes of databases are drained. A fold over the journal.

A database whose transactions could not be prepared here keeps their messages in a table, its *outbox*. A *series*
numbers the rows of one outbox from 1 and without gaps; each row's messages are a transaction that takes the next
number. So a row is taken once, whichever process sends it and however often, and in the order of the numbers.

Invariants:
    * the last number of a series never falls, and rises by one;
    * of its newest ROWS_KEPT numbers a series knows row and transaction;
    * a series is never forgotten: a drainer that was paused while its successor went on finds no number free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

ROWS_KEPT: Final = 256
SERIES_MAX: Final = 1000
FROZEN_FIELDS: Final = 3


class DrainedRow(NamedTuple):
    """The row that has a number, and the transaction of its messages."""

    row: str
    session: int
    counter: int


class OutboxSeries:
    """One numbering of an outbox's rows.

    Attributes:
        last: the highest number that is taken.
        newest: the rows of the last ROWS_KEPT numbers, in order.
        uuid: of the resource, for operators; empty until it is said to this process.
        taken_ms: when this process took its newest number; None if it took none.
    """

    __slots__ = ("last", "newest", "taken_ms", "uuid")

    def __init__(self, last: int = 0, newest: Iterable[DrainedRow] = ()) -> None:
        self.last = last
        self.newest = deque(newest, ROWS_KEPT)
        self.uuid = ""
        self.taken_ms: int | None = None

    def take(self, number: int, row: DrainedRow) -> None:
        """A row has the next number."""
        self.last = number
        self.newest.append(row)

    def at(self, number: int) -> DrainedRow | None:
        """The row of a number; None if it is not taken yet, or no longer known."""
        index = number - self.last + len(self.newest) - 1
        return self.newest[index] if 0 <= index < len(self.newest) else None

    def behind(self, number: int) -> Iterator[tuple[int, DrainedRow]]:
        """The rows of that number and later ones, as far as they are known."""
        first = self.last - len(self.newest) + 1
        return ((at, row) for at, row in enumerate(self.newest, first) if at >= number)


class Outboxes:
    """All series, by name."""

    def __init__(self) -> None:
        self.series: dict[str, OutboxSeries] = {}

    def take(self, series: str, number: int, row: DrainedRow) -> OutboxSeries:
        """A row has the next number of a series, which may begin with it; returns the series."""
        known = self.series.get(series)
        if known is None:
            known = self.series[series] = OutboxSeries()
        known.take(number, row)
        return known

    def freeze(self) -> Iterator[tuple[str, int, list[DrainedRow]]]:
        """A copy of each series."""
        for name, series in self.series.items():
            yield name, series.last, list(series.newest)

    def restore(self, rows: Iterable[Sequence[Any]]) -> None:
        """What ``freeze`` copied."""
        self.series = {name: OutboxSeries(last, map(DrainedRow._make, newest)) for name, last, newest in rows}
