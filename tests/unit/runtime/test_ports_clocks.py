"""Clocks and random numbers, real and simulated."""

from __future__ import annotations

import random

import pytest

from tools.simulated.clock import START_MS, SimClock, SimRandom
from txmq.runtime.clocks import OSClock, OSRandom, SteadyClock
from txmq.runtime.ports import Clock, Random


@pytest.mark.parametrize("clock", [OSClock(), SimClock(), SteadyClock(OSClock())])
def test_clock_shows_ms_of_this_century_and_never_goes_back(clock: Clock) -> None:
    assert 1_600_000_000_000 < clock.now_ms() < 4_100_000_000_000
    first = clock.monotonic()
    assert clock.monotonic() >= first


@pytest.mark.parametrize("numbers", [OSRandom(), SimRandom(random.Random(1))])
def test_random_numbers_fill_their_width(numbers: Random) -> None:
    drawn = [numbers.bits(64) for _ in range(200)]
    assert all(0 <= number < 1 << 64 for number in drawn)
    assert len(set(drawn)) == 200
    assert max(drawn) > 1 << 62


def test_simulated_time_moves_only_when_it_is_told_to() -> None:
    clock = SimClock()
    assert (clock.now_ms(), clock.monotonic()) == (START_MS, 0.0)
    clock.advance(1.5)
    assert (clock.now_ms(), clock.monotonic()) == (START_MS + 1500, 1.5)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_a_jump_moves_the_wall_clock_alone() -> None:
    clock = SimClock()
    clock.jump(-600_000)
    assert (clock.now_ms(), clock.monotonic()) == (START_MS - 600_000, 0.0)
    clock.advance(2)
    clock.set_ms(5)
    assert (clock.now_ms(), clock.monotonic()) == (5, 2.0)


def test_a_steady_clock_shows_the_wall_while_nobody_sets_it() -> None:
    wall = SimClock()
    clock = SteadyClock(wall)
    for step_s in (0.0, 0.0001, 0.0004, 0.0005, 0.1, 3600.0, 0.0001):
        wall.advance(step_s)
        assert wall.now_ms() - 1 <= clock.now_ms() <= wall.now_ms()
    assert clock.monotonic() == wall.monotonic()


@pytest.mark.parametrize(("set_by_ms", "speed"), [(3_600_000, 2.0), (-3_600_000, 0.5)])
def test_set_clock_is_followed_at_twice_or_half_speed(set_by_ms: int, speed: float) -> None:
    wall = SimClock()
    clock = SteadyClock(wall)
    wall.jump(set_by_ms)
    assert clock.now_ms() == START_MS
    for passed_s in (1, 10, 60):
        before_ms = clock.now_ms()
        wall.advance(passed_s)
        assert clock.now_ms() == before_ms + passed_s * 1000 * speed
    wall.advance(2 * 3600)
    assert clock.now_ms() == wall.now_ms()


def test_simulated_numbers_repeat_with_their_seed() -> None:
    one, two = SimRandom(random.Random(7)), SimRandom(random.Random(7))
    assert [one.bits(32) for _ in range(5)] == [two.bits(32) for _ in range(5)]
