"""The outbox: random histories of the relay that ships, on a modelled database and broker; each rule is needed."""

from __future__ import annotations

import pytest

from tools.outbox_model.mutations import broken
from tools.outbox_model.parts import Violation
from tools.outbox_model.world import MUTATIONS, World, campaign

HISTORIES, STEPS = 800, 350
HAPPENED = (
    "pages", "refused pages", "stopped", "adopted", "branches that waited", "units parked for a home",
    "with clone", "with restore_home",
    "with fail_over",
)  # fmt: skip
# The history of seed 1 that finds it; others are played when it finds nothing any more.
FIRST = {
    "adopt_no_settle": 1019, "adopt_sends": 39, "answer_repeated": 92, "chain_ignored": 3, "claim_not_compared": 3,
    "claim_not_forced": 15, "claim_overwritten": 2, "counted_ids": 0, "delete_up_to": 3, "floor": 3,
    "home_not_compared": 168, "no_claim": 0, "no_fence": 908, "no_idle_page": 1419, "no_relay_lock": 4,
    "operator_no_lock": 268, "outcome_alone": 133, "parked_key_passed": 5, "read_elsewhere": 82, "row_before_lock": 1,
    "row_parked_alone": 4309, "rows_read_again": 0, "stop_not_compared": 3, "topics_not_asked": 4472,
    "unit_completed": 2, "unit_cut": 0,
}  # fmt: skip
HARMLESS = {"refusal_not_fenced"}  # a page is sent once, by one relay: nothing of it is on its way when it was refused
THEN = range(3000)


def test_rows_are_messages_once_in_order_and_whole() -> None:
    happened, violation = campaign(HISTORIES, 2, STEPS, "")
    assert violation == ""
    assert all(happened[what] for what in HAPPENED), happened


def test_each_mutation_has_a_history_or_is_harmless() -> None:
    assert MUTATIONS.keys() == FIRST.keys() | HARMLESS


@pytest.mark.parametrize("mutation", FIRST)
def test_relay_without_a_rule_is_caught(mutation: str) -> None:
    for number in dict.fromkeys((FIRST[mutation], *THEN)):
        try:
            with broken(mutation):
                World(f"1/{number}", mutation).run(STEPS)
        except Violation as found:
            print(f"history {number}: {str(found)[:200]}")
            return
    raise AssertionError(f"{len(THEN)} histories found nothing")
