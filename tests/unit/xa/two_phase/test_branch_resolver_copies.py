"""XA branches in a database and its copies: where a resolver ends them, and where a missing one proves anything."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.crash_points import at_moment, crash_at
from tests.logged import said
from tools.simulated.faults import lost
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa.fencing import DRAW_EVERY_S, StrangeServerError
from txmq.xa.resolver import Resolver

from ..xa_support import Database, FakeRecovery, FakeResource, Prepared, XAFixture

pytestmark = pytest.mark.usefixtures("notes")


@pytest.fixture
def world() -> XAFixture:
    return XAFixture("a")


def copied(database: Database, *, with_prepared: bool = True) -> Database:
    """A cloned volume; or a replica to which branches that are prepared do not come."""
    prepared = {
        xid: Prepared(branch.rows, branch.txid, None) for xid, branch in database.prepared.items() if with_prepared
    }
    return replace(
        database, rows=list(database.rows), markers=dict(database.markers), tokens=dict(database.tokens),
        prepared=prepared, unforced={}, sessions=set(), faults=defaultdict(type(database.faults["-"])), calls=[],
    )  # fmt: skip


def left(world: XAFixture, point: str, *, dies: bool = True) -> str:
    """A transaction whose owner has died at a point, or (not ``dies``) lost its databases there; its id."""
    known = set(world.home.states())
    with crash_at(point), pytest.raises(SimulatedCrash):
        world.transfer(b"x")
    world.die() if dies else world.end_sessions()
    (txid,) = {*world.home.states(), *(branch.txid for branch in world.databases[0].prepared.values())} - known
    return txid


def resolve(world: XAFixture, database: Database | None = None, rounds: int = 1) -> Exception | None:
    """A new resolver over a database; what kept its last round from the work."""
    resolver = Resolver(world.home, [FakeResource(database or world.databases[0])], world.home.clock)
    for _ in range(rounds):
        resolver.run_once()
    problems = [error for _, error in resolver.problems()]
    resolver.close()
    return problems[0] if problems else None


def copied_and_gone_on(world: XAFixture) -> Database:
    """A copy, after which somebody has drawn in the original."""
    resolve(world)
    copy = copied(world.databases[0])
    resolve(world)
    return copy


def test_copy_calls_no_branch_lost_and_says_so_once(world: XAFixture, caplog: pytest.LogCaptureFixture) -> None:
    copy = copied_and_gone_on(world)
    txid = left(world, "client.xa.all_committed")
    error = resolve(world, copy, rounds=3)
    assert isinstance(error, StrangeServerError)
    assert "txmq resolver adopt" in str(error)
    assert (world.home.states()[txid], world.home.heuristics(txid)) == ("decided", [])
    assert [line["event"] for line in said(caplog) if line["level"] == "error"] == ["branches left alone"]
    assert resolve(world) is None
    assert (world.home.states()[txid], world.home.heuristics(txid)) == ("committed", [])


@pytest.mark.parametrize("point", ["client.xa.all_prepared", "client.xa.decided"])
def test_nothing_is_ended_in_a_cloned_volume(world: XAFixture, point: str) -> None:
    """It has the branches, too: prepared in both, and committed in one for a broker that asks no more."""
    resolve(world)
    left(world, point, dies=False)  # nothing is due yet
    copy = copied(world.databases[0])
    resolve(world)
    world.home.owner_dies()
    before = dict(world.home.states())
    assert isinstance(resolve(world, copy), StrangeServerError)
    assert not {"xa commit", "xa rollback", "kill"} & set(copy.calls)
    assert world.home.states() == before
    resolve(world)
    world.check()


@pytest.mark.parametrize("point", ["client.xa.all_prepared", "client.xa.decided", "client.xa.all_committed"])
def test_clean_fail_over_goes_on_without_a_word(world: XAFixture, point: str) -> None:
    resolve(world)
    txid = left(world, point)
    replica = copied(world.databases[0])
    assert resolve(world, replica) is None
    assert world.home.heuristics(txid) == []
    assert replica.prepared == {}
    assert replica.rows == world.home.values("orders")


def test_branch_missing_in_the_replica_is_lost_there(world: XAFixture) -> None:
    """What goes on has neither the branch nor its rows: that is so, and is told."""
    resolve(world)
    txid = left(world, "client.xa.decided")
    replica = copied(world.databases[0], with_prepared=False)
    assert resolve(world, replica, rounds=2) is None
    assert [kind for kind, _ in world.home.heuristics(txid)] == ["rollback"]
    assert isinstance(resolve(world), StrangeServerError), "the old server commits nothing of it any more"
    assert world.databases[0].rows == []


def test_lost_branch_needs_a_token_after_the_look(world: XAFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between look and verdict the copy goes on, which has the branch."""
    resolve(world)
    txid, database = left(world, "client.xa.decided"), world.databases[0]
    copy, look = copied(database), FakeRecovery.marker_outcome
    database.prepared.clear()
    resolver = Resolver(world.home, [FakeResource(database)], world.home.clock)
    resolver.run_once()
    copy.tokens = dict(database.tokens)
    copy.faults["xa commit"].append("-")

    def looked(recovery: FakeRecovery, txid: str) -> str | None:
        found = look(recovery, txid)
        monkeypatch.undo()
        resolve(world, copy)
        return found

    monkeypatch.setattr(FakeRecovery, "marker_outcome", looked)
    resolver.run_once()
    assert (world.home.states()[txid], world.home.heuristics(txid)) == ("decided", [])
    resolver.close()
    assert resolve(world, copy) is None
    assert (world.home.states()[txid], world.home.heuristics(txid), copy.rows) == ("committed", [], [b"x"])


