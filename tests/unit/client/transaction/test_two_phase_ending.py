"""XA transactions over databases in memory: the way through, and what is told when something goes missing."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash_points import at_moment, at_point
from tests.unit.xa.xa_support import FakeResource, Notes, Rows, XAFixture
from tools.simulated.broker import SimulatedBroker
from tools.simulated.connection import Sent
from tools.simulated.faults import Fault, Reply, lost
from txmq.client.transaction import block as module
from txmq.errors import (
    ConfigError,
    ConnectionLostError,
    FencedError,
    HeuristicError,
    NotOwnerError,
    OutcomeUnknownError,
    OverloadedError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TransactionError,
    TransactionStateError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.model import Outcome
from txmq.runtime.crashpoints import POINTS, SimulatedCrash
from txmq.xa import LastResource

OWNER_POINTS = sorted(
    point for point in POINTS if point.startswith("client.xa.") and not point.startswith("client.xa.branch_")
)
DECIDED_BEHIND = ["decided", "committed", "all_committed", "complete_sent"]
FOR_EVER = 5000


@pytest.fixture(params=["a", "ab", "abc"])
def world(request: pytest.FixtureRequest) -> XAFixture:
    return XAFixture(request.param)


@pytest.fixture
def pair() -> XAFixture:
    return XAFixture("ab")


@pytest.fixture(autouse=True)
def notes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    name = next((name for name in ("world", "pair") if name in request.fixturenames), None)
    home = request.getfixturevalue(name).home if name else SimulatedBroker()
    found = Notes(home)
    monkeypatch.setattr(module, "resolver_of", lambda _client: found)
    yield found
    found.resolver.close()


def resolve(world: XAFixture, rounds: int = 3) -> None:
    """The owner has gone, everything answers again, and another process's resolver works."""
    world.die()
    world.home.faults.clear()
    world.home.clock.advance(2.0)
    resolver = world.resolver()
    for _ in range(rounds):
        resolver.run_once()
    resolver.close()


# --- the way through -------------------------------------------------------------------------------------------------


def test_rows_everywhere_and_a_message(world: XAFixture, notes: Notes) -> None:
    with at_point("", SimulatedCrash()) as reached:
        tx = world.transfer(b"1")
    assert (tx.outcome, tx.pending, tx.results[0].offset) == (Outcome.COMMITTED, (), 0)
    assert world.home.requests == ["decide"] + ["complete"] * len(world.databases)
    assert sorted(notes.completes) == [(database.name, tx.txid) for database in world.databases]
    assert {point for point in reached if point.startswith("client.")} == {f"client.xa.{name}" for name in (
        "body_done", "prepared", "all_prepared", "decide_sent", "decided", "committed", "all_committed",
        "complete_sent",
    )}  # fmt: skip
    assert world.home.session.finished_through == 1
    world.check()


def test_rows_alone_and_messages_alone_are_transactions(pair: XAFixture) -> None:
    with pair.block() as rows_only:
        rows_only.connection(pair.resources[0]).add(b"x")
    with pair.block() as messages_only:
        messages_only.send("audit", b"2")
    assert (rows_only.outcome, messages_only.outcome) == (Outcome.COMMITTED, Outcome.COMMITTED)
    assert (pair.databases[0].rows, pair.home.values("audit")) == ([b"x"], [b"2"])


def test_branches_are_prepared_before_decide_and_committed_behind_it(world: XAFixture) -> None:
    order: list[str] = []
    for database in world.databases:
        database.calls = order
    world.home.requests = order
    world.transfer(b"1")
    n = len(world.databases)
    assert order == ["enlist"] * n + ["end_body"] * n + ["prepare"] * n + ["decide"] + ["commit"] * n + ["complete"] * n


def test_a_connection_of_the_callers_own_is_enlisted(pair: XAFixture) -> None:
    rows, (a, b) = Rows(), pair.resources
    with pair.home_block(a.using(rows), b) as tx:
        assert tx.connection(a) is rows
        rows.add(b"1")
        tx.connection(b).add(b"1")
        tx.send("orders", b"1")
    pair.check()


def test_what_cannot_be_combined_is_refused_before_anything_begins(pair: XAFixture, tmp_path: Path) -> None:
    a, b = pair.resources
    last = LastResource("orders-db", connect=lambda: tmp_path)
    with pytest.raises(ConfigError, match="do not mix"):
        pair.home_block(a, last)
    with pytest.raises(ConfigError, match="do not mix"):
        pair.home_block(last, b)
    with pytest.raises(ConfigError, match="once"):
        pair.home_block(a, b, a)
    with pytest.raises(ConfigError, match="once"):
        pair.home_block(a, a.using(Rows()))
    with pytest.raises(ConfigError, match="one last resource"):
        pair.home_block(last, last)
    assert pair.databases[0].calls == []


