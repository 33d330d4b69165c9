"""Commits of branches whose answers are not taken yet: interrupts, and callers that wait and hurry their home."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import pytest

from tests.interrupts import Strike
from tests.unit.client.transaction.test_block_homes import A, B, block
from tools.simulated.broker import SimulatedBroker
from tools.simulated.clock import SimClock
from tools.simulated.cluster import SimulatedCluster
from txmq.client.transaction import homes
from txmq.client.transaction.homes import HomePart, PendingCommits
from txmq.client.transport.connection import Reply
from txmq.errors import ConnectionLostError, RequestTimeoutError, TxmqError
from txmq.protocol.transaction_bodies import PartResult
from txmq.runtime import threads

SLOT = ("orders", 1)
PLACED = b"orders 1 7 1\n"


class PatientHome:
    """Answers when so many commits have come.

    Attributes:
        commits: those that came.
        delayable: of these, those that said that no caller waits.
        loss: raised by the second.
    """

    def __init__(self, answers_after: int = 2, loss: TxmqError | None = None) -> None:
        self.commits, self.answers_after, self.loss = 0, answers_after, loss
        self.delayable = 0


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


class PatientPart(HomePart):
    """A part at such a home."""

    def __init__(self, home: PatientHome) -> None:
        broker = SimulatedBroker()
        super().__init__(broker, broker.clock, 30.0)
        self.patient, self.slots = home, {SLOT}

    def write_commit(self) -> Reply:
        self.patient.delayable += 1
        return self.submit_commit(0.0)

    def submit_commit(self, timeout_s: float) -> Reply:
        if self.patient.commits and self.patient.loss is not None:
            raise self.patient.loss
        self.patient.commits += 1
        return cast(Reply, PatientAnswer(self.patient))


@pytest.mark.parametrize(
    "take", [PendingCommits.look, lambda commits: commits.wait(SLOT, 60.0)], ids=["in passing", "waiting"]
)
def test_interrupt_anywhere_leaves_no_commit_untaken(take: Callable[[PendingCommits], None]) -> None:
    number, is_struck = 0, True
    while is_struck:
        number += 1
        cluster = SimulatedCluster()
        with block(cluster) as tx:
            tx.send("orders", b"1", key=A)
            tx.send("orders", b"2", key=B)
        commits = cluster.homes[1].pending_commits
        assert commits.holds(SLOT)
        strike = Strike(number, homes, threads)
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


def told(home: PatientHome) -> tuple[PendingCommits, HomePart]:
    """A part whose commit was written."""
    commits, part = PendingCommits(SimClock()), PatientPart(home)
    commits.add(part)
    return commits, part


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
