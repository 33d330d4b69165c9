"""One look-up a process: its answers and its failures are shared, and the pauses between look-ups grow."""

from __future__ import annotations

import random
import threading

import pytest

from tools.simulated.clock import SimClock, SimRandom
from txmq.client.bootstrap import PAUSE_S, QUIET_S, LeaderLookup
from txmq.client.transport.reconnecting import Address
from txmq.errors import BrokerAwayError
from txmq.runtime.clocks import OSClock, OSRandom
from txmq.testing.eventually import WITHIN_S, eventually

FOUND = [("host", 1)]


class Registry:
    """Asked for leaders: there are none while ``is_away``."""

    def __init__(self, clock: SimClock) -> None:
        self.clock, self.asked_at, self.is_away = clock, list[float](), True

    def ask(self, _timeout: float) -> list[Address]:
        self.asked_at.append(self.clock.monotonic())
        if self.is_away:
            raise BrokerAwayError("no broker of the cluster is alive")
        return list(FOUND)


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def registry(clock: SimClock) -> Registry:
    return Registry(clock)


@pytest.fixture
def look_up(registry: Registry, clock: SimClock) -> LeaderLookup:
    return LeaderLookup(registry.ask, clock, SimRandom(random.Random(1)))


def tried(look_up: LeaderLookup, clock: SimClock, seconds: float, timeout: float = 1.0) -> None:
    """As links that connect again every 50 ms."""
    until = clock.monotonic() + seconds
    while clock.monotonic() < until:
        with pytest.raises(BrokerAwayError, match="no broker of the cluster is alive"):
            look_up.find(timeout)
        clock.sleep(0.05)


def test_pauses_between_look_ups_grow_to_a_bound(look_up: LeaderLookup, registry: Registry, clock: SimClock) -> None:
    tried(look_up, clock, 60.0)
    pauses = [late - early for early, late in zip(registry.asked_at, registry.asked_at[1:], strict=False)]
    assert 0.75 * PAUSE_S.first <= pauses[0] <= 1.25 * PAUSE_S.first + 0.1
    assert pauses[0] < pauses[1] < pauses[2] < pauses[3]
    assert all(0.75 * PAUSE_S.most <= pause <= 1.25 * PAUSE_S.most + 0.1 for pause in pauses[6:])
    assert len({round(pause, 1) for pause in pauses[6:]}) > 2  # clients of one moment do not stay together
    assert len(registry.asked_at) < 45


def test_brokers_that_are_back_are_found_within_a_pause(
    look_up: LeaderLookup, registry: Registry, clock: SimClock
) -> None:
    tried(look_up, clock, 30.0)
    registry.is_away, back = False, clock.monotonic()
    assert look_up.find(60.0) == FOUND
    assert clock.monotonic() - back <= 1.25 * PAUSE_S.most


def test_an_answer_is_told_again_during_the_pause(look_up: LeaderLookup, registry: Registry, clock: SimClock) -> None:
    registry.is_away = False
    assert [look_up.find(1.0) for _ in range(9)] == [FOUND] * 9
    assert len(registry.asked_at) == 1
    clock.sleep(QUIET_S)
    assert look_up.find(1.0) == FOUND
    assert len(registry.asked_at) == 2


def test_pause_is_short_again_after_a_quiet_while(look_up: LeaderLookup, registry: Registry, clock: SimClock) -> None:
    tried(look_up, clock, 30.0)
    clock.sleep(2 * QUIET_S)
    registry.asked_at.clear()
    tried(look_up, clock, 0.5)
    assert len(registry.asked_at) >= 3


def test_threads_that_come_meanwhile_share_one_look_up() -> None:
    begun, go_on, asked = threading.Event(), threading.Event(), list[float]()

    def ask(timeout: float) -> list[Address]:
        asked.append(timeout)
        begun.set()
        go_on.wait(WITHIN_S)
        raise BrokerAwayError("no broker of the cluster is alive")

    look_up, heard = LeaderLookup(ask, OSClock(), OSRandom()), list[str]()

    def find() -> None:
        with pytest.raises(BrokerAwayError) as caught:
            look_up.find(WITHIN_S)
        heard.append(str(caught.value))

    threads = [threading.Thread(target=find) for _ in range(20)]
    threads[0].start()
    assert begun.wait(WITHIN_S)
    for thread in threads[1:]:
        thread.start()
    with pytest.raises(BrokerAwayError, match="another look-up is under way"):
        look_up.find(0.01)
    eventually(lambda: len(look_up._turn._waiting) == 19, "all wait for it")
    go_on.set()
    for thread in threads:
        thread.join(WITHIN_S)
    assert heard == ["no broker of the cluster is alive"] * 20
    assert len(asked) == 1