def test_a_resource_that_takes_no_part_has_no_connection(pair: XAFixture) -> None:
    with pair.block() as tx, pytest.raises(TransactionStateError, match="no part"):
        tx.connection(FakeResource(pair.databases[0]))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_body_raises_goes_on_unchanged_and_nothing_is_left(world: XAFixture, kind: type[BaseException]) -> None:
    error = kind("body")
    with pytest.raises(kind) as caught, world.block() as tx:
        world.insert(tx, b"1")
        raise error
    assert caught.value is error
    assert (tx.outcome, world.home.requests) == (Outcome.ROLLED_BACK, [])
    assert all(branch.is_over for resource in world.resources for branch in resource.branches)
    world.check()


def test_a_database_that_cannot_be_reached_ends_what_was_begun(pair: XAFixture) -> None:
    error = ZeroDivisionError("no way")
    pair.databases[1].faults["enlist"].append(error)
    with pytest.raises(ZeroDivisionError), pair.block():
        pytest.fail("the body does not run")
    assert pair.resources[0].branches[0].is_over
    assert pair.home.session.finished_through == 1


# --- away from the decision ------------------------------------------------------------------------------------------


def test_a_statement_that_failed_dooms_every_branch(world: XAFixture) -> None:
    world.databases[-1].faults["end_body"].append("-")
    with pytest.raises(RolledBackError, match="statement failed"):
        world.transfer(b"1")
    assert world.home.requests == []
    assert not any("prepare" in database.calls for database in world.databases)
    world.check()


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("fault", ["refuse", "by hand", "late", "-", "+"])
def test_a_branch_that_does_not_prepare_rolls_all_back(world: XAFixture, fault: str, place: int, notes: Notes) -> None:
    world.databases[place].faults["prepare"].append(fault)
    told: dict[str, type[TransactionError]] = {"by hand": HeuristicError, "late": TransactionTimeoutError}
    with pytest.raises(told.get(fault, RolledBackError)) as caught:
        world.transfer(b"1")
    is_alone = len(world.databases) == 1 and fault in ("refuse", "by hand")
    fenced, kept = 0 if is_alone else 1, 1 if fault == "by hand" else 0
    assert world.home.requests == ["rollback"] * (fenced + kept), "what may be prepared is fenced first"
    assert caught.value.txid is not None
    assert (notes.watched, world.home.session.finished_through) == ([], 1)
    world.check()


@pytest.mark.parametrize("fault", ["refuse", "-", "+"])
def test_where_the_broker_cannot_fence_prepared_branches_are_left(pair: XAFixture, fault: str, notes: Notes) -> None:
    pair.databases[1].faults["prepare"].append(fault)
    pair.home.faults["rollback"].append(lost(is_executed=False))
    with pytest.raises(RolledBackError):
        pair.transfer(b"1")
    assert "roll_back" not in pair.databases[0].calls
    assert pair.databases[0].prepared
    assert pair.home.session.finished_through == 0, "the resolver needs the broker's word"
    assert {name for name, _ in notes.watched} == {"a", "b"}
    notes.resolver.run_once()
    assert pair.home.session.finished_through == 1
    pair.check()


@pytest.mark.parametrize("refusal", [OverloadedError(""), TransactionConflictError(""), FencedError("")])
def test_a_refused_decide_is_fenced_and_rolled_back(world: XAFixture, refusal: TxmqError) -> None:
    world.home.faults["decide"].append(Fault(refusal))
    with pytest.raises(RolledBackError) as caught:
        world.transfer(b"1")
    assert caught.value.__cause__ is refusal
    assert world.home.requests == ["decide", "rollback"]
    world.check()


def test_a_broker_that_keeps_nothing_of_it_never_executed_decide(world: XAFixture) -> None:
    world.home.faults["decide"].append(Fault(FencedError("")))
    world.home.faults["rollback"].append(Fault(FencedError("")))
    with pytest.raises(RolledBackError):
        world.transfer(b"1")
    world.check()


def test_an_address_that_leads_to_another_broker_leaves_the_branches(world: XAFixture) -> None:
    world.home.faults["decide"].append(Fault(NotOwnerError("")))
    world.home.faults["rollback"].append(Fault(NotOwnerError("")))
    with pytest.raises(RolledBackError):
        world.transfer(b"1")
    assert all(database.prepared for database in world.databases)
    resolve(world)
    world.check()


def test_an_unknown_topic_rolls_back(world: XAFixture) -> None:
    with pytest.raises(RolledBackError), world.block() as tx:
        world.insert(tx, b"1")
        tx.send("no-such-topic", b"2")
    world.check()


