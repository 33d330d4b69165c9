"""Three drawings of an audit, as inline SVG: amounts over time, latencies over time, findings along the log.

Theory of operation. A shop that is busy for two minutes a day would be two spikes in a day of nothing. So idle
stretches are cut out of the time axis: one that is long compared with all that happened is drawn as a narrow break that
says how long it was. Ticks are round times, and all different.

Pure functions from numbers to text. Colours are CSS variables of the page, so that light and dark both work.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

BREAK = 26.0  # pixels of an idle stretch that is cut out
IDLE_SHARE = 0.2  # of the time in which something happened: a longer stretch is cut out
IDLE_STEPS_MIN = 3
TICK_PIXELS_MIN = 90.0
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
WIDTH, LEFT, RIGHT = 960, 76, 16
PLOT = WIDTH - LEFT - RIGHT
TOP, HEIGHT, AXIS = 10, 170, 24
BAND = 18  # of one line of marks, or one partition
BANDS_BELOW = 6
JOIN = 0.5  # pixels: two buckets that are no further apart stand side by side
Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time in which something happened, and the pixels that it takes."""

    start_ms: float
    end_ms: float
    left: float
    right: float


class TimeAxis:
    """Maps times to pixels.

    Args:
        times_ms: where the buckets begin in which something happened.
        step_ms: how long a bucket is.
        left, right: pixels of the plot.
    """

    def __init__(self, times_ms: Iterable[float], step_ms: float, left: float, right: float) -> None:
        self._bucket_ms = step_ms
        busy = _joined(sorted(set(times_ms)), step_ms)
        total = sum(end - start for start, end in busy)
        self._scale = (right - left - BREAK * (len(busy) - 1)) / total
        self.stretches: list[Stretch] = []
        at = left
        for start, end in busy:
            self.stretches.append(Stretch(start, end, at, at + (end - start) * self._scale))
            at = self.stretches[-1].right + BREAK
        self._starts = [stretch.start_ms for stretch in self.stretches]

    def buckets(self) -> list[int]:
        """The beginnings of all buckets of the stretches, also of those in which nothing happened."""
        return [
            int(stretch.start_ms + number * self._bucket_ms)
            for stretch in self.stretches
            for number in range(round((stretch.end_ms - stretch.start_ms) / self._bucket_ms))
        ]

    def x(self, ms: float) -> float:
        """The position of a time; one in an idle stretch stands at its end."""
        stretch = self.stretches[max(bisect_right(self._starts, ms) - 1, 0)]
        return stretch.left + (min(max(ms, stretch.start_ms), stretch.end_ms) - stretch.start_ms) * self._scale

    def breaks(self) -> list[tuple[float, str]]:
        """The middle of each break, and how long nothing happened there."""
        pairs = zip(self.stretches, self.stretches[1:], strict=False)
        return [((one.right + two.left) / 2, _duration(two.start_ms - one.end_ms)) for one, two in pairs]

    def ticks(self) -> list[tuple[float, str]]:
        """Round times with the texts that begin there: each stretch begins with one, if there is room."""
        step_ms = self._step_ms()
        form = _form(self.stretches[0].start_ms, self.stretches[-1].end_ms, step_ms)
        beginnings = [stretch.left for stretch in self.stretches]
        found: list[tuple[float, str]] = []
        for number, stretch in enumerate(self.stretches):
            limit = beginnings[number + 1] if number + 1 < len(beginnings) else stretch.right + TICK_PIXELS_MIN / 4
            ms = stretch.start_ms
            while ms == stretch.start_ms or self.x(ms) + TICK_PIXELS_MIN <= limit:
                text = datetime.fromtimestamp(ms / 1000, UTC).strftime(form)
                if not found or (self.x(ms) - found[-1][0] >= TICK_PIXELS_MIN and found[-1][1] != text):
                    found.append((self.x(ms), text))
                ms = (ms // step_ms + 1) * step_ms
        return found

    def _step_ms(self) -> float:
        wanted_s = TICK_PIXELS_MIN / self._scale / 1000
        days = max(1, round(wanted_s / 86_400 + 0.5)) * 86_400
        return 1000.0 * next((step for step in _STEPS_S if step >= wanted_s), days)


def _joined(times_ms: list[float], step_ms: float) -> list[tuple[float, float]]:
    """Stretches from bucket to bucket, joined over idle time that is short compared with the whole."""
    limit = max(IDLE_STEPS_MIN * step_ms, IDLE_SHARE * len(times_ms) * step_ms)
    stretches = [(times_ms[0], times_ms[0] + step_ms)]
    for ms in times_ms[1:]:
        start, end = stretches[-1]
        if ms - end <= limit:
            stretches[-1] = (start, max(end, ms + step_ms))
        else:
            stretches.append((ms, ms + step_ms))
    return stretches


def _form(first_ms: float, last_ms: float, step_ms: float) -> str:
    clock = "%H:%M:%S" if step_ms < 60_000 or first_ms % 60_000 else "%H:%M"
    if step_ms >= 86_400_000:
        return "%d %b"
    return clock if first_ms // 86_400_000 == (last_ms - 1) // 86_400_000 else f"%d %b {clock}"


def _duration(ms: float) -> str:
    seconds = int(ms // 1000)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


# --- the drawings -----------------------------------------------------------------------------------------------------


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
