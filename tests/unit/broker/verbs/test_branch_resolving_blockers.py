"""A commit that must wait for open branches before it: the homes that decide about them are asked at once."""

from __future__ import annotations

import pytest

from tools.images.homes import Cluster, HomeNode
from tools.images.node import Client
from tools.images.requests import batch, part
from txmq.broker.cluster.branch_asks import HURRY_PAUSE_MS
from txmq.broker.state.commit_order import LOOKED_AT_MAX

from ..homes_support import commit, open_query, prepare_branch, two_homes
from ..support import values

QUERY = 7  # the key under which all branches of a query are prepared


class Sink:
    """A query whose batches are decided at ``here``, and whose messages are all at ``there``."""

    def __init__(self) -> None:
        self.here, self.there = two_homes()
        self.cluster = Cluster(self.here, self.there)
        self.driver, self.worker = self.here.session(), self.there.session()
        self._counter = 0
        open_query(self.here, self.driver)

    def chunk(self, number: int, attempt: int, value: bytes) -> str:
        """Prepare a chunk at both homes; its id at the deciding one."""
        self._counter += 1
        here, there = self.here.txid(1, self._counter), self.there.txid(1, self._counter)
        assert prepare_branch(self.worker, there, here, ("a", 0, value), keys=QUERY).code == 200
        words: dict[str, str | int] = {
            "query": "q",
            "epoch": 1,
            "batch": number,
            "task": 0,
            "attempt": attempt,
            "homes": there,
        }
        assert self.driver.ask("prepare", here, "spark", extensions=words, body=b"").code == 200
        return here

    def decide(self, number: int, *winners: str) -> None:
        """The driver commits a batch."""
        body = "".join(f"{txid}\n" for txid in winners).encode()
        assert self.driver.ask("query", "commit", "q", extensions={"epoch": 1, "batch": number}, body=body).code == 200

    def shown_after(self, count: int) -> float:
        """Seconds until so many messages are there."""
        seconds = 0.0
        while len(values(self.there)) < count:
            self.cluster.later(0.25)
            seconds += 0.25
            assert seconds < 60
        return seconds


@pytest.mark.parametrize("open_for", [0.0, 3.25, 8.0])
@pytest.mark.parametrize("has_loser", [False, True])
def test_batches_of_a_query_are_placed_in_order_and_soon(open_for: float, *, has_loser: bool) -> None:
    sink = Sink()
    if has_loser:
        sink.chunk(0, 1, b"loser")
    first = [sink.chunk(0, 2, b"first %d" % number) for number in range(2)]
    sink.cluster.later(open_for)  # the looks at these branches come less and less often
    sink.decide(0, *first)
    second = sink.chunk(1, 3, b"second")
    sink.decide(1, second)
    assert sink.shown_after(3) < 2
    assert values(sink.there) == [b"first 0", b"first 1", b"second"]


def test_commit_of_a_winner_settles_the_losers_before_it() -> None:
    sink = Sink()
    for attempt in range(3):
        sink.chunk(0, attempt, b"loser")
    winner = sink.chunk(0, 9, b"winner")
    sink.cluster.later(8.0)
    sink.decide(0, winner)
    sink.worker.send("commit", sink.there.txid(1, 4), body=b"")
    sink.cluster.pump()
    assert values(sink.there) == [b"winner"]
    sink.cluster.later(0.25)
    assert not sink.there.state.unsettled


def halves() -> tuple[Cluster, HomeNode, HomeNode, Client]:
    """A half message with a branch at ``there``, open for so long that its look comes seldom."""
    here, there = two_homes()
    cluster, owner = Cluster(here, there), here.session()
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"half"))
    owner.ask(
        "prepare", here.txid(1, 1), "half", extensions={"group": "g", "homes": there.txid(1, 1)},
        body=part("a", 0, batch(b"h")),
    )  # fmt: skip
    cluster.later(8.0)
    return cluster, here, there, owner


def asked(there: HomeNode) -> list[str]:
    """What ``there`` asks now."""
    there.pump()
    return [ask.txid for ask in there.core.take_branch_asks()]


def test_decision_that_awaits_its_place_has_the_half_looked_at() -> None:
    cluster, here, there, owner = halves()
    owner.ask("commit", here.txid(1, 1), body=b"")
    assert commit(there.session("1.0"), there.txid(1, 2), ("a", 0, b"behind")).text == "a 0 - 1\n"
    cluster.pump()
    assert values(there) == [b"half", b"behind"]


def test_half_that_stays_open_has_its_own_looks() -> None:
    cluster, here, there, owner = halves()
    client = there.session("1.0")
    for counter in range(2, 40):  # each has it looked at, or not, and none adds to the looks that come anyway
        commit(client, there.txid(1, counter), ("a", 0, b"behind"))
        cluster.later(0.25)
    cluster.later(70)
    looks = 0
    for _ in range(240):  # a minute
        there.clock.advance(0.25)
        there.core.tick(there.clock.now_ms())
        for ask in there.core.take_branch_asks():
            looks += 1
            there.core.branch_answered(ask, 200, b"prepared\n")
    assert looks == 2
    owner.ask("commit", here.txid(1, 1), body=b"")
    cluster.later(31)
    assert values(there)[0] == b"half"


def test_many_commits_behind_one_branch_ask_seldom() -> None:
    _cluster, here, there, _owner = halves()
    client = there.session("1.0")
    commit(client, there.txid(1, 2), ("a", 0, b"behind"))
    assert asked(there) == [here.txid(1, 1)]
    for counter in range(3, 20):
        commit(client, there.txid(1, counter), ("a", 0, b"behind"))
    assert asked(there) == []


def test_look_that_came_too_soon_is_made_up_for() -> None:
    cluster, here, there, owner = halves()
    client = there.session("1.0")
    commit(client, there.txid(1, 2), ("a", 0, b"behind"))
    cluster.pump()  # still open
    owner.ask("commit", here.txid(1, 1), body=b"")
    commit(client, there.txid(1, 3), ("a", 0, b"last"))
    cluster.pump()
    assert values(there) == []
    cluster.later(HURRY_PAUSE_MS / 1000)
    assert values(there) == [b"half", b"behind", b"last"]


def test_own_look_that_falls_due_meanwhile_is_not_lost() -> None:
    cluster, here, there, owner = halves()
    commit(there.session("1.0"), there.txid(1, 2), ("a", 0, b"behind"))
    (ask,) = there.core.take_branch_asks()
    for _ in range(130):  # the own look comes in this time
        there.clock.advance(0.25)
        there.core.tick(there.clock.now_ms())
    there.core.branch_answered(ask, 200, b"prepared\n")
    owner.ask("commit", here.txid(1, 1), body=b"")
    cluster.later(31)
    assert values(there) == [b"half", b"behind"]


def test_only_so_many_before_it_are_looked_at() -> None:
    here, there = two_homes()
    client = there.session()
    count = LOOKED_AT_MAX + 5
    for counter in range(1, count + 1):
        prepare_branch(client, there.txid(1, counter), here.txid(1, counter), ("a", 0, b"v"))
    client.send("commit", there.txid(1, count), body=b"")
    assert asked(there) == [here.txid(1, counter) for counter in range(1, LOOKED_AT_MAX + 1)]
