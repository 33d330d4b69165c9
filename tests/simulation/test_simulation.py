"""Fifty seeds in two processes; every situation is met by a seed; the same seed is the same history."""

from __future__ import annotations

from functools import cache

import pytest

from tools.simulation.__main__ import campaign, digest_elsewhere, report
from tools.simulation.run import Result, simulate
from tools.simulation.world import SITUATIONS
from txmq.client.consumer.offsets.offset_store import next_order

SEEDS = 50  # `make simulate` plays more
# What the fifty do not meet is looked for here, and further on if histories have moved.
RARE = (98, 325, 165, 265, 105, 145, 128, 137)


@cache
def _campaign() -> tuple[list[Result], frozenset[str]]:
    return campaign(1, SEEDS)


def test_promises_hold_over_fifty_seeds() -> None:
    failures, _met = _campaign()
    assert not failures, f"{len(failures)} failed, the first:\n{report(failures[0])}"


@pytest.mark.timeout(1800)  # alone it plays all of them
def test_every_situation_is_met_by_a_seed() -> None:
    missing = SITUATIONS - _campaign()[1]
    for seed in (*RARE, *range(SEEDS + 1, 1001)):
        if not missing:
            return
        result = simulate(seed)
        assert result.error is None, report(result)
        print(f"seed {seed} meets {sorted(missing & result.met)}")
        missing -= result.met
    raise AssertionError(f"never met: {sorted(missing)}")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_same_seed_same_history_whatever_the_hash_seed(seed: int) -> None:
    first = digest_elsewhere(seed, "1")
    assert len(first) == 64
    assert first == digest_elsewhere(seed, "2")


def test_history_does_not_depend_on_those_before() -> None:
    """A seed that fails in a campaign fails alone, too: no counter of the process is left where it was."""
    alone = simulate(33).digest
    for _ in range(100_000):  # its length is that of a request
        next_order()
    assert simulate(33).digest == alone
