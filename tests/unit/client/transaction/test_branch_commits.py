"""Commits of branches whose answers are not taken yet, and a KeyboardInterrupt anywhere in the taking."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.interrupts import Strike
from tests.unit.client.transaction.test_block_homes import A, B, block
from txmq.client.transaction import branch_commits
from txmq.client.transaction.branch_commits import BranchCommits, branch_commits_of
from txmq.runtime import threads
from txmq.testing.simulated.cluster import SimulatedCluster

SLOT = ("orders", 1)


@pytest.mark.parametrize(
    "take", [BranchCommits.look, lambda commits: commits.wait(SLOT, 60.0)], ids=["in passing", "waiting"]
)
def test_interrupt_anywhere_leaves_no_commit_untaken(take: Callable[[BranchCommits], None]) -> None:
    number, is_struck = 0, True
    while is_struck:
        number += 1
        cluster = SimulatedCluster()
        with block(cluster) as tx:
            tx.send("orders", b"1", key=A)
            tx.send("orders", b"2", key=B)
        commits = branch_commits_of(cluster.homes[1])
        assert commits.holds(SLOT)
        strike = Strike(number, branch_commits, threads)
        sys.setprofile(strike)
        try:
            with suppress(KeyboardInterrupt):
                take(commits)
        finally:
            sys.setprofile(None)
        is_struck = strike.left <= 0
        commits.wait(SLOT, cluster.clock.monotonic() + 60.0)
        assert not commits, f"struck at {number}"
        assert cluster.homes[1].session.finished_through == 1, f"struck at {number}"
        assert [result.offset for result in tx.results] == [0, 0]
    assert number > 5
