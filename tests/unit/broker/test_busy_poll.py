"""The event loop stays awake behind an answer only where the next request is likely to come at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from txmq.broker.shell.busy_poll import REST_S_MAX, REST_S_MIN, BusyPoll
from txmq.testing.simulated.clock import SimClock

WINDOW_S = 100e-6


class Loop:
    """Counts iterations with a callback due; each takes a microsecond."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.clock, self.due = SimClock(), list[Callable[[], None]]()
        self.lost, self.is_wanted = 0, False
        self.poll = BusyPoll(window_s, self.clock.monotonic, self.due.append, lambda: self.lost)

    def polled(self, seconds: float) -> int:
        """Let so much time pass; how many iterations did not sleep."""
        count, until = 0, self.clock.monotonic() + seconds
        while self.due and self.clock.monotonic() < until:
            due, self.due[:] = list(self.due), []
            for callback in due:
                callback()
            self.clock.advance(1e-6)
            count += 1
            self.lost += self.is_wanted
        self.clock.advance(max(0.0, until - self.clock.monotonic()))
        return count

    def exchange(self, gap_s: float) -> int:
        """A request comes ``gap_s`` after the last answer, and is answered; how many iterations did not sleep."""
        count = self.polled(gap_s)
        self.poll.asked()
        self.poll.answered()
        return count


def test_a_caller_that_asks_again_at_once_finds_the_loop_awake() -> None:
    loop = Loop()
    counts = [loop.exchange(40e-6) for _ in range(30)]
    assert counts[0] == 0
    assert 39 <= counts[-1] <= 41


@pytest.mark.parametrize("gap_s", [120e-6, 0.01, 10.0])
def test_a_caller_that_works_between_its_requests_lets_it_sleep(gap_s: float) -> None:
    loop = Loop()
    assert sum(loop.exchange(gap_s) for _ in range(100)) == 0


def test_it_gives_up_soon_when_the_requests_come_later() -> None:
    loop = Loop()
    for _ in range(50):
        loop.exchange(40e-6)
    counts = [loop.exchange(0.01) for _ in range(50)]
    assert counts[0] > 90
    assert sum(counts) < 8 * 101


def test_without_requests_nothing_is_due() -> None:
    loop = Loop()
    for _ in range(50):
        loop.exchange(40e-6)
    assert 90 < loop.polled(1.0) < 110
    assert not loop.due
    loop.poll.answered()  # the clock's own rounds
    assert not loop.due


def test_a_window_of_zero_is_off() -> None:
    loop = Loop(0.0)
    assert sum(loop.exchange(0.0) for _ in range(50)) == 0
    assert not loop.due


def test_who_takes_the_processor_from_the_polling_loop_gets_it() -> None:
    loop, gap_s = Loop(), 90e-6
    for _ in range(50):
        loop.exchange(gap_s)
    loop.is_wanted = True
    counts = [loop.exchange(gap_s) for _ in range(10_000)]
    polls = [index for index, count in enumerate(counts) if count > 1]  # one: the last callback, which ends it
    rests = [(later - earlier) * gap_s for earlier, later in pairwise(polls)]
    assert sum(counts) < 1000  # of 900,000
    assert REST_S_MIN <= rests[0] < 1.1 * REST_S_MIN
    assert all(1.8 < later / earlier < 2.2 for earlier, later in pairwise(rests))


def test_the_loop_polls_again_when_nobody_minds_any_more() -> None:
    loop, gap_s = Loop(), 90e-6
    loop.is_wanted = True
    for _ in range(5000):
        loop.exchange(gap_s)
    loop.is_wanted = False
    assert any(loop.exchange(gap_s) >= 89 for _ in range(int(REST_S_MAX / gap_s) + 300))
    assert all(loop.exchange(gap_s) >= 89 for _ in range(300))
