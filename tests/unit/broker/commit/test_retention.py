"""The time by which messages are old, where the machine's clock was wrong when the broker started."""

from __future__ import annotations

from tools.simulated.clock import START_MS, SimClock
from txmq.broker.commit.retention import ADOPTED_AFTER_S, RetentionClock
from txmq.runtime.clocks import SteadyClock

YEARS_MS = 9 * 365 * 86_400_000


def test_clock_ahead_at_start_makes_nothing_old() -> None:
    wall = SimClock(START_MS + YEARS_MS)
    steady = SteadyClock(wall)
    clock = RetentionClock(steady)
    wall.jump(-YEARS_MS)
    assert clock.now_ms() == START_MS
    assert steady.ahead_ms() == YEARS_MS
    wall.advance(3600.0)
    assert clock.now_ms() == START_MS + 3_600_000


def test_clock_behind_at_start_is_adopted_after_a_day() -> None:
    wall = SimClock(START_MS - YEARS_MS)
    clock = RetentionClock(SteadyClock(wall))
    wall.jump(YEARS_MS)
    assert clock.now_ms() == START_MS - YEARS_MS
    wall.advance(ADOPTED_AFTER_S - 1)
    assert clock.now_ms() < START_MS - YEARS_MS + 3 * 86_400_000
    wall.advance(1)
    assert clock.now_ms() == wall.now_ms()


def test_clock_set_ahead_for_less_is_not_adopted() -> None:
    """Messages are removed early by no more than that while."""
    wall = SimClock()
    clock = RetentionClock(SteadyClock(wall))
    wall.jump(YEARS_MS)
    for passed_s in (0.0, 1.0, ADOPTED_AFTER_S / 2, ADOPTED_AFTER_S / 2 - 2.0):
        wall.advance(passed_s)
        assert clock.now_ms() <= wall.now_ms() - YEARS_MS + ADOPTED_AFTER_S * 1000
    wall.jump(-YEARS_MS)
    assert clock.now_ms() == wall.now_ms()
