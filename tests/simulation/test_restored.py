"""A broker that is restored from a copy, under services with a database: seeds, and mutations that are caught here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.simulation.caught import seed_that_catches
from tools.simulation.__main__ import World, campaign, digest_elsewhere, report
from tools.simulation.restored import SITUATIONS_OF_RESTORES, simulate_restored
from tools.simulation.run import Result
from txmq.broker.core import Core

WORLD, SEEDS, MUTATED_SEEDS = World(is_restored=True), 40, range(1, 41)
MISSED_MAX = 2  # of so few seeds; ``python -m tools.simulation --restored --seeds 500`` must meet all


@cache
def _campaign() -> tuple[list[Result], frozenset[str]]:
    return campaign(1, SEEDS, world=WORLD)


def test_nothing_but_what_the_broker_had_is_lost() -> None:
    failures, _met = _campaign()
    assert not failures, f"{len(failures)} failed, the first:\n{report(failures[0], WORLD)}"


def test_most_situations_of_restores_were_met() -> None:
    _failures, met = _campaign()
    assert len(SITUATIONS_OF_RESTORES - met) <= MISSED_MAX, f"never met: {sorted(SITUATIONS_OF_RESTORES - met)}"


def test_history_of_a_restore_repeats() -> None:
    assert {digest_elsewhere(3, hash_seed, WORLD) for hash_seed in ("1", "2")} == {simulate_restored(3).digest}


def test_session_numbers_that_come_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Callable[..., None] = Core.__init__

    def begin_with_one(core: Core, *words: Any, **named: Any) -> None:
        begin(core, *words, **named)
        core.context.sessions_from = 1

    monkeypatch.setattr(Core, "__init__", begin_with_one)
    seed_that_catches(simulate_restored, "was never sent", first=[4], then=MUTATED_SEEDS)