def test_a_deadline_that_passed_in_the_body_prepares_nothing(world: XAFixture) -> None:
    with pytest.raises(TransactionTimeoutError), world.block(5.0) as tx:
        world.insert(tx, b"1")
        world.home.clock.advance(5.1)
    assert world.home.requests == []
    world.check()


def test_a_deadline_that_passes_while_preparing_sends_no_decide(world: XAFixture) -> None:
    prepare = world.resources[0].database.fault

    def slow(call: str) -> str:
        if call == "prepare":
            world.home.clock.advance(31.0)
        return prepare(call)

    world.resources[0].database.fault = slow  # type: ignore[method-assign]
    with pytest.raises(TransactionTimeoutError):
        world.transfer(b"1")
    assert world.home.requests == ["rollback"]
    world.check()


def test_a_rollback_that_is_not_answered_is_left_and_noted(pair: XAFixture, notes: Notes) -> None:
    pair.databases[0].faults["prepare"].append("refuse")
    pair.databases[1].faults["roll_back"].append("-")
    with pytest.raises(RolledBackError):
        pair.transfer(b"1")
    assert [name for name, _ in notes.watched] == ["b"]
    notes.resolver.run_once()
    assert pair.home.session.finished_through == 1
    pair.check()


# --- decide is not answered ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("error", [ConnectionLostError(""), RequestTimeoutError(""), UnavailableError("")])
def test_decide_is_repeated_until_it_is_answered(world: XAFixture, error: TxmqError, is_executed: bool) -> None:
    world.home.faults["decide"].extend([Fault(error, is_executed)] * 3)
    tx = world.transfer(b"1")
    assert (tx.outcome, tx.results[0].offset) == (Outcome.COMMITTED, 0)
    world.check()


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("error", [ConnectionLostError(""), RequestTimeoutError(""), UnavailableError("")])
def test_no_answer_to_decide_is_an_unknown_outcome_by_id(
    world: XAFixture, error: TxmqError, is_executed: bool, notes: Notes
) -> None:
    world.home.faults["decide"].extend([Fault(error, is_executed)] * FOR_EVER)
    with pytest.raises(OutcomeUnknownError) as caught, world.block(5.0) as tx:
        world.insert(tx, b"1")
    assert (caught.value.txid, tx.outcome) == (tx.txid, Outcome.UNKNOWN)
    assert world.home.session.finished_through == 0, "its outcome must stay to be asked for"
    assert not any({"roll_back", "commit"} & set(database.calls) for database in world.databases)
    for _ in range(2):
        notes.resolver.run_once()
    world.check()
    assert world.databases[0].rows == ([b"1"] if is_executed else [])
    assert world.home.session.finished_through == 1


@pytest.mark.parametrize("refusal", [OverloadedError(""), TransactionConflictError("")])
@pytest.mark.parametrize("is_executed", [False, True])
def test_refusal_after_a_lost_decide_is_asked_and_raised_unchanged(
    world: XAFixture, refusal: TxmqError, is_executed: bool
) -> None:
    world.home.faults["decide"].extend([lost(is_executed=is_executed), Fault(refusal)])
    if is_executed:
        tx = world.transfer(b"1")
        assert tx.results[0].offset == 0
    else:
        with pytest.raises(RolledBackError):
            world.transfer(b"1")
    world.check()
    assert world.databases[0].rows == ([b"1"] if is_executed else [])


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("word", [lost(is_executed=False), Fault(FencedError(""))])
def test_a_doubt_that_nobody_clears_up_is_unknown(world: XAFixture, word: Fault, is_executed: bool) -> None:
    world.home.faults["decide"].extend([lost(is_executed=is_executed), Fault(OverloadedError(""))])
    world.home.faults["rollback"].append(word)
    with pytest.raises(OutcomeUnknownError):
        world.transfer(b"1")
    resolve(world)
    world.check()
    assert world.databases[0].rows == ([b"1"] if is_executed else [])


# --- after the decision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["-", "+"])
def test_unanswered_commit_is_pending_and_the_resolver_finishes_it(world: XAFixture, fault: str, notes: Notes) -> None:
    world.databases[-1].faults["commit"].append(fault)
    tx = world.transfer(b"1")
    name = world.databases[-1].name
    assert (tx.outcome, tx.pending) == (Outcome.COMMITTED, (name,))
    assert world.home.values("orders") == [], "a visible message implies readable rows"
    assert notes.wakes == 1
    for _ in range(2):
        notes.resolver.run_once()
    assert tx.pending == ()
    world.check()


