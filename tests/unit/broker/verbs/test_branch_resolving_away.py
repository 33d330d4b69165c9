"""A home that was away, however long, is asked about all branches soon after it is back; meanwhile it is hardly tried.

Virtual time: what stands here is the worst case of the design, on a machine that keeps no thread waiting.
"""

from __future__ import annotations

import pytest

from tools.images.homes import Cluster, HomeNode
from tools.images.requests import batch, part
from txmq.broker.cluster.branch_asks import AWAY_MS, PREPARED_PAUSE_MS_MAX

from ..homes_support import commit, prepare_branch, two_homes
from ..support import values
from .test_branch_resolving import is_quiet

away_for = pytest.mark.parametrize("seconds", [0.5, 1.75, 3, 6, 17, 120])


def cut_off(seconds: float) -> tuple[Cluster, HomeNode, HomeNode]:
    """A branch is prepared and the transaction decided; then the home that decided was away for so long."""
    here, there = two_homes()
    cluster = Cluster(here, there)
    cluster.come_back(here)
    owner = here.session()
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    cluster.later(1.5)
    commit(owner, here.txid(1, 1), homes=there.txid(1, 1))
    cluster.cut_off(here)
    cluster.later(seconds)
    assert values(there) == []
    return cluster, here, there


@away_for
def test_home_that_starts_again_decides_at_once(seconds: float) -> None:
    """Found: up to 4 s later."""
    cluster, here, there = cut_off(seconds)
    cluster.come_back(cluster.restart(here))
    cluster.later(0.5)
    assert (values(there), is_quiet(there)) == ([b"x"], True)


@away_for
def test_home_behind_a_cut_network_decides_in_a_second(seconds: float) -> None:
    """Found: up to 4 s later. No registry tells of it."""
    cluster, here, there = cut_off(seconds)
    cluster.away.clear()
    cluster.later(AWAY_MS.most / 1000 + 0.25)  # and a tick for the report
    assert (values(there), is_quiet(here, there)) == ([b"x"], True)


def test_branch_home_that_starts_again_asks_at_once() -> None:
    here, there = two_homes()
    cluster = Cluster(here, there)
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), homes=there.txid(1, 1))
    again = cluster.restart(there)
    cluster.come_back(again)
    cluster.later(0.5)
    assert (values(again), is_quiet(here, again)) == ([b"x"], True)


def undecided_half() -> tuple[Cluster, HomeNode, HomeNode]:
    """A half message with a branch; undecided for so long that its branch is looked at every 30 s."""
    here, there = two_homes()
    cluster = Cluster(here, there)
    owner, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    prepare_branch(there.session(), txid, of, ("a", 0, b"x"))
    body = part("a", 0, batch(b"y"), "7")
    assert owner.ask("prepare", of, "half", extensions={"group": "g", "homes": txid}, body=body).code == 200
    cluster.later(40)
    return cluster, here, there


def test_decision_before_a_death_is_heard_of_at_once() -> None:
    """Found: pauses of a branch that was undecided for long went on to 30 s."""
    cluster, here, there = undecided_half()
    commit(here.connect(), here.txid(1, 1))
    cluster.cut_off(here)
    cluster.later(1)
    cluster.come_back(cluster.restart(here))
    cluster.later(0.25)
    assert values(there) == [b"x"]


@pytest.mark.parametrize(("verb", "left"), [("commit", [b"x"]), ("rollback", [])])
def test_decision_of_a_checker_is_heard_of_in_seconds(verb: str, left: list[bytes]) -> None:
    """Found: up to 30 s later. The checker tells the home that decides, and no other one."""
    cluster, here, there = undecided_half()
    checker = here.connect()
    assert checker.ask(verb, here.txid(1, 1), body=b"" if verb == "commit" else None).code == 200
    cluster.later(1.75)
    assert (values(there), is_quiet(here, there)) == (left, True)


def asked_for(home: HomeNode) -> list[str]:
    """What it asks a second later of a home that cannot be reached."""
    home.clock.advance(1)
    home.core.tick(home.clock.now_ms())
    home.pump()
    asks = home.core.take_branch_asks()
    for ask in asks:
        home.core.home_lost(ask.home)
    return [ask.verb for ask in asks]


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_lost_home_is_not_reminded_for_ever(verb: str) -> None:
    """Found: the reminder of a rollback was tried once a second until the restart."""
    cluster, here, there = undecided_half()
    cluster.cut_off(there)
    here.connect().ask(verb, here.txid(1, 1), body=b"" if verb == "commit" else None)
    assert [asked_for(here) for _ in range(4)][1:] == [["outcome"]] * 3  # it may be back, and not look for 30 s
    cluster.later(30)
    assert [asked_for(here) for _ in range(4)] == [[]] * 4


def test_home_that_reports_by_itself_is_not_reminded() -> None:
    cluster, here, there = undecided_half()
    before = cluster.asked
    commit(here.connect(), here.txid(1, 1))
    commit(there.connect(), there.txid(1, 1))
    cluster.later(3)
    assert (cluster.asked - before, is_quiet(here, there)) == (1, True)


def test_living_owner_is_asked_about_every_two_seconds() -> None:
    """Found: an owner that died after a long wait was noticed up to 30 s later."""
    here, there = two_homes()
    cluster = Cluster(here, there)
    owner = here.session()
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    cluster.later(20)
    assert not is_quiet(there)
    owner.disconnect()
    cluster.later(3.25)  # one pause, and the second for which it must be gone
    assert (values(there), is_quiet(there)) == ([], True)


def test_home_that_is_away_is_tried_once_a_second() -> None:
    here, there = two_homes()
    cluster = Cluster(here, there)
    client = there.session()
    for counter in range(1, 101):
        prepare_branch(client, there.txid(1, counter), here.txid(1, counter), ("a", 0, b"x"), keys=counter)
    cluster.away.add(here.identity.node)
    cluster.later(10)
    before = cluster.asked
    cluster.later(600)
    assert 590 <= cluster.asked - before <= 600


def test_undecided_half_messages_are_asked_about_twice_a_minute() -> None:
    here, there = two_homes()
    cluster = Cluster(here, there)
    owner, client = here.session(), there.session()
    for counter in range(1, 11):
        of, txid = here.txid(1, counter), there.txid(1, counter)
        prepare_branch(client, txid, of, ("a", 0, b"x"), keys=counter)
        body = part("a", 0, batch(b"y"), "7")
        assert owner.ask("prepare", of, "half", extensions={"group": "g", "homes": txid}, body=body).code == 200
    cluster.later(60)
    before = cluster.asked
    cluster.later(600)
    assert cluster.asked - before <= 10 * 600_000 / PREPARED_PAUSE_MS_MAX
