"""The resolver of XA branches: what it finishes, what it waits for, what it never touches, and what it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.crash_points import at_moment, at_point, crash_at
from tests.logged import said
from tools.simulated.connection import Sent
from tools.simulated.faults import Fault, Reply, WatchedReply, lost
from txmq.client.transaction import block as module
from txmq.errors import (
    ClosedError,
    FencedError,
    NotOwnerError,
    OutcomeUnknownError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    UnavailableError,
)
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa.resolver import Resolver
from txmq.xa.two_phase import branch_resolver as xa_resolver
from txmq.xa.two_phase.branch_resolver import BranchResolver
from txmq.xa.two_phase.resource_ports import Bqual, encode_bqual
from txmq.xid import FORMAT_ID, TxId, Xid

from ..xa_support import DriverError, FakeResource, Notes, Prepared, XAFixture, external_branch

pytestmark = pytest.mark.usefixtures("notes")
TXID = "00000000000000c1-00000000000000a1-7-1"
POINTS = ["resolver.xa.committed", "resolver.xa.completed", "resolver.xa.fenced", "resolver.xa.rolled_back"]


@pytest.fixture
def world() -> XAFixture:
    return XAFixture("ab")


def abandon(world: XAFixture, point: str, value: bytes = b"x", *, dies: bool = True) -> str:
    """A transaction whose owner stopped at a point, for good or (not ``dies``) with its sessions alive; its id."""
    known = {xid for database in world.databases for xid in database.prepared}
    with crash_at(point), pytest.raises(SimulatedCrash):
        world.transfer(value)
    if dies:
        world.die()
    (gtrid,) = {xid.gtrid for database in world.databases for xid in database.prepared.keys() - known}
    return gtrid.decode()


def rounds(world: XAFixture, count: int = 1, resolver: Resolver | None = None) -> int:
    """Some rounds of another process's resolver; how many transactions they settled."""
    resolver = resolver or world.resolver()
    return sum(resolver.run_once() for _ in range(count))


# --- decided ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["client.xa.decided", "client.xa.committed", "client.xa.all_committed"])
def test_what_was_decided_is_committed_and_completed(world: XAFixture, point: str) -> None:
    abandon(world, point) if point == "client.xa.decided" else abandon_ended(world, point)
    assert rounds(world) == 1
    world.check()
    assert world.databases[0].rows == [b"x"]
    assert rounds(world) == 0


@pytest.mark.parametrize("bqual", ["Ä", "b" * 65])
def test_bqual_that_no_database_can_have_holds_up_no_other(
    world: XAFixture, caplog: pytest.LogCaptureFixture, bqual: str
) -> None:
    """An older broker kept what it was told."""
    odd = abandon(world, "client.xa.decided", b"odd")
    world.home.node.state.decisions.incomplete[TxId.parse(odd)[2:]].branches[0]["bqual"] = bqual
    abandon(world, "client.xa.decided")
    rounds(world)
    assert b"x" in world.databases[0].rows
    assert b"x" in world.databases[1].rows
    assert [line["txid"] for line in said(caplog) if "no database can have" in line["event"]] == [odd]


