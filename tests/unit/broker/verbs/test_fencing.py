"""What a checkpoint has of a fence for one database."""

from __future__ import annotations

from tools.images.requests import UUID
from txmq.protocol.grants import Grant

from .access.verb_cases import World


def test_fence_stands_among_the_outcomes_of_a_checkpoint() -> None:
    world = World()
    world.allow(Grant("settle", "resource", UUID))
    fenced = world.shop.ask("outcome", world.others(1), extensions={"uuid": UUID, "fence": None})
    assert fenced.text == "rolled-back\n"
    (row,) = [row for row in world.made.state.snapshot()["sessions"] if row[0] == 2]
    ((counter, outcome),) = row[6]
    assert (counter, outcome) == (1, f"fenced {UUID}")
