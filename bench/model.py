"""A row of the budget, and the result of measuring it.

A row opens its surroundings once (a broker, a client, a database) and is then measured ``repeats`` times; every measure
gives named figures, and the median of each is reported. Bounds name the figure they hold for.

*What a machine allows.* A bound may say what its figure would be if nothing but its forced writes and round trips took
time (``best``), from bare limits that are measured between the row's own measures, or by them, because a shared machine
changes within minutes. Where even that misses the bound, the row's verdict is ``LIMIT``: the disk's, not txmq's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from txmq.testing.bench.model import Figures

_VERDICTS = ("pass", "within 20 %", "LIMIT", "MISS")  # from good to bad
TOLERANCE = 0.2  # a row is missed beyond 20 % of its bound: the machines this runs on are shared


class NotMeasuredError(Exception):
    """A row has no figures, and the text says why. No failure of the row."""


class NotInstalledError(NotMeasuredError):
    """The subject of a row is not on this machine; the text says how to get it."""


class DeclinedError(NotMeasuredError):
    """The subject of a row cannot do the work."""


Measure = Callable[[], Figures]
Medians = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bound:
    """A promise about one figure.

    Attributes:
        figure: its name in what the row measures.
        limit: in ``unit``.
        at_least: more is better; else less is.
        best: what the figure would be if only its forced writes and round trips took time, from the medians of the
            bare limits and of the row's figures; None if that is not known.
    """

    figure: str
    limit: float
    unit: str
    at_least: bool = True
    best: Callable[[Medians, Medians], float] | None = None

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
    """The means of a row.

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
        bare: names of the bare limits that it is shown with.
        repeats: how often it is measured.
        is_long: it takes minutes: measured only if ``--rows`` has its whole name.
    """

    name: str
    title: str
    open: Callable[[Surroundings], AbstractContextManager[Measure]]
    units: Mapping[str, str]
    bounds: tuple[Bound, ...] = ()
    bare: tuple[str, ...] = ()
    repeats: int = 5
    is_long: bool = False

    def is_chosen(self, names: Sequence[str]) -> bool:
        """Whether ``--rows`` asks for it."""
        if self.is_long:
            return self.name in names
        return not names or any(name in self.name for name in names)


@dataclass(slots=True)
class Result:
    """The result of a row, and of the bare limits between its measures."""

    row: Row
    samples: dict[str, list[float]] = field(default_factory=dict)
    bare_samples: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None
    missing: str | None = None

    def add(self, figures: Figures, bare: Figures | None = None) -> None:
        """One more measure, and the bare limits taken with it."""
        for samples, values in ((self.samples, figures), (self.bare_samples, bare or {})):
            for name, value in values.items():
                samples.setdefault(name, []).append(value)

    def median(self, figure: str) -> float | None:
        """The median of a figure; None if it was not measured."""
        values = self.samples.get(figure)
        return statistics.median(values) if values else None

    @property
    def bare(self) -> dict[str, float]:
        """The medians of the bare limits that the row names."""
        return {name: statistics.median(values) for name, values in self.bare_samples.items() if name in self.row.bare}

    def best(self, bound: Bound) -> float | None:
        """The best figure that the machine allowed; None if that is not known."""
        if bound.best is None or not self.bare:
            return None
        return bound.best(self.bare, {name: statistics.median(values) for name, values in self.samples.items()})

    @property
    def verdict(self) -> str:
        """The worst of its bounds; empty if there is none, or nothing was measured.

        ``pass``, ``within 20 %``, ``LIMIT`` (missed, as the bare machine would miss it), ``MISS``, or ``failed``.
        """
        if self.missing is not None:
            return ""
        if self.failure is not None:
            return "failed"
        return max((self._verdict(bound) for bound in self.row.bounds), key=_VERDICTS.index, default="")

    def _verdict(self, bound: Bound) -> str:
        value = self.median(bound.figure)
        if value is None or bound.is_missed(value):
            best = self.best(bound)
            return "MISS" if value is None or best is None or not bound.is_missed(best) else "LIMIT"
        return "pass" if bound.holds(value) else "within 20 %"