@pytest.mark.parametrize("point", ["client.xa.decided", "client.xa.all_prepared"])
def test_branches_that_fail_each_time_hold_up_no_other(
    world: XAFixture, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """As many as end the work of a round: a second for a lock each."""
    stubborn = {abandon(world, "client.xa.decided", b"%d" % number) for number in range(3)}
    other, database = abandon(world, point, b"other"), world.databases[0]
    commit = database.commit

    def fails(xid: Xid) -> None:
        if xid.gtrid.decode() in stubborn:
            raise DriverError("its marker's row is locked")
        commit(xid)

    monkeypatch.setattr(database, "commit", fails)
    world.home.clock.advance(100.0)
    rounds(world, 3)
    left = {xid.gtrid.decode() for xid in database.prepared}
    assert left == stubborn
    assert other not in left


def abandon_ended(world: XAFixture, point: str) -> None:
    """The same, where nothing may be prepared any more."""
    with crash_at(point), pytest.raises(SimulatedCrash):
        world.transfer(b"x")
    world.die()


def test_a_living_owner_has_its_turn_first(world: XAFixture) -> None:
    abandon(world, "client.xa.decided", dies=False)
    assert rounds(world) == 0
    assert not any("xa commit" in database.calls for database in world.databases)
    world.home.clock.advance(1.0)
    assert rounds(world) == 0, "its sessions hold the branches, and its deadline has not passed"
    assert world.databases[0].killed == []


@pytest.mark.parametrize("how", ["gone", "late"])
def test_sessions_of_decided_branches_end_with_their_given_up_owner(world: XAFixture, how: str) -> None:
    """A half-open connection: the branch is listed, and not known to anybody else."""
    abandon(world, "client.xa.decided", dies=False)
    if how == "gone":
        world.home.owner_dies()
    else:
        world.home.clock.advance(31.0)
    assert rounds(world) == 1
    assert [len(database.killed) for database in world.databases] == [1, 1]
    world.check()
    assert world.databases[0].rows == [b"x"]


def test_vanished_branch_seen_missing_twice_is_a_heuristic_rollback(
    world: XAFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """A restore from an old copy, or somebody's XA ROLLBACK by hand: the marker row is not there."""
    txid = abandon(world, "client.xa.decided")
    world.databases[1].prepared.clear()
    resolver = world.resolver()
    assert rounds(world, 1, resolver) == 1
    assert world.home.heuristics(txid) == []
    assert rounds(world, 1, resolver) == 1
    assert [kind for kind, _ in world.home.heuristics(txid)] == ["rollback"]
    assert "heuristic: decided to commit, the branch is not" in {entry["event"] for entry in said(caplog)}
    assert (world.databases[0].rows, world.databases[1].rows) == ([b"x"], [])


@pytest.mark.parametrize(("fault", "kind"), [("", "hazard"), ("rolled back", "rollback")])
def test_unknown_written_branch_without_a_marker_is_a_hazard(fault: str, kind: str) -> None:
    world = XAFixture("a", has_marker=False)
    txid = _decide_by_hand(world, wrote=True)
    world.databases[0].prepared.clear()
    world.databases[0].faults["xa commit"].extend([fault] * 2)
    rounds(world, 2, world.resolver())
    assert [kind for kind, _ in world.home.heuristics(txid)] == [kind]


@pytest.mark.parametrize("fault", ["", "rolled back"])
def test_without_marker_branch_that_did_not_write_is_done(fault: str) -> None:
    world = XAFixture("a", has_marker=False)
    txid = _decide_by_hand(world, wrote=False)
    world.databases[0].prepared.clear()
    world.databases[0].faults["xa commit"].append(fault)
    assert rounds(world) == 1
    assert world.home.heuristics(txid) == []


def _decide_by_hand(world: XAFixture, *, wrote: bool) -> str:
    notes = Notes(world.home)
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "resolver_of", lambda _client: notes)
    tx = world.block()
    with crash_at("client.xa.decided"), pytest.raises(SimulatedCrash), tx:
        tx.connection(world.resources[0]).added.extend([b"x"] * wrote)
    patch.undo()
    world.die()
    return tx.txid


def test_a_marker_that_cannot_be_read_is_no_answer(world: XAFixture) -> None:
    txid = abandon(world, "client.xa.decided")
    world.databases[1].prepared.clear()
    world.databases[1].faults["marker"].extend(["-"] * 5)
    rounds(world, 3, world.resolver())
    assert world.home.heuristics(txid) == []
    assert world.home.states()[txid] == "decided"


def test_database_that_is_away_keeps_decision_and_costs_others_nothing(world: XAFixture) -> None:
    txid = abandon(world, "client.xa.decided")
    world.databases[0].is_away = True
    resolver = world.resolver()
    assert rounds(world, 3, resolver) == 1
    assert (world.home.states()[txid], world.home.values("orders")) == ("decided", [])
    world.databases[0].is_away = False
    assert rounds(world, 1, resolver) == 1
    world.check()


def test_one_branch_that_fails_does_not_hold_up_the_others(world: XAFixture) -> None:
    for number in range(5):
        abandon(world, "client.xa.decided", b"%d" % number)
    world.databases[0].faults["xa commit"].append("-")
    resolver = world.resolver()
    assert rounds(world, 1, resolver) == 5
    assert rounds(world, 1, resolver) == 1
    assert sorted(world.databases[0].rows) == sorted(world.databases[1].rows)


@pytest.mark.parametrize("error", [UnavailableError(""), lost(is_executed=False).error, lost(is_executed=True).error])
def test_complete_that_is_not_answered_is_sent_again(world: XAFixture, error: Any) -> None:
    abandon(world, "client.xa.decided")
    world.home.faults["complete"].extend([Fault(error), Fault(error)])
    resolver = world.resolver()
    assert rounds(world, 1, resolver) == 0
    assert rounds(world, 1, resolver) == 1
    world.check()


@pytest.mark.parametrize("point", ["client.xa.decided", "client.xa.all_prepared"])
def test_answers_that_came_while_database_worked_are_not_given_up(world: XAFixture, point: str) -> None:
    """A thousand commits take longer than a request may: its time counts from when somebody waits for it."""
    abandon(world, point)

    def is_late(timeout: float | None) -> None:
        if timeout is None:
            raise RequestTimeoutError("its deadline passed before anybody looked")

    def late(sent: Sent, take: Callable[[], Reply]) -> Reply:
        return take() if sent.verb in ("recover", "token") else WatchedReply(take(), is_late)

    world.home.intercept = late
    assert rounds(world) == 1
    world.check()


# --- prepared without a decision -------------------------------------------------------------------------------------


def test_undecided_transaction_is_fenced_and_rolled_back_for_good(world: XAFixture) -> None:
    txid = abandon(world, "client.xa.all_prepared")
    assert rounds(world) == 1
    assert world.home.states()[txid] == "rolled-back"
    for database in world.databases:
        database.crash()
    world.check()


def test_living_owner_is_left_alone_until_second_behind_its_deadline(world: XAFixture) -> None:
    txid = abandon(world, "client.xa.all_prepared", dies=False)
    world.home.clock.advance(30.9)
    assert rounds(world) == 0
    assert txid not in world.home.states()
    world.home.clock.advance(0.2)
    assert rounds(world) == 1
    assert [len(database.killed) for database in world.databases] == [1, 1]
    world.check()


def test_owner_away_for_less_than_a_second_may_return(world: XAFixture) -> None:
    txid = abandon(world, "client.xa.all_prepared", dies=False)
    world.end_sessions()
    world.home.owner_dies(0.999)
    assert rounds(world) == 0
    assert txid not in world.home.states()
    world.home.clock.advance(0.002)
    assert rounds(world) == 1


def test_what_broker_has_rolled_back_is_rolled_back_without_waiting(world: XAFixture) -> None:
    txid = abandon(world, "client.xa.all_prepared", dies=False)
    world.end_sessions()
    world.home.call("rollback", txid, timeout=1.0)
    assert rounds(world) == 1
    world.check()


def test_rollback_that_came_back_with_crash_is_rolled_back_again(world: XAFixture) -> None:
    abandon(world, "client.xa.all_prepared")
    for database in world.databases:
        database.faults["force"].append("-")
    resolver = world.resolver()
    rounds(world, 1, resolver)
    for database in world.databases:
        database.crash()
        assert database.prepared
    rounds(world, 1, resolver)
    for database in world.databases:
        database.crash()
    world.check()


def test_decide_that_comes_between_is_seen_by_next_round(world: XAFixture) -> None:
    """The owner was faster than the fence: 409, and then the branch is in the broker's list."""
    under_way, owner = list[Callable[[], Reply]](), world.home.control

    def decide_late(sent: Sent, take: Callable[[], Reply]) -> Reply:
        if sent.verb == "decide":
            under_way.append(take)
            raise SimulatedCrash("client")
        if sent.verb == "outcome" and " fence " in sent.line and under_way:
            under_way.pop()()
            owner.end()
        return take()

    world.home.intercept = decide_late
    with pytest.raises(SimulatedCrash):
        world.transfer(b"x")
    world.die()
    resolver = world.resolver()
    rounds(world, 1, resolver)
    world.home.clock.advance(5.0)
    rounds(world, 1, resolver)
    world.check()
    assert world.databases[0].rows == [b"x"]


def test_branch_with_no_kept_outcome_is_left_to_the_operator(
    world: XAFixture, caplog: pytest.LogCaptureFixture
) -> None:
    txid = abandon(world, "client.xa.all_prepared")
    world.home.faults["outcome"].extend([Fault(FencedError(""))] * 20)
    assert rounds(world, 5, world.resolver()) == 0
    assert all(database.prepared for database in world.databases)
    assert [entry["resource"] for entry in said(caplog) if entry.get("txid") == txid] == ["a", "b"]


def test_a_transaction_that_somebody_else_decides_is_left_alone(world: XAFixture) -> None:
    abandon(world, "client.xa.all_prepared")
    world.home.stand_in("outcome", lambda _: b"prepared\nowner gone 5000\n")
    assert rounds(world, 3, world.resolver()) == 0
    assert all(database.prepared for database in world.databases)
    assert "rollback" not in world.home.requests


@pytest.mark.parametrize("how", ["format id", "cluster", "resource", "home", "binary"])
def test_what_is_not_ours_is_never_touched(world: XAFixture, how: str) -> None:
    database = world.databases[0]
    xid = external_branch(world, database, how=how)
    world.home.owner_dies()
    world.home.clock.advance(100.0)
    assert rounds(world, 3, world.resolver()) == 0
    assert xid in database.prepared
    assert "outcome" not in world.home.requests
    assert "xa rollback" not in database.calls


def test_another_broker_at_the_address_is_not_asked_to_decide(world: XAFixture) -> None:
    abandon(world, "client.xa.all_prepared")
    world.home.faults["outcome"].extend([Fault(NotOwnerError(""))] * 4)
    assert rounds(world, 2, world.resolver()) == 0
    assert all(database.prepared for database in world.databases)


def test_completed_transaction_whose_branch_is_prepared_again_is_committed_again(world: XAFixture) -> None:
    """The database was restored from an older copy of itself: the decision stands."""
    tx = world.transfer(b"x")
    database = world.databases[0]
    xid = Xid(FORMAT_ID, tx.txid.encode(), encode_bqual(Bqual(database.uuid, 0, 1)))
    database.prepared[xid] = Prepared([b"again"], tx.txid, None)
    world.die()
    resolver = world.resolver()
    rounds(world, 1, resolver)
    assert xid in database.prepared, "it may have been decided a moment ago, and be the owner's"
    assert rounds(world, 1, resolver) == 1
    assert database.rows == [b"x", b"again"]
    assert resolver.hanging() == []
    assert not resolver.wants_another_look


# --- two at once, deaths, many ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["client.xa.all_prepared", "client.xa.decided"])
@pytest.mark.parametrize("moment", ["", *POINTS])
def test_two_at_once_are_harmless(world: XAFixture, moment: str, point: str) -> None:
    """The second one's whole round falls into the first one's, at every place."""
    abandon(world, point)
    second = world.resolver()
    with at_moment(moment, second.run_once):
        rounds(world, 2, world.resolver())
    second.run_once()
    world.check()
    assert world.databases[0].rows == ([b"x"] if point.endswith("decided") else [])


@pytest.mark.parametrize("point", ["client.xa.all_prepared", "client.xa.decided"])
@pytest.mark.parametrize("death", POINTS)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_resolver_that_dies_leaves_its_work_to_the_next(world: XAFixture, point: str, death: str, nth: int) -> None:
    abandon(world, point)
    with at_point(death, SimulatedCrash(death), nth), suppress(SimulatedCrash):
        rounds(world)
    for database in world.databases:
        database.crash()
    rounds(world, 2, world.resolver())
    world.check()
    assert world.databases[0].rows == ([b"x"] if point.endswith("decided") else [])


@pytest.mark.parametrize("is_decided", [False, True])
def test_ten_thousand_in_doubt_are_settled_page_by_page(is_decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xa_resolver, "PAGE_SIZE", 100)
    world, count = XAFixture("a"), 1000
    notes = Notes(world.home)
    monkeypatch.setattr(module, "resolver_of", lambda _client: notes)
    for number in range(count):
        with crash_at("client.xa.decided" if is_decided else "client.xa.all_prepared"), pytest.raises(SimulatedCrash):
            world.transfer(b"%d" % number)
    world.die()
    world.databases[0].calls.clear()
    began = time.process_time()  # the machine may have other work
    assert rounds(world) == count
    assert time.process_time() - began < 60 * count / 10_000, "ten thousand within a minute"
    assert len(world.databases[0].calls) < 1.1 * count + 20, "one statement each, and a few for all"
    world.check()


# --- what this process left ------------------------------------------------------------------------------------------


def test_unknown_outcome_is_resolved_at_once_by_the_owners_process(world: XAFixture, notes: Notes) -> None:
    world.home.faults["decide"].extend([lost(is_executed=False)] * 5000)
    with pytest.raises(OutcomeUnknownError):
        world.transfer(b"x", timeout=5.0)
    assert world.home.session.finished_through == 0
    notes.resolver.run_once()
    assert world.home.session.finished_through == 1
    world.check()


def test_what_is_left_is_kept_until_it_is_settled(world: XAFixture, notes: Notes) -> None:
    world.databases[0].faults["commit"].append("-")
    tx = world.transfer(b"x")
    world.databases[0].is_away = True
    for _ in range(3):
        notes.resolver.run_once()
        assert tx.pending == ("a",)
    world.databases[0].is_away = False
    notes.resolver.run_once()
    assert tx.pending == ()
    world.check()


def test_a_branch_left_unfenced_is_fenced_by_the_resolver(world: XAFixture, notes: Notes) -> None:
    world.databases[0].faults["prepare"].append("refuse")
    world.home.faults["rollback"].append(lost(is_executed=False))
    with pytest.raises(RolledBackError):
        world.transfer(b"x")
    notes.resolver.run_once()
    assert set(world.home.states().values()) == {"rolled-back"}
    world.check()


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_a_closed_client_ends_the_rounds(world: XAFixture) -> None:
    world.home.faults["recover"].append(Fault(ClosedError("")))
    with pytest.raises(ClosedError):
        world.resolver().run_once()


def test_trouble_is_warned_of_once_and_then_said_quietly(world: XAFixture, caplog: pytest.LogCaptureFixture) -> None:
    world.databases[0].is_away = True
    resolver = Resolver(world.home, [FakeResource(world.databases[0])], world.home.clock)
    rounds(world, 3, resolver)
    assert [(entry["level"], entry["resource"]) for entry in said(caplog)] == [("warning", "a")]


def test_markers_leave_only_when_complete_was_answered(world: XAFixture) -> None:
    abandon(world, "client.xa.decided")
    world.home.faults["complete"].append(Fault(TransactionConflictError("")))
    resolver = world.resolver()
    rounds(world, 1, resolver)
    assert (len(world.databases[0].markers), len(world.databases[1].markers)) == (1, 0)


@pytest.mark.parametrize(("word", "left"), [("committed", 0), ("rolled-back", 1), ("prepared", 1), ("unknown", 1)])
def test_markers_of_others_leave_when_the_broker_has_committed(world: XAFixture, word: str, left: int) -> None:
    tx = world.transfer(b"x")
    world.die()
    world.home.stand_in("outcome", lambda sent: f"{word}\n".encode() if sent.txid == tx.txid else b"")
    world.databases[0].has_old_markers = True
    rounds(world)
    assert len(world.databases[0].markers) == left


def test_markers_of_incomplete_branches_stay(world: XAFixture) -> None:
    abandon(world, "client.xa.decided")
    world.home.faults["complete"].extend([lost(is_executed=False)] * 2)
    world.databases[0].has_old_markers = world.databases[1].has_old_markers = True
    rounds(world)
    assert all(database.markers for database in world.databases)


def test_the_desk_of_a_resource_is_found_by_it(world: XAFixture) -> None:
    resolver = Resolver(world.home, world.resources, world.home.clock)
    resolver.add(world.resources[0])
    resource_resolver = resolver.branch_resolver(world.resources[0], TXID)
    assert isinstance(resource_resolver, BranchResolver)
    assert resource_resolver is not resolver.branch_resolver(world.resources[1], TXID)
    with pytest.raises(LookupError):
        resolver.branch_resolver(FakeResource(world.databases[0]), TXID)
