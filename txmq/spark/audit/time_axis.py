"""The time axis of an audit's drawings: idle stretches are cut out, ticks are round times and all different.

A shop that is busy for two minutes a day would be two spikes in a day of nothing. A stretch without anything that is
long compared with all that happened is drawn as a narrow break that says how long it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

BREAK = 26.0  # pixels of an idle stretch that is cut out
IDLE_SHARE = 0.2  # of the time in which something happened: a longer stretch is cut out
IDLE_STEPS_MIN = 3
TICK_PIXELS_MIN = 90.0
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


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
