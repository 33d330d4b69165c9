"""Three drawings of an audit, as inline SVG: amounts over time, latencies over time, findings along the log.

Pure functions from numbers to text. Colours are CSS variables of the page, so that light and dark both work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from txmq.spark.audit.time_axis import TimeAxis

WIDTH, LEFT, RIGHT = 960, 76, 16
PLOT = WIDTH - LEFT - RIGHT
TOP, HEIGHT, AXIS = 10, 170, 24
BAND = 18  # of one line of marks, or one partition
BANDS_BELOW = 6
JOIN = 0.5  # pixels: two buckets that are no further apart stand side by side

Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Series:
    """A line over time; ``style`` is its class. A value of None is a hole in the line."""

    name: str
    style: str
    values: Sequence[float | None]
    is_area: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Something found: ``at`` on the axis, in the band of this name."""

    at: float
    band: str
    text: str


def time_axis(times_ms: Sequence[int], step_ms: int, marks: Sequence[Mark] = ()) -> TimeAxis:
    """The axis on which these buckets, and these marks, are something that happened; at least one of either."""
    return TimeAxis([*times_ms, *(mark.at // step_ms * step_ms for mark in marks)], step_ms, LEFT, WIDTH - RIGHT)


def over_time(
    axis: TimeAxis, times_ms: Sequence[int], step_ms: int, series: Sequence[Series], marks: Sequence[Mark], unit: str
) -> str:  # fmt: skip
    """Lines over time, and under them a band of marks for each kind of finding.

    Args:
        times_ms: where each bucket begins.
        step_ms: how long one is.
        unit: after the figures of the axis.
    """
    x = axis.x

    values = [value for line in series for value in line.values if value is not None]
    low, high = min(0.0, *values, 0.0), max([*values, 0.0]) or 1.0

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * HEIGHT

    bands = list(dict.fromkeys(mark.band for mark in marks))
    under = TOP + HEIGHT + BANDS_BELOW
    bottom = under + len(bands) * BAND
    shapes = [_levels(low, high, y, unit), _clock(axis, bottom)]
    edges = [(x(ms), x(ms + step_ms)) for ms in times_ms]
    shapes += [_steps(line, edges, y) for line in series]
    shapes += [_band(band, marks, under + number * BAND, x) for number, band in enumerate(bands)]
    what = ", ".join(line.name for line in series)
    return _svg(bottom + AXIS, f"{what} over time", shapes)


def along_the_log(spans: Mapping[int, tuple[int, int]], marks: Mapping[int, Sequence[Mark]]) -> str:
    """A bar for each partition, from its first to its last offset, with a mark at each finding."""
    low = min((first for first, _ in spans.values()), default=0)
    high = max(
        [last for _, last in spans.values()] + [mark.at for found in marks.values() for mark in found], default=1
    )

    def x(offset: float) -> float:
        return LEFT + (offset - low) / max(1, high - low) * PLOT

    shapes = []
    for number, partition in enumerate(sorted(spans)):
        first, last = spans[partition]
        y = TOP + number * BAND
        width = max(2.0, x(last) - x(first))
        shapes.append(
            f'<text class="band" x="{LEFT - 8}" y="{y + 12}">partition {partition}</text>'
            f'<rect class="log" x="{x(first):.1f}" y="{y + 3}" width="{width:.1f}" height="10" rx="2"/>'
        )
        shapes += [_mark(mark, x(mark.at), y + 1) for mark in marks.get(partition, ())]
    bottom = TOP + len(spans) * BAND
    shapes += [
        f'<text class="tick start" x="{LEFT}" y="{bottom + 14}">offset {low:,}</text>',
        f'<text class="tick end" x="{WIDTH - RIGHT}" y="{bottom + 14}">{high:,.0f}</text>',
    ]
    return _svg(bottom + AXIS, "findings along the log, by partition", shapes)


def _steps(line: Series, edges: Sequence[tuple[float, float]], y: Scale) -> str:
    """A step for each bucket; one that follows at once is joined, one after a hole begins anew."""
    pieces: list[list[tuple[float, float, float]]] = []
    for (left, right), value in zip(edges, line.values, strict=True):
        if value is None:
            continue
        if not pieces or left - pieces[-1][-1][1] > JOIN:
            pieces.append([])
        pieces[-1].append((left, right, y(value)))
    return "".join(_piece(line, piece, y(0)) for piece in pieces)


def _piece(line: Series, steps: Sequence[tuple[float, float, float]], ground: float) -> str:
    path = "L".join(f"{left:.1f} {height:.1f}H{right:.1f}" for left, right, height in steps)
    if not line.is_area:
        return f'<path class="{line.style} line" d="M{path}"/>'
    return f'<path class="{line.style} area" d="M{steps[0][0]:.1f} {ground:.1f}L{path}V{ground:.1f}Z"/>'


def _levels(low: float, high: float, y: Scale, unit: str) -> str:
    step = _round_step((high - low) / 4)
    levels = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return "".join(
        f'<path class="axis" d="M{LEFT} {y(level):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="tick end" x="{LEFT - 8}" y="{y(level) + 4:.1f}">{_short(level)}{unit}</text>'
        for level in levels
    )


def _clock(axis: TimeAxis, bottom: float) -> str:
    texts = [f'<text class="tick start" x="{x:.1f}" y="{bottom + 16:.1f}">{text}</text>' for x, text in axis.ticks()]
    for x, idle in axis.breaks():
        texts.append(
            f'<path class="break" d="M{x:.1f} {TOP}V{bottom:.1f}"><title>nothing for {idle}</title></path>'
            f'<text class="idle" transform="translate({x - 3:.1f} {TOP + HEIGHT / 2}) rotate(-90)">{idle}</text>'
        )
    return "".join(texts)


def _band(band: str, marks: Sequence[Mark], y: float, x: Scale) -> str:
    found = "".join(_mark(mark, x(mark.at), y + 2) for mark in marks if mark.band == band)
    return f'<text class="band" x="{LEFT - 8}" y="{y + 14}">{escape(band)}</text>{found}'


def _mark(mark: Mark, x: float, y: float) -> str:
    title = f"<title>{escape(mark.text)}</title>"
    return f'<rect class="found" x="{x - 2:.1f}" y="{y}" width="4" height="14" rx="1">{title}</rect>'


def _round_step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {letter}"
    return f"{value:g}"


def _svg(height: float, what: str, shapes: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(what)}">{"".join(shapes)}</svg>'
