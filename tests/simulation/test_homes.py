"""Several homes that share a registry: seeds in two processes, mutations caught, the same seed the same history."""

from __future__ import annotations

import gc
from functools import cache

import pytest

from tests.simulation.caught import seed_that_catches
from tools.simulation.__main__ import World, campaign, digest_elsewhere, report
from tools.simulation.homes.run import HOMES, SITUATIONS_OF_HOMES, simulate_homes
from tools.simulation.run import Result
from txmq.client.client import Client
from txmq.registry.cluster_metadata import Leadership
from txmq.registry.zookeeper.home_leadership import HomeNodes

SEEDS, MUTATED_SEEDS = 12, range(1, 13)
CHEAP = 11  # its history takes a third of the others' processor time
WORLD = World(HOMES)
MISSED_MAX = 3  # of so few seeds; ``python -m tools.simulation --homes 3 --seeds 500`` must meet all


@cache
def _campaign() -> tuple[list[Result], frozenset[str]]:
    return campaign(1, SEEDS, world=WORLD)


def test_promises_hold_over_the_seeds() -> None:
    failures, _met = _campaign()
    assert not failures, f"{len(failures)} failed, the first:\n{report(failures[0], WORLD)}"


def test_most_situations_were_met_by_one_of_the_seeds() -> None:
    _failures, met = _campaign()
    assert len(SITUATIONS_OF_HOMES - met) <= MISSED_MAX, f"never met: {sorted(SITUATIONS_OF_HOMES - met)}"


def test_histories_do_not_depend_on_the_hash_seed() -> None:
    assert {digest_elsewhere(CHEAP, hash_seed, WORLD) for hash_seed in ("1", "2")} == {simulate_homes(CHEAP).digest}


def test_leader_that_is_announced_only_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    announce, announced = HomeNodes.announce, set[HomeNodes]()

    def once(registry: HomeNodes, leadership: Leadership) -> None:
        if registry not in announced:
            announce(registry, leadership)
            announced.add(registry)

    monkeypatch.setattr(HomeNodes, "announce", once)
    seed_that_catches(simulate_homes, ".", first=[3], then=MUTATED_SEEDS)


def test_topic_map_that_is_not_taken_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.broker.verbs.registry_events.take_over", lambda *_: None)
    seed_that_catches(simulate_homes, ".", first=[1], then=MUTATED_SEEDS)


def test_clients_of_a_history_are_freed_with_it() -> None:
    before = _clients()  # mutated histories end in the middle, and keep some
    simulate_homes(4)
    gc.collect()
    gc.collect()  # what compiled objects kept
    assert not [client for client in _clients() if not any(client is known for known in before)]


def _clients() -> list[Client]:
    return [client for client in gc.get_objects() if type(client) is Client]
