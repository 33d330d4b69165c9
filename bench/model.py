"""What a row of the budget is, and what came of measuring it.

A row opens its surroundings once (a broker, a client, a database) and is then measured ``repeats`` times; every measure
gives named figures, and the median of each is reported. Bounds name the figure they hold for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from txmq.testing.bench.model import Figures

TOLERANCE = 0.2  # a row is missed beyond 20 % of its bound: the machines this runs on are shared


class NotInstalledError(Exception):
    """What a row is about is not on this machine; the text says how to get it. No failure of the row."""


Measure = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Bound:
    """A promise about one figure.

    Attributes:
        figure: its name in what the row measures.
        limit: in ``unit``.
        at_least: more is better; else less is.
    """

    figure: str
    limit: float
    unit: str
    at_least: bool = True

    def holds(self, value: float) -> bool:
        """Whether the figure reaches the bound."""
        return value >= self.limit if self.at_least else value <= self.limit

    def is_missed(self, value: float) -> bool:
        """Whether the figure is beyond the tolerance."""
        if self.at_least:
            return value < self.limit * (1 - TOLERANCE)
        return value > self.limit * (1 + TOLERANCE)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a row may use.

    Attributes:
        directory: empty, of this row alone, on the disk that is measured.
        quick: a tenth of the work.
    """

    directory: Path
    quick: bool

    def count(self, full: int) -> int:
        """How much work: ``full``, or a tenth of it."""
        return max(1, full // 10) if self.quick else full


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the budget.

    Attributes:
        name: for ``--rows``.
        open: makes the surroundings and gives the function to be timed.
        units: of every figure, in the order in which they are shown.
        bare: names of the bare limits that stand beside it.
        repeats: how often it is measured.
    """

    name: str
    title: str
    open: Callable[[Surroundings], AbstractContextManager[Measure]]
    units: Mapping[str, str]
    bounds: tuple[Bound, ...] = ()
    bare: tuple[str, ...] = ()
    repeats: int = 5


@dataclass(slots=True)
class Result:
    """What came of a row."""

    row: Row
    samples: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None
    missing: str | None = None

    def add(self, figures: Figures) -> None:
        """One more measure."""
        for name, value in figures.items():
            self.samples.setdefault(name, []).append(value)

    def median(self, figure: str) -> float | None:
        """The median of a figure; None where it was not measured."""
        values = self.samples.get(figure)
        return statistics.median(values) if values else None

    @property
    def verdict(self) -> str:
        """``pass``, ``within 20 %``, ``MISS``, ``failed``, or nothing where there is no bound or nothing to measure."""
        if self.missing is not None:
            return ""
        if self.failure is not None:
            return "failed"
        worst = "pass" if self.row.bounds else ""
        for bound in self.row.bounds:
            value = self.median(bound.figure)
            if value is None or bound.is_missed(value):
                return "MISS"
            if not bound.holds(value):
                worst = "within 20 %"
        return worst
