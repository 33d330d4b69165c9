"""A replica beside a broker that lives under faults: seeds, and what is caught here."""

from __future__ import annotations

from functools import cache
from typing import cast

import pytest

from tests.simulation.caught import seed_that_catches
from tools.images.replica import Replica
from tools.simulation.__main__ import World, campaign, digest_elsewhere, report
from tools.simulation.replica import SITUATIONS_OF_REPLICAS
from tools.simulation.run import Result, simulate_followed
from txmq.redo.journal import Journal

WORLD, SEEDS, MUTATED_SEEDS = World(is_followed=True), 8, range(1, 41)
MISSED_MAX = 2  # of so few seeds; ``python -m tools.simulation --replica --seeds 500`` must meet all


@cache
def _campaign() -> tuple[list[Result], frozenset[str]]:
    return campaign(1, SEEDS, world=WORLD)


def test_replica_comes_to_what_its_leader_has() -> None:
    failures, _met = _campaign()
    assert not failures, f"{len(failures)} failed, the first:\n{report(failures[0], WORLD)}"


def test_most_situations_of_replicas_were_met() -> None:
    _failures, met = _campaign()
    assert len(SITUATIONS_OF_REPLICAS - met) <= MISSED_MAX, f"never met: {sorted(SITUATIONS_OF_REPLICAS - met)}"


def test_history_of_a_replica_repeats() -> None:
    assert {digest_elsewhere(3, hash_seed, WORLD) for hash_seed in ("1", "2")} == {simulate_followed(3).digest}


def test_leader_that_sends_what_is_not_forced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "sent_below", staticmethod(lambda journal: cast("Journal", journal).next_lsn))
    seed_that_catches(simulate_followed, "the leader has lost what its replica has", first=[14], then=MUTATED_SEEDS)
