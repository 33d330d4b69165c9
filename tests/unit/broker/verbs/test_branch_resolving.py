"""Branches whose home dies in the middle of placing them; and an answer that is under way while time passes."""

from __future__ import annotations

import pytest

from tools.images.homes import Cluster
from tools.images.requests import batch, part

from ..homes_support import commit, prepare_branch, two_homes
from ..support import values


@pytest.mark.parametrize("with_checkpoint", [False, True])
@pytest.mark.parametrize("steps", range(1, 9))
def test_branch_home_dies_at_any_step_of_placing_and_reporting(steps: int, with_checkpoint: bool) -> None:
    here, there = two_homes()
    cluster = Cluster(here, there)
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), homes=there.txid(1, 1))
    there.connect().send("commit", there.txid(1, 1), body=b"")
    there.run_steps(steps)
    cluster.restart(there, checkpoint=with_checkpoint)
    cluster.later(2)
    here, there = cluster.homes.values()
    owed = [session.owed for home in (here, there) for session in home.state.sessions.values()]
    assert (values(there), here.state.unsettled, there.state.unsettled, owed) == ([b"x"], 0, 0, [0, 0])


def test_own_look_that_falls_due_meanwhile_is_not_lost() -> None:
    here, there = two_homes()
    cluster, owner, client = Cluster(here, there), here.session(), there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"half"))
    words = {"group": "g", "homes": there.txid(1, 1)}
    owner.ask("prepare", here.txid(1, 1), "half", extensions=words, body=part("a", 0, batch(b"h")))
    cluster.later(8.0)
    commit(client, there.txid(1, 2), ("a", 0, b"behind"))
    (ask,) = there.core.take_branch_asks()
    for _ in range(130):  # the own look comes in this time
        there.clock.advance(0.25)
        there.core.tick(there.clock.now_ms())
    there.core.branch_answered(ask, 200, b"prepared\n")
    owner.ask("commit", here.txid(1, 1), body=b"")
    cluster.later(31)
    assert values(there) == [b"half", b"behind"]
