"""Two kinds of drawing, as inline SVG: bars from zero, and latencies from p50 to p99.9 on a logarithmic axis.

Pure functions from marks to text. Colours are CSS variables of the page, so that light and dark both work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from txmq.testing.bench.model import PERCENTILES, amount

WIDTH, LEFT, RIGHT = 960, 330, 150  # of the drawing, of the names, of the figures after the bars
LINE, TOP = 30, 8
PLOT = WIDTH - LEFT - RIGHT
LOWEST_MS = 0.001


@dataclass(frozen=True, slots=True)
class Mark:
    """One line of a drawing.

    Attributes:
        style: ``own``, ``client`` or ``bare``.
        value: what the bar shows; None if there is nothing but ``text``.
        text: after the bar.
        low, high: of the samples.
        bound: where the promise lies.
        spread: latencies by percentile.
    """

    label: str
    style: str
    value: float | None
    text: str
    low: float = 0.0
    high: float = 0.0
    bound: float | None = None
    spread: Mapping[str, float] = field(default_factory=dict)


def bars(marks: Sequence[Mark]) -> str:
    """Bars from zero; a whisker from the lowest to the highest sample, a stroke at the bound."""
    most = max([value for mark in marks for value in (mark.value or 0, mark.high, mark.bound or 0)], default=0) or 1

    def x(value: float) -> float:
        return LEFT + value / most * PLOT

    return _drawing(marks, [_bar(mark, number, x) for number, mark in enumerate(marks)], "")


def _bar(mark: Mark, number: int, x: Callable[[float], float]) -> str:
    y = TOP + number * LINE
    if mark.value is None:
        return ""
    shape = f'<rect class="{mark.style}" x="{LEFT}" y="{y + 5}" width="{x(mark.value) - LEFT:.1f}" height="18" rx="2"/>'
    if mark.high > mark.low:
        shape += f'<path class="whisker" d="M{x(mark.low):.1f} {y + 14}H{x(mark.high):.1f}"/>'
    return shape + _bound(mark, y, x)


def _bound(mark: Mark, y: int, x: Callable[[float], float]) -> str:
    return "" if mark.bound is None else f'<path class="bound" d="M{x(mark.bound):.1f} {y + 1}V{y + 27}"/>'


def latencies(marks: Sequence[Mark]) -> str:
    """From p50 (the wide end) to p99.9, a dot for each percentile; every vertical line is ten times the one before."""
    values = [v for mark in marks for v in (mark.value, mark.bound, *mark.spread.values()) if v]
    low = math.floor(math.log10(max(LOWEST_MS, min(values, default=0.1))))
    high = max(low + 1, math.ceil(math.log10(max(values, default=1.0))))

    def x(value: float) -> float:
        return LEFT + (math.log10(max(value, LOWEST_MS)) - low) / (high - low) * PLOT

    bottom = TOP + len(marks) * LINE
    axis = "".join(
        f'<path class="axis" d="M{x(10.0**power):.1f} {TOP}V{bottom}"/>'
        f'<text class="tick" x="{x(10.0**power):.1f}" y="{bottom + 14}">{10.0**power:g} ms</text>'
        for power in range(low, high + 1)
    )
    return _drawing(marks, [_range(mark, number, x) for number, mark in enumerate(marks)], axis)


def _range(mark: Mark, number: int, x: Callable[[float], float]) -> str:
    if mark.value is None:
        return ""
    y = TOP + number * LINE
    places = [x(mark.spread[name]) for name in PERCENTILES if name in mark.spread] or [x(mark.value)]
    line = f'<path class="{mark.style} range" d="M{places[0]:.1f} {y + 14}H{places[-1]:.1f}"/>'
    dots = "".join(
        f'<circle class="{mark.style}" cx="{place:.1f}" cy="{y + 14}" r="{radius}"/>'
        for place, radius in zip(places, (7, 4.5, 4.5, 3), strict=False)
    )
    return line + dots + _bound(mark, y, x)


def _drawing(marks: Sequence[Mark], shapes: Sequence[str], axis: str) -> str:
    height = TOP + len(marks) * LINE + (22 if axis else 4)
    texts = "".join(
        f'<text class="name" x="{LEFT - 10}" y="{TOP + number * LINE + 19}">{escape(mark.label)}</text>'
        f'<text class="figure{"" if mark.value is not None else " missing"}" '
        f'x="{WIDTH - RIGHT + 12 if mark.value is not None else LEFT}" '
        f'y="{TOP + number * LINE + 19}">{escape(mark.text)}</text>'
        for number, mark in enumerate(marks)
    )
    names = ", ".join(f"{mark.label}: {mark.text}" for mark in marks)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(names)}">'
        f"{axis}{''.join(shapes)}{texts}</svg>"
    )


def with_unit(value: float, unit: str) -> str:
    """As shown after a bar."""
    return f"{amount(value)} {unit}"
