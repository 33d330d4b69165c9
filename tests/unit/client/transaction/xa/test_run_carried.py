"""The report of a committed branch goes with the next decision of the process, if one is to come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash_points import at_point
from tests.unit.xa.xa_support import Notes, XAFixture
from txmq.client.transaction import block as module
from txmq.client.transaction.xa import run
from txmq.client.transport.carried import CarriedCompletes
from txmq.errors import OutcomeUnknownError, OverloadedError, RolledBackError, TopicClosedError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.simulated.faults import Fault, lost


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[XAFixture]:
    made = XAFixture("a")
    notes = Notes(made.home)
    made.notes = notes  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "resolver_of", lambda _client: notes)
    yield made
    notes.resolver.close()


@pytest.fixture
def carried(world: XAFixture) -> CarriedCompletes:
    """Another thread is about to decide."""
    found = world.home.session.carried(world.databases[0].uuid)
    found.will_decide("another")
    return found


def another_ends(carried: CarriedCompletes) -> None:
    """From now on no other thread is about to."""
    carried._deciders.discard("another")


def test_lone_caller_reports_by_itself(world: XAFixture) -> None:
    for value in (b"1", b"2"):
        world.transfer(value)
    assert world.home.requests == ["decide", "complete"] * 2
    world.check()


def test_report_goes_with_the_next_decision(world: XAFixture, carried: CarriedCompletes) -> None:
    with at_point("", SimulatedCrash()) as reached:
        world.transfer(b"1")
    assert "client.done.held" in reached
    assert world.home.values("orders") == []
    another_ends(carried)
    world.transfer(b"2")
    assert world.home.requests == ["decide", "decide", "complete"]
    world.check()


def test_marker_leaves_when_the_decision_is_answered(world: XAFixture, carried: CarriedCompletes) -> None:
    world.transfer(b"1")
    world.transfer(b"2")
    another_ends(carried)
    world.transfer(b"3")
    resolver = world.notes.resolver  # type: ignore[attr-defined]
    resolver.run_once()
    world.home.clock.advance(20.0)
    resolver.run_once()
    assert world.databases[0].markers == {}
    assert world.home.requests.count("complete") == 1
    world.check()


@pytest.mark.parametrize("fault", [lost(is_executed=False), lost(is_executed=True)])
def test_decision_sent_again_carries_it_again(world: XAFixture, carried: CarriedCompletes, fault: Fault) -> None:
    world.transfer(b"1")
    another_ends(carried)
    world.home.faults["decide"].append(fault)
    world.transfer(b"2")
    assert world.home.requests == ["decide"] * 3 + ["complete"]
    world.check()


def test_refused_decision_leaves_a_report_of_its_own(world: XAFixture, carried: CarriedCompletes) -> None:
    world.transfer(b"1")
    another_ends(carried)
    world.home.faults["decide"].append(Fault(TopicClosedError("planned"), is_executed=False))
    with pytest.raises(RolledBackError):
        world.transfer(b"2")
    assert world.home.requests == ["decide", "decide", "complete", "rollback"]
    world.check()


def test_unprepared_branch_leaves_a_report_of_its_own(world: XAFixture, carried: CarriedCompletes) -> None:
    world.transfer(b"1")
    another_ends(carried)
    world.databases[0].faults["prepare"].append("refuse")
    with pytest.raises(RolledBackError):
        world.transfer(b"2")
    assert world.home.requests == ["decide", "complete"]
    world.check()


def test_interrupt_leaves_a_report_of_its_own(world: XAFixture, carried: CarriedCompletes) -> None:
    world.transfer(b"1")
    another_ends(carried)
    with at_point("client.xa.prepared", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        world.transfer(b"2")
    assert "complete" in world.home.requests
    assert not carried.is_awaited
    assert world.home.values("orders") == [b"1"]


def test_more_than_fits_a_line_is_reported_alone(
    world: XAFixture, carried: CarriedCompletes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.transfer(b"1")
    another_ends(carried)
    monkeypatch.setattr(run, "CARRIED_MAX", 0)
    world.transfer(b"2")
    assert world.home.requests == ["decide", "complete", "decide", "complete"]
    world.check()


def test_broker_that_does_not_know_the_word_gets_requests(world: XAFixture, carried: CarriedCompletes) -> None:
    world.home.session.takes_done = False
    world.transfer(b"1")
    assert world.home.requests == ["decide", "complete"]
    world.check()


def test_several_databases_report_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    world = XAFixture("ab")
    notes = Notes(world.home)
    monkeypatch.setattr(module, "resolver_of", lambda _client: notes)
    for database in world.databases:
        world.home.session.carried(database.uuid).will_decide("another")
    world.transfer(b"1")
    assert world.home.requests == ["decide", "complete", "complete"]
    notes.resolver.close()


def test_resolver_sends_what_no_decision_takes(world: XAFixture, carried: CarriedCompletes) -> None:
    world.transfer(b"1")
    resolver = world.notes.resolver  # type: ignore[attr-defined]
    resolver.run_once()
    assert world.home.values("orders") == []
    resolver.run_once()
    assert "complete" in world.home.requests
    world.check()


def test_closing_client_sends_what_is_held(world: XAFixture, carried: CarriedCompletes) -> None:
    world.transfer(b"1")
    world.notes.resolver.await_completes(1.0)  # type: ignore[attr-defined]
    assert world.home.requests == ["decide", "complete"]
    world.check()


def test_owner_that_dies_with_a_held_report_is_resolved(world: XAFixture, carried: CarriedCompletes) -> None:
    with at_point("client.done.held", SimulatedCrash()), pytest.raises(SimulatedCrash):
        world.transfer(b"1")
    assert world.databases[0].rows == [b"1"]
    world.die()
    world.home.clock.advance(2.0)
    resolver = world.resolver()
    for _ in range(3):
        resolver.run_once()
    resolver.close()
    world.check()


def test_decision_without_an_answer_reports_all_the_same(world: XAFixture, carried: CarriedCompletes) -> None:
    world.transfer(b"1")
    another_ends(carried)
    world.home.faults["decide"].extend([Fault(OverloadedError("planned"), is_executed=False)])
    with pytest.raises((RolledBackError, OutcomeUnknownError)):
        world.transfer(b"2", timeout=0.01)
    assert world.home.values("orders") == [b"1"]
