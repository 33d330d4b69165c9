"""Whether work grows with what is there: two runs of one process are compared, so the bound holds on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(prepare: Callable[[int], Callable[[], object]], small: int, large: int) -> float:
    """How much dearer one of ``large`` steps is than one of ``small``; about 1 where a step's work does not grow.

    Args:
        prepare: makes ready for so many steps, and returns what takes them all.
    """
    return _step_cost(prepare, large) / _step_cost(prepare, small)


def _step_cost(prepare: Callable[[int], Callable[[], object]], steps: int) -> float:
    """The least of five, in the processor's time: others interrupt, and only ever add."""
    return min(_timed(prepare(steps)) for _ in range(5)) / steps


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
