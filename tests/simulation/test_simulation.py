"""500 seeds in two processes; every situation must have been met by one of them; the same seed is the same history."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import campaign, digest_elsewhere, report
from tests.simulation.world import SITUATIONS


def test_promises_hold_over_500_seeds() -> None:
    failures, met = campaign(1, 500)
    assert not failures, f"{len(failures)} failed, the first:\n{report(failures[0])}"
    assert not SITUATIONS - met, f"never met: {sorted(SITUATIONS - met)}"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_same_seed_same_history_whatever_the_hash_seed(seed: int) -> None:
    first = digest_elsewhere(seed, "1")
    assert len(first) == 64
    assert first == digest_elsewhere(seed, "2")