def test_complete_that_cannot_be_sent_is_pending(world: XAFixture, notes: Notes) -> None:
    carries = world.home.intercept

    def away(sent: Sent, take: Callable[[], Reply]) -> Reply:
        if sent.verb == "complete":
            raise ConnectionLostError("away")
        return take()

    world.home.intercept = away
    tx = world.transfer(b"1")
    assert tx.pending == tuple(database.name for database in world.databases)
    world.home.intercept = carries
    notes.resolver.run_once()
    assert tx.pending == ()
    world.check()


def test_messages_that_are_placed_and_not_shown_are_waited_for(world: XAFixture) -> None:
    world.home.faults["complete"].extend([lost(is_executed=False)] * len(world.databases))
    tx = world.transfer(b"1")
    with pytest.raises(RequestTimeoutError, match="orders-0"):
        tx.wait_visible(0.5)
    resolve(world)
    tx.wait_visible(0.5)


def test_lost_complete_is_found_by_the_resolver(world: XAFixture) -> None:
    world.home.faults["complete"].extend([lost(is_executed=False)] * len(world.databases))
    assert world.transfer(b"1").outcome is Outcome.COMMITTED
    assert world.home.values("orders") == []
    resolve(world)
    world.check()


def test_markers_leave_when_complete_is_answered(pair: XAFixture, notes: Notes) -> None:
    pair.home.faults["complete"].extend([None, *[lost(is_executed=True)] * 2])
    first = pair.transfer(b"1")
    notes.resolver.run_once()
    assert pair.databases[0].markers == {}
    assert pair.databases[1].markers == {first.txid: "committed"}, "nobody was told that the broker knows"


# --- the process dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", OWNER_POINTS)
def test_a_death_at_any_point_is_settled_by_another_process(pair: XAFixture, point: str, nth: int) -> None:
    pair.transfer(b"before")
    pair.databases[0].faults["prepare"].extend(["refuse"] if point.split(".")[2] in ("fenced", "rolled_back") else [])
    with at_point(point, SimulatedCrash(point), nth) as reached:
        try:
            pair.transfer(b"x")
        except (SimulatedCrash, RolledBackError):
            pass
    assert point in reached
    resolve(pair)
    pair.check()
    is_dead = reached.count(point) == nth
    is_decided = point.rpartition(".")[2] in DECIDED_BEHIND
    if is_dead and point != "client.xa.decide_sent":
        assert pair.databases[0].rows == ([b"before", b"x"] if is_decided else [b"before"])


def test_a_dead_owner_that_comes_back_finds_decide_refused(pair: XAFixture) -> None:
    """A paused owner (a zombie): the resolver was faster."""

    def hook() -> None:
        pair.home.owner_dies()
        for database in pair.databases:
            for session in list(database.sessions):
                database.end_session(session)
        pair.home.clock.advance(2.0)
        resolver = pair.resolver()
        resolver.run_once()
        resolver.close()

    with pytest.raises(RolledBackError), at_moment("client.xa.all_prepared", hook):
        pair.transfer(b"x")
    pair.check()
    assert pair.databases[0].rows == []


# --- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("point", OWNER_POINTS)
def test_an_interrupt_at_any_point_ends_well(world: XAFixture, point: str, kind: type[BaseException]) -> None:
    if point.rpartition(".")[2] in ("fenced", "rolled_back"):
        world.databases[-1].faults["prepare"].append("-")
    with at_point(point, kind()) as reached, pytest.raises(kind), world.block() as tx:
        world.insert(tx, b"x")
    assert point in reached
    is_decided = point.rpartition(".")[2] in DECIDED_BEHIND
    if is_decided:
        assert tx.outcome is Outcome.COMMITTED
    assert tx.outcome is not Outcome.UNKNOWN, "the broker was asked"
    assert all(branch.is_over for resource in world.resources for branch in resource.branches)
    resolve(world)
    world.check()
    assert world.databases[0].rows == ([b"x"] if tx.outcome is Outcome.COMMITTED else [])


@pytest.mark.parametrize("verb", ["decide", "rollback", "complete"])
@pytest.mark.parametrize("is_executed", [False, True])
def test_an_interrupt_in_a_request_ends_well(world: XAFixture, verb: str, is_executed: bool) -> None:
    if verb == "rollback":
        world.databases[-1].faults["prepare"].append("-")
    interrupted: list[str] = []

    def interrupt(sent: Sent, take: Callable[[], Reply]) -> Reply:
        if sent.verb == verb and not interrupted:
            interrupted.append(sent.verb)
            if is_executed:
                take()
            raise KeyboardInterrupt
        return take()

    world.home.intercept = interrupt
    with pytest.raises(KeyboardInterrupt), world.block() as tx:
        world.insert(tx, b"x")
    resolve(world)
    world.check()
    if verb == "decide":
        assert tx.outcome is (Outcome.COMMITTED if is_executed else Outcome.ROLLED_BACK)
