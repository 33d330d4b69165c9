"""``tools/soak/bounds.py``: which bounds a soak has broken."""

from __future__ import annotations

from statistics import median

import pytest

from tools.soak.bounds import WARM_UP_S, Measure, Sample, judge

MEMORY = Measure("memory", "MiB", 100, 0.1, 5)
LONGEST = Measure("stall", "ms", 100, 0.5, 10, max, 60.0)


def samples(name: str, *values: float, step_s: float = 1.0) -> list[Sample]:
    """After the warm-up, one after the other."""
    return [{"second": WARM_UP_S + number * step_s, name: value} for number, value in enumerate(values)]


def broken(measure: Measure, taken: list[Sample]) -> str:
    (row,) = judge([measure], taken)
    return row.broken


def test_bounded_figure_that_does_not_grow_is_not_broken() -> None:
    (row,) = judge([MEMORY], samples("memory", 50, 60, 50, 60, 50, 60))
    assert (row.highest, row.first, row.last, row.broken) == (60, 55, 55, "")
    assert row.allowed == pytest.approx(65.5)
    assert MEMORY.typical is median


def test_one_sample_above_bound_breaks_it_also_in_warm_up() -> None:
    taken = [{"second": 0.0, "memory": 101.0}, *samples("memory", 50, 50, 50)]
    assert broken(MEMORY, taken) == "memory reached 101 MiB; at most 100"


def test_growth_from_the_first_third_to_the_last_breaks_it() -> None:
    assert broken(MEMORY, samples("memory", 50, 50, 55, 55, 60.1, 60.1)) == (
        "memory grows: 50 MiB in the first third, 60.1 in the last; at most 60"
    )
    assert broken(MEMORY, samples("memory", 50, 50, 55, 55, 60, 60)) == ""


def test_the_warm_up_is_not_taken_for_the_first_third() -> None:
    taken: list[Sample] = [{"second": 0.0, "memory": 1.0}, {"second": 1.0, "memory": 1.0}]
    assert broken(MEMORY, taken + samples("memory", 50, 50, 50)) == ""


def test_maximum_over_minute_is_compared_only_over_thirds_of_minute() -> None:
    values = (10, 10, 10, 90, 90, 90)
    assert broken(LONGEST, samples("stall", *values)) == ""
    assert "stall grows: 10 ms in the first third, 90 in the last" in broken(
        LONGEST, samples("stall", *values, step_s=60)
    )


def test_without_a_sample_nothing_is_said_to_hold() -> None:
    assert broken(MEMORY, []) == "memory: nothing was measured"
