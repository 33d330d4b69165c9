"""When a home is asked about a branch: bounded, one at a time a branch, and no home keeps another one waiting."""

from __future__ import annotations

import pytest

from txmq.broker.cluster.branch_asks import (
    ASKED_MAX,
    AWAY_MS,
    PREPARED_PAUSE_MS_MAX,
    BranchAsks,
    Look,
)

ONE, TWO = (f"{0xC1:016x}-{home:016x}-1-1" for home in (1, 2))


def asks() -> tuple[BranchAsks, set[tuple[int, int]]]:
    """And the names of what is settled."""
    settled: set[tuple[int, int]] = set()
    return BranchAsks(lambda look: look.name in settled), settled


def names(queue: BranchAsks, now_ms: int = 0) -> list[tuple[int, int]]:
    return [look.name for _, look in queue.take(now_ms)]


def test_branch_is_asked_about_once_at_a_time() -> None:
    queue, _ = asks()
    queue.now(Look((1, 1), ONE))
    queue.now(Look((1, 1), ONE))
    ((number, look),) = queue.take(0)
    queue.now(look)
    assert names(queue) == []
    assert queue.answered(number) == look
    assert queue.answered(number) is None
    queue.now(look)
    assert names(queue) == [(1, 1)]


def test_home_has_so_many_asks_and_keeps_none_from_another() -> None:
    queue, _ = asks()
    for counter in range(ASKED_MAX + 5):
        queue.now(Look((1, counter), ONE))
    queue.now(Look((2, 1), TWO))
    taken = list(queue.take(0))
    assert (len(taken), taken[-1][1].name) == (ASKED_MAX + 1, (2, 1))
    queue.tick(1)
    assert (queue.has_ready, names(queue, 1)) == (True, [])
    queue.answered(taken[0][0])
    assert (queue.has_ready, names(queue, 1)) == (True, [(1, ASKED_MAX)])


def test_lost_home_is_tried_with_one_ask_after_a_while() -> None:
    queue, settled = asks()
    for counter in (1, 2, 3):
        queue.now(Look((1, counter), ONE))
    first = dict(queue.take(0))
    settled.add((1, 2))
    queue.now(Look((1, 4), ONE))
    now_ms, pauses = 0, []
    for attempt in range(12):
        assert queue.lost(1, now_ms) is (attempt == 0)
        began_ms = now_ms
        while not (again := dict(queue.take(now_ms))):
            now_ms += 1
        pauses.append(now_ms - began_ms)
        assert [look.name for look in again.values()] == [(1, 1)]
        assert names(queue, now_ms) == []
    assert pauses == sorted(pauses)
    assert (pauses[0] < 500, pauses[-1]) == (True, AWAY_MS.most)
    assert [queue.answered(number) for number in first] == [None] * 3
    queue.reached(1)
    assert (queue.has_ready, names(queue, now_ms)) == (True, [(1, 3), (1, 4)])
    assert queue.lost(1, now_ms)
    assert queue.lost(1, now_ms) is False
    assert names(queue, now_ms) == []
    queue.led_anew(1)
    assert (queue.has_ready, len(names(queue, now_ms))) == (True, 1)


@pytest.mark.parametrize(
    ("stated", "longest"),
    [({}, [2000] * 4), ({"pause_ms_max": PREPARED_PAUSE_MS_MAX}, [4000, 8000, 16_000, PREPARED_PAUSE_MS_MAX])],
)
def test_looks_come_later_and_less_often(stated: dict[str, int], longest: list[int]) -> None:
    queue, settled = asks()
    queue.at(1000, Look((1, 1), ONE))
    now_ms, pauses = 0, []
    for _ in range(7):
        began_ms = now_ms
        while not (taken := list(queue.take(now_ms))):
            now_ms += 250
            queue.tick(now_ms)
        pauses.append(now_ms - began_ms)
        ((number, _),) = taken
        look = queue.answered(number)
        assert isinstance(look, Look)
        queue.again(look, now_ms, **stated)
    assert pauses == [1000, 1000, 2000, *longest]
    settled.add((1, 1))
    queue.tick(now_ms + PREPARED_PAUSE_MS_MAX)
    assert names(queue, now_ms + PREPARED_PAUSE_MS_MAX) == []
