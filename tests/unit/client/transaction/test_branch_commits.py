"""Commits of branches whose answers are not taken yet: interrupts, and callers that wait and hurry their home."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import pytest

from tests.interrupts import Strike
from tests.unit.client.transaction.test_block_homes import A, B, block
from txmq.client.transaction import branch_commits
from txmq.client.transaction.branch_commits import BranchCommits, Committed
from txmq.client.transaction.broker_side import BrokerTransaction
from txmq.errors import ConnectionLostError, RequestTimeoutError, TxmqError
from txmq.protocol.parts import PartResult
from txmq.runtime import threads
from txmq.testing.simulated.clock import SimClock
from txmq.testing.simulated.cluster import SimulatedCluster
from txmq.xa.broker_port import Answer

SLOT = ("orders", 1)
PLACED = b"orders 1 7 1\n"


class PatientHome:
    """Answers when so many commits have come.

    Attributes:
        commits: those that came.
        delayable: of these, those that said that no caller waits.
        loss: raised by the second.
    """

    txid = "1-2-3-4"

    def __init__(self, answers_after: int = 2, loss: TxmqError | None = None) -> None:
        self.commits, self.answers_after, self.loss = 0, answers_after, loss
        self.delayable = 0

    def write_commit(self) -> Answer:
        self.delayable += 1
        return self.submit_commit(0.0)

    def submit_commit(self, _timeout_s: float) -> Answer:
        if self.commits and self.loss is not None:
            raise self.loss
        self.commits += 1
        return cast(Answer, PatientAnswer(self))


class PatientAnswer:
    def __init__(self, home: PatientHome) -> None:
        self.home = home

    @property
    def done(self) -> bool:
        return self.home.commits >= self.home.answers_after

    def look(self) -> None:
        pass

    def result(self, _timeout: float | None = None) -> bytes:
        if not self.done:
            raise RequestTimeoutError("still waiting for company")
        return PLACED


class Branch:
    uuid = ""

    def __init__(self, home: PatientHome) -> None:
        self.broker, self.slots = cast(BrokerTransaction, home), {SLOT}
        self.lines: list[PartResult] | None = None

    def told(self, lines: list[PartResult], error: TxmqError | None = None) -> None:
        self.lines = lines


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
        commits = cluster.homes[1].branch_commits
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


def told(home: PatientHome) -> tuple[BranchCommits, Branch]:
    """A branch whose commit was written."""
    commits, branch = BranchCommits(SimClock()), Branch(home)
    commits.add(cast(Committed, branch))
    return commits, branch


def test_wait_sends_what_is_not_answered_once_more() -> None:
    home = PatientHome()
    commits, branch = told(home)
    commits.look()
    assert home.commits == 1  # in passing nothing is hurried
    commits.wait(SLOT, 1.0)
    assert (home.commits, home.delayable, branch.lines) == (2, 1, [PartResult(*SLOT, 7, 1)])
    assert not commits


def test_waits_that_come_again_send_nothing_more() -> None:
    home = PatientHome(answers_after=99)
    commits, _ = told(home)
    for _ in range(3):
        with pytest.raises(RequestTimeoutError):
            commits.wait(SLOT, 1.0)
    assert home.commits == 2


def test_home_that_is_lost_meanwhile_is_waited_for() -> None:
    home = PatientHome(loss=ConnectionLostError("lost"))
    commits, branch = told(home)
    with pytest.raises(RequestTimeoutError):
        commits.wait(SLOT, 1.0)
    assert (commits.holds(SLOT), branch.lines) == (True, None)


def test_commit_sent_by_waiting_caller_is_not_hurried() -> None:
    home = PatientHome(answers_after=99)
    commits, _ = told(home)
    (entry,) = commits._open
    entry.answer = None  # lost
    for _ in range(2):
        with pytest.raises(RequestTimeoutError):
            commits.wait(SLOT, 1.0)
    assert (home.commits, home.delayable) == (2, 1)
