"""A body that ends its database's transaction by itself, and then fails: its rows may be there, and that is kept."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from typing import Any

import pytest

from tests.chains import has_circle
from tools.simulated.faults import Fault, lost
from txmq.errors import (
    BrokerAwayError,
    HeuristicHazardError,
    RolledBackError,
    TransactionConflictError,
    UnavailableError,
)
from txmq.model import Outcome
from txmq.xa.resolver import Resolver

from ..support import NAME, LastResourceFixture, Quiet


def _fail_a_statement(connection: Any) -> None:
    with suppress(sqlite3.IntegrityError):
        connection.execute("INSERT INTO orders (id) VALUES (1), (1)")


@pytest.fixture(params=["", None], ids=["implicit", "autocommit"])
def level(request: pytest.FixtureRequest, world: LastResourceFixture) -> Any:
    world.options["isolation_level"] = request.param
    return request.param


@pytest.mark.usefixtures("level")
def test_commit_in_body_and_then_statement_that_fails_is_hazard(world: LastResourceFixture) -> None:
    with pytest.raises(HeuristicHazardError, match="by itself") as caught, world.block() as tx:
        world.insert(tx, b"x")
        connection = tx.connection(world.resource)
        connection.execute("COMMIT")
        _fail_a_statement(connection)
    assert (world.rows(), world.home.values("orders")) == ([b"x"], [])
    assert (tx.outcome, caught.value.txid, caught.value.retriable) == (Outcome.UNKNOWN, tx.txid, False)
    assert [what for what, _ in world.home.heuristics(tx.txid)] == ["hazard"]
    assert not has_circle(caught.value)


@pytest.mark.usefixtures("level")
def test_commit_in_the_body_then_an_exception_is_a_hazard(world: LastResourceFixture) -> None:
    error = ZeroDivisionError("body")
    with pytest.raises(ZeroDivisionError) as caught, world.block() as tx:
        world.insert(tx, b"x")
        tx.connection(world.resource).execute("COMMIT")
        raise error
    assert caught.value is error
    assert any("by itself" in note for note in error.__notes__)
    assert (world.rows(), tx.outcome) == ([b"x"], Outcome.UNKNOWN)
    assert len(world.home.heuristics(tx.txid)) == 1
    assert world.home.states() == {tx.txid: "rolled-back"}


@pytest.mark.usefixtures("level")
def test_a_failure_alone_is_a_rollback_with_nothing_kept(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError), world.block() as tx:
        world.insert(tx, b"x")
        _fail_a_statement(tx.connection(world.resource))
    assert (world.rows(), tx.outcome, world.home.requests) == ([], Outcome.ROLLED_BACK, [])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("goes_on", [True, False])
def test_transaction_that_database_itself_rolled_back_is_rollback(world: LastResourceFixture, goes_on: bool) -> None:
    with pytest.raises(RolledBackError) as caught, world.block() as tx:
        world.insert(tx, b"x")
        connection = tx.connection(world.resource)
        with suppress(sqlite3.IntegrityError):
            connection.execute("INSERT OR ROLLBACK INTO orders (id) VALUES (1)")
        if goes_on:
            world.insert(tx, b"alone")  # refused: outside of the transaction it might commit by itself
    assert (world.rows(), tx.outcome, world.home.requests) == ([], Outcome.ROLLED_BACK, [])
    assert not has_circle(caught.value)


def test_a_connection_of_the_callers_is_asked_for_the_savepoint(world: LastResourceFixture) -> None:
    with closing(world.connect()) as own:
        with pytest.raises(ZeroDivisionError), world.block(resource=world.resource.using(own)) as tx:
            own.execute("INSERT INTO orders (value) VALUES (x'78')")
            own.execute("COMMIT")
            own.execute("INSERT INTO orders (value) VALUES (x'79')")
            _ = 1 / 0
        assert not own.in_transaction
    assert (world.rows(), tx.outcome) == ([b"x"], Outcome.UNKNOWN)


def test_interrupt_during_the_undo_reports_alike(world: LastResourceFixture) -> None:
    with pytest.raises(ZeroDivisionError), world.block() as tx:
        world.insert(tx, b"x")
        tx.connection(world.resource).execute("COMMIT")
        world.home.faults["rollback"].append(Fault(KeyboardInterrupt()))  # type: ignore[arg-type]
        _ = 1 / 0
    assert tx.outcome is Outcome.UNKNOWN


# --- the broker is told ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [lost(is_executed=False), lost(is_executed=True), Fault(UnavailableError("starting"))]
)
def test_broker_that_could_not_be_told_hears_it_from_resolver(
    world: LastResourceFixture, quiet: Quiet, fault: Fault
) -> None:
    world.home.faults["rollback"].append(fault)
    with pytest.raises(HeuristicHazardError), world.block() as tx:
        world.insert(tx, b"x")
        tx.connection(world.resource).execute("COMMIT")
    ((hazard, on_reported),) = quiet.hazards
    assert (hazard.txid, hazard.resource) == (tx.txid, NAME)
    resolver = Resolver(world.home, [], world.home.clock)
    resolver.report(hazard, on_reported)
    world.home.faults["rollback"].append(lost(is_executed=False))
    resolver.run_once()
    resolver.run_once()
    resolver.run_once()
    assert len(world.home.heuristics(tx.txid)) == 1
    assert world.home.faults["rollback"] == type(world.home.faults["rollback"])()
    resolver.close()


def test_broker_that_is_away_is_told_when_it_is_back(world: LastResourceFixture, quiet: Quiet) -> None:
    with pytest.raises(HeuristicHazardError), world.block() as tx:
        world.insert(tx, b"x")
        tx.connection(world.resource).execute("COMMIT")
        world.home.faults["rollback"].append(Fault(BrokerAwayError("away")))
    ((hazard, on_reported),) = quiet.hazards
    resolver = Resolver(world.home, [], world.home.clock)
    resolver.report(hazard, on_reported)
    resolver.run_once()
    assert len(world.home.heuristics(tx.txid)) == 1
    resolver.close()


def test_what_the_broker_was_not_told_of_is_not_finished(world: LastResourceFixture, quiet: Quiet) -> None:
    """A later commit that says so, and a thousand others: the broker refused to keep it (410)."""
    with pytest.raises(HeuristicHazardError), world.block() as tx:
        world.insert(tx, b"x")
        tx.connection(world.resource).execute("COMMIT")
        world.home.faults["rollback"].append(Fault(BrokerAwayError("away")))
    with world.block() as later:
        world.insert(later, b"y")
        later.send("orders", b"y")
    session = world.home.session
    session.saw_outcome(1)
    assert session.finished_through == 0
    resolver = Resolver(world.home, [], world.home.clock)
    resolver.report(*quiet.hazards[0])
    resolver.run_once()
    resolver.close()
    assert session.finished_through == 2


def test_a_broker_that_has_committed_is_not_asked_for_ever(world: LastResourceFixture, quiet: Quiet) -> None:
    with pytest.raises(HeuristicHazardError), world.block() as tx:
        world.insert(tx, b"x")
        tx.connection(world.resource).execute("COMMIT")
        world.home.faults["rollback"].append(Fault(TransactionConflictError("committed")))
    assert tx.outcome is Outcome.UNKNOWN
    resolver = Resolver(world.home, [], world.home.clock)
    for hazard, on_reported in quiet.hazards:
        resolver.report(hazard, on_reported)
    world.home.faults["rollback"].append(Fault(TransactionConflictError("committed")))
    resolver.run_once()
    asked = world.home.requests.count("rollback")
    resolver.run_once()
    assert world.home.requests.count("rollback") == asked
    resolver.close()
