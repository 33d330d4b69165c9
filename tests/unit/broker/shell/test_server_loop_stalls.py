"""The longest stall of the loop in the last minute."""

from __future__ import annotations

import pytest

from txmq.broker.shell.server import STALL_WINDOW_S, LoopStalls


def stalls_of(waits: list[float]) -> LoopStalls:
    """Whose thread has waited so long in all for a processor, each time it is asked; the last for ever."""
    return LoopStalls(lambda: waits.pop(0) if len(waits) > 1 else waits[0])


def test_longest_stall_is_reported_with_and_without_processor_waits() -> None:
    stalls = stalls_of([1.0, 1.045, 1.045])
    assert stalls.figures() == {"loop_stall_ms_max": 0.0, "loop_stall_own_ms_max": 0.0}
    stalls.ticked(100.0, 0.050)
    stalls.ticked(101.0, 0.030)
    stalls.worked(140.0, 0.040)
    assert stalls.figures() == {"loop_stall_ms_max": 50.0, "loop_stall_own_ms_max": 40.0}


def test_processor_wait_of_a_callback_counts_for_the_next_timer() -> None:
    stalls = stalls_of([1.0, 1.1, 1.1])
    stalls.worked(100.0, 0.1)
    stalls.ticked(100.1, 0.1)
    assert stalls.figures() == {"loop_stall_ms_max": 100.0, "loop_stall_own_ms_max": 0.0}


@pytest.mark.parametrize("count", [7, 1000])
def test_a_stall_is_forgotten_after_a_minute_and_not_before(count: int) -> None:
    stalls = stalls_of([0.0])
    for _ in range(count):
        stalls.ticked(100.0, 0.5)
    for second in range(1, int(STALL_WINDOW_S) + 1):
        stalls.ticked(100.0 + second, 0.001)
        assert stalls.figures()["loop_stall_ms_max"] == 500.0
    stalls.ticked(100.0 + STALL_WINDOW_S + 10, 0.001)
    assert stalls.figures()["loop_stall_ms_max"] == 1.0
    assert len(stalls._slots) <= 8