@pytest.mark.parametrize("is_executed", [False, True])
def test_lost_branch_needs_an_answer_to_its_token(world: XAFixture, *, is_executed: bool) -> None:
    resolver = Resolver(world.home, [FakeResource(world.databases[0])], world.home.clock)
    resolver.run_once()
    txid = left(world, "client.xa.decided")
    world.databases[0].prepared.clear()
    resolver.run_once()
    with at_moment("resolver.token_drawn", lambda: world.home.faults["token"].append(lost(is_executed=is_executed))):
        resolver.run_once()
    assert world.home.heuristics(txid) == []
    resolver.run_once()
    assert [kind for kind, _ in world.home.heuristics(txid)] == ["rollback"]
    resolver.close()


def test_verdict_is_not_drawn_for_on_another_connection(world: XAFixture) -> None:
    """The address leads to another server since the look: its token says nothing of what was seen before."""
    resolver = Resolver(world.home, [FakeResource(world.databases[0])], world.home.clock)
    resolver.run_once()
    first, second = left(world, "client.xa.decided"), left(world, "client.xa.decided")
    database = world.databases[0]
    database.prepared.clear()
    resolver.run_once()
    database.faults["marker"].extend(["", "-"])  # the second one's look fails, on which the connection is closed
    resolver.run_once()
    assert (world.home.heuristics(first), world.home.heuristics(second)) == ([], [])
    resolver.run_once()
    resolver.run_once()
    kinds = [[kind for kind, _ in world.home.heuristics(txid)] for txid in (first, second)]
    assert kinds == [["rollback"], ["rollback"]]
    resolver.close()


def test_whichever_resolves_first_goes_on(world: XAFixture) -> None:
    resolve(world)
    copy = copied(world.databases[0])
    assert resolve(world, copy) is None
    assert isinstance(resolve(world), StrangeServerError)
    assert resolve(world, copy) is None


def test_running_resolver_ends_nothing_once_another_goes_on(world: XAFixture) -> None:
    """Nor within the minute until its next token."""
    database = world.databases[0]
    resolver = Resolver(world.home, [FakeResource(database)], world.home.clock)
    resolver.run_once()
    resolve(world, copied(database))
    txid = left(world, "client.xa.decided")
    resolver.run_once()
    assert (world.home.states()[txid], database.rows) == ("decided", [])
    assert [type(error) for _, error in resolver.problems()] == [StrangeServerError]
    resolver.close()


def test_owner_is_told_nothing_by_a_copy(world: XAFixture) -> None:
    """Nothing of it is in doubt there, since nothing of it is there at all."""
    copy, told = copied_and_gone_on(world), list[str]()
    txid, resource = left(world, "client.xa.all_prepared"), FakeResource(world.databases[0])
    resource.database = copy
    resolver = Resolver(world.home, [resource], world.home.clock)
    resolver.branch_resolver(resource, txid).watch(txid, lambda: told.append(txid))
    resolver.run_once()
    assert told == []
    resource.database = world.databases[0]
    resolver.run_once()
    resolver.run_once()
    assert told == [txid]
    resolver.close()


def test_resolver_draws_every_minute_without_a_reason(world: XAFixture) -> None:
    database, drawn = world.databases[0], list[str]()
    resolver = Resolver(world.home, [FakeResource(database)], world.home.clock)
    for seconds in (0.0, DRAW_EVERY_S / 2, DRAW_EVERY_S / 2, DRAW_EVERY_S):
        world.home.clock.advance(seconds)
        resolver.run_once()
        drawn.append(world.home.tokens[database.uuid])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[1:])) == 3
    resolver.close()


def test_resolver_that_dies_after_it_drew_leaves_the_verdict(world: XAFixture) -> None:
    txid = left(world, "client.xa.decided")
    world.databases[0].prepared.clear()
    resolver = Resolver(world.home, [FakeResource(world.databases[0])], world.home.clock)
    resolver.run_once()
    with crash_at("resolver.token_drawn"), pytest.raises(SimulatedCrash):
        resolver.run_once()
    assert world.home.heuristics(txid) == []
    resolve(world, rounds=2)
    assert [kind for kind, _ in world.home.heuristics(txid)] == ["rollback"]
