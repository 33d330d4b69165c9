"""Services whose blocks use the outbox always: seeds, and mutations that are caught here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import pytest

from tests.simulation.caught import seed_that_catches
from tools.simulation.__main__ import World, campaign, digest_elsewhere, report
from tools.simulation.run import Result, simulate_always
from txmq.xa.database.outbox_series import OutboxRow
from txmq.xa.last_resource.enclosing import Enclosed
from txmq.xa.last_resource.turns import TurnDrainer

WORLD, SEEDS, MUTATED_SEEDS = World(is_always=True), 40, range(1, 41)
CUT_SEEDS = (333, 336, 181, 196)  # in which rows that leave too early are missed


@cache
def _campaign() -> tuple[list[Result], frozenset[str]]:
    return campaign(1, SEEDS, world=WORLD)


def test_promises_hold_where_messages_ride_in_commits() -> None:
    failures, met = _campaign()
    assert not failures, f"{len(failures)} failed, the first:\n{report(failures[0], WORLD)}"
    assert {"real messages rode in a commit", "a row was drained", "a process was stopped while it drained"} <= met


def test_history_of_outboxes_repeats() -> None:
    assert {digest_elsewhere(3, hash_seed, WORLD) for hash_seed in ("1", "2")} == {simulate_always(3).digest}


def test_row_that_leaves_before_its_answer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    submit: Callable[..., None] = TurnDrainer._submit

    def submit_and_forget(drainer: TurnDrainer, rows: Sequence[OutboxRow]) -> None:
        submit(drainer, rows)
        drainer._drained += rows

    monkeypatch.setattr(TurnDrainer, "_submit", submit_and_forget)
    # Lost where the process dies in between; elsewhere the drainer stops: a number has left that the broker lacks.
    seed_that_catches(simulate_always, "P3|P5", first=CUT_SEEDS, then=MUTATED_SEEDS)


def test_keys_that_do_not_wait_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    put: Callable[..., bool] = Enclosed.put

    def put_without_keys(enclosed: Enclosed, *words: Any) -> bool:
        nobody: Collection[Any] = ()
        return put(enclosed._replace(waiting=[one._replace(keys=nobody) for one in enclosed.waiting]), *words)

    monkeypatch.setattr(Enclosed, "put", put_without_keys)
    seed_that_catches(simulate_always, "P7", first=[8], then=MUTATED_SEEDS)
