"""Pauses that double up to a bound."""

from __future__ import annotations

from txmq.runtime.backoff import Backoff


def test_pause_doubles_from_the_first_to_the_most() -> None:
    assert [Backoff(250, 1000).after(failures) for failures in range(5)] == [250, 500, 1000, 1000, 1000]
    assert Backoff(0.5, 3.0).after(10_000) == 3.0


def test_pause_follows_the_one_before() -> None:
    backoff, pause, pauses = Backoff(0.02, 0.1), 0.0, []
    for _ in range(5):
        pause = backoff.following(pause)
        pauses.append(pause)
    assert pauses == [0.02, 0.04, 0.08, 0.1, 0.1]
