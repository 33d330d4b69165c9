"""What is measured each second, and what it must keep: absolute bounds, and no growth with the minutes.

A measure grew if its last third is above its first third by more than the measure's share and slack. The warm-up
before the first third is not judged for growth, because caches fill then. A maximum over the last minute
(``window_s``) is compared only if each third is as long as that minute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

WARM_UP_S = 5.0
THIRDS = 3
Sample = Mapping[str, float]  # by a measure's name; and "second", since the load began


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that is measured, and its bounds.

    Attributes:
        name: as in the samples.
        unit: for people.
        highest: the bound that no sample may pass.
        share, slack: the last third may be ``first * (1 + share) + slack``.
        typical: what of a third is compared.
        window_s: the time over which each sample is a maximum already.
    """

    name: str
    unit: str
    highest: float
    share: float
    slack: float
    typical: Callable[[Sequence[float]], float] = median
    window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """One row of the table.

    Attributes:
        first, last: of the first and last third; None if too little was measured to compare.
        allowed: for ``last``.
        broken: what is wrong; empty if nothing is.
    """

    measure: Measure
    highest: float
    first: float | None
    last: float | None
    allowed: float | None
    broken: str


def judge(measures: Sequence[Measure], samples: Sequence[Sample]) -> list[Judged]:
    """A row for each measure."""
    return [_judge(measure, samples) for measure in measures]


def _judge(measure: Measure, samples: Sequence[Sample]) -> Judged:
    if not samples:
        return Judged(measure, 0.0, None, None, None, f"{measure.name}: nothing was measured")
    highest = max(sample[measure.name] for sample in samples)
    broken = "" if highest <= measure.highest else (
        f"{measure.name} reached {highest:g} {measure.unit}; at most {measure.highest:g}"
    )  # fmt: skip
    thirds = _thirds(measure, samples)
    if thirds is None:
        return Judged(measure, highest, None, None, None, broken)
    first, last = map(measure.typical, thirds)
    allowed = first * (1 + measure.share) + measure.slack
    if not broken and last > allowed:
        broken = (
            f"{measure.name} grows: {first:g} {measure.unit} in the first third, {last:g} in the last; "
            f"at most {allowed:g}"
        )
    return Judged(measure, highest, first, last, allowed, broken)


def _thirds(measure: Measure, samples: Sequence[Sample]) -> tuple[list[float], list[float]] | None:
    judged = [sample for sample in samples if sample["second"] >= WARM_UP_S]
    count = len(judged) // THIRDS
    if not count or (judged[-1]["second"] - judged[0]["second"]) / THIRDS < measure.window_s:
        return None
    return [s[measure.name] for s in judged[:count]], [s[measure.name] for s in judged[-count:]]
