"""A bucket holds its rate, whatever is taken from it, and whenever."""

from __future__ import annotations

import random

import pytest

from txmq.broker.shell.throttle import TokenBucket

BURST_S = 0.5


def test_burst_may_be_taken_at_once() -> None:
    bucket = TokenBucket(100, BURST_S)
    taken = 0
    while bucket.is_open(7.0):
        bucket.take(10, 7.0)
        taken += 10
    assert taken == 60  # half a second's worth, and what was taken last
    assert not bucket.is_open(7.09)
    assert bucket.is_open(7.11)


def test_what_is_larger_than_the_burst_closes_it_longer() -> None:
    bucket = TokenBucket(100, BURST_S)
    bucket.take(1000, 0.0)
    assert not bucket.is_open(9.4)
    assert bucket.is_open(9.6)
    bucket.take(-900, 9.6)
    assert bucket.is_open(9.6)


@pytest.mark.parametrize("seed", range(5))
def test_rate_is_held_over_any_time(seed: int) -> None:
    rng = random.Random(seed)
    bucket, now_s, taken = TokenBucket(1000, BURST_S), 100.0, 0
    while now_s < 160.0:
        now_s += rng.choice((0.0, 0.001, 0.05, 0.3))
        while bucket.is_open(now_s) and rng.random() < 0.95:
            amount = rng.randint(1, 300)
            bucket.take(amount, now_s)
            taken += amount
    assert 1000 * (now_s - 100.0) * 0.9 < taken <= 1000 * (now_s - 100.0 + BURST_S) + 300
