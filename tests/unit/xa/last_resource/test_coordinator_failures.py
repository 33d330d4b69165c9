"""A last-resource transaction that fails, at every place: rows equal messages, and the truth is told."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.crash_points import at_point, crash_at
from tools.simulated.faults import Fault, lost
from txmq.client.transaction import block as module
from txmq.client.transaction.current import current_transaction
from txmq.errors import (
    ConnectionLostError,
    FencedError,
    HeuristicCommitError,
    HeuristicMixedError,
    NeverIssuedError,
    OutcomeUnknownError,
    OverloadedError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
    UnknownTopicError,
    UnknownTransactionError,
)
from txmq.model import Outcome
from txmq.runtime.crashpoints import POINTS, SimulatedCrash
from txmq.xa import LastResource

from ..support import NAME, LastResourceFixture, Quiet

# But for the one of drivers that send several statements in a packet: tests/services/xa/test_last_resource_mysql.py.
OWNER_POINTS = sorted({point for point in POINTS if point.startswith("client.tx.")} - {"client.tx.db_commit_sent"})
BEFORE_THE_DECISION = [
    "client.tx.body_done", "client.tx.prepare_sent", "client.tx.prepared", "client.tx.marker_inserted",
]  # fmt: skip
BEHIND_IT = ["client.tx.db_committed", "client.tx.commit_sent", "client.tx.committed"]
LOST = ConnectionLostError("planned")
FOR_EVER = 5000


def test_the_lists_of_points_are_complete() -> None:
    assert sorted(BEFORE_THE_DECISION + BEHIND_IT) == OWNER_POINTS


def test_one_row_and_one_message(world: LastResourceFixture) -> None:
    with at_point("", SimulatedCrash()) as reached:
        tx = world.order(b"1")
    assert (tx.outcome, tx.pending, tx.results[0].offset) == (Outcome.COMMITTED, (), 0)
    assert (world.rows(), world.home.requests) == ([b"1"], ["prepare", "commit"])
    assert [point for point in reached if point.startswith("client.")] == [
        "client.tx.body_done", "client.tx.prepare_sent", "client.tx.marker_inserted", "client.tx.prepared",
        "client.tx.db_committed", "client.tx.commit_sent", "client.tx.committed",
    ]  # fmt: skip
    assert world.home.session.finished_through == 1
    world.check()


def test_rows_alone_and_messages_alone_are_transactions(world: LastResourceFixture) -> None:
    with world.block() as rows_only:
        rows_only.connection(world.resource).execute("INSERT INTO orders (value) VALUES (x'31')")
    with world.block() as messages_only:
        messages_only.send("audit", b"2")
    assert (rows_only.outcome, messages_only.outcome) == (Outcome.COMMITTED, Outcome.COMMITTED)
    assert (world.rows(), world.home.values("audit")) == ([b"1"], [b"2"])


# --- the process dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", OWNER_POINTS)
def test_a_death_at_any_point_is_settled_by_another_process(world: LastResourceFixture, point: str) -> None:
    world.order(b"before")
    with crash_at(point), pytest.raises(SimulatedCrash):
        world.order(b"x")
    world.die()
    resolver = world.resolver()
    resolver.run_once()
    world.check()
    assert world.rows() == ([b"before", b"x"] if point in BEHIND_IT else [b"before"])
    assert resolver.run_once() == 0


@pytest.mark.parametrize("point", ["client.tx.prepared", "client.tx.db_committed"])
@pytest.mark.parametrize("death", ["resolver.marker_inserted", "resolver.read_committed", "resolver.told_broker"])
def test_a_resolver_that_dies_leaves_its_work_to_the_next(world: LastResourceFixture, point: str, death: str) -> None:
    with crash_at(point), pytest.raises(SimulatedCrash):
        world.order(b"x")
    world.die()
    with crash_at(death) as reached:
        try:
            world.resolver().run_once()
        except SimulatedCrash:
            world.die()
    assert reached
    world.resolver().run_once()
    world.check()
    assert world.rows() == ([b"x"] if point in BEHIND_IT else [])


# --- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("point", OWNER_POINTS)
def test_interrupt_at_any_point_goes_on_and_leaves_no_half(
    world: LastResourceFixture, point: str, kind: type[BaseException]
) -> None:
    with at_point(point, kind()), pytest.raises(kind), world.block() as tx:
        world.insert(tx, b"x")
    is_committed = point in BEHIND_IT
    assert tx.outcome is (Outcome.COMMITTED if is_committed else Outcome.ROLLED_BACK)
    assert world.rows() == ([b"x"] if is_committed else []), "no lock and no row is left behind"
    world.heal()
    world.check()
    assert tx.pending == ()
    assert world.order(b"next").outcome is Outcome.COMMITTED


def test_interrupt_in_middle_of_commit_asks_database_what_it_did(world: LastResourceFixture) -> None:
    for behind in (False, True):
        with pytest.raises(KeyboardInterrupt), world.block() as tx:
            world.insert(tx, b"%d" % behind)
            setattr(world.opened[-1], "fail_behind" if behind else "fail_before", KeyboardInterrupt())
        assert tx.outcome is (Outcome.COMMITTED if behind else Outcome.ROLLED_BACK)
    world.check()
    assert world.rows() == [b"1"]


def test_second_interrupt_at_the_look_up_leaves_the_outcome_unknown(world: LastResourceFixture, quiet: Quiet) -> None:
    point = at_point("resolver.read_committed", KeyboardInterrupt())
    with point, pytest.raises(KeyboardInterrupt), world.block() as tx:
        world.insert(tx, b"x")
        world.opened[-1].fail_behind = KeyboardInterrupt()
    assert (tx.outcome, quiet.wakes) == (Outcome.UNKNOWN, 1)
    world.heal()
    world.check()
    assert world.rows() == [b"x"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_the_body_raises_goes_on_unchanged_and_nothing_happened(
    world: LastResourceFixture, kind: type[BaseException]
) -> None:
    error = kind("body")
    with pytest.raises(kind) as caught, world.block() as tx:
        world.insert(tx, b"x")
        raise error
    assert caught.value is error
    assert (tx.outcome, world.rows(), world.home.requests) == (Outcome.ROLLED_BACK, [], [])


def test_a_rollback_that_fails_does_not_replace_the_body_error(world: LastResourceFixture) -> None:
    with pytest.raises(ZeroDivisionError), world.block() as tx:
        world.insert(tx, b"x")
        world.opened[-1].close()
        _ = 1 / 0
    assert (tx.outcome, world.rows()) == (Outcome.ROLLED_BACK, [])


# --- the broker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("error", [LOST, UnavailableError("planned")])
def test_a_prepare_without_an_answer_is_sent_again(
    world: LastResourceFixture, error: TxmqError, is_executed: bool
) -> None:
    world.home.faults["prepare"].extend([Fault(error, is_executed)] * 3)
    assert world.order(b"x").outcome is Outcome.COMMITTED
    assert world.rows() == [b"x"]
    world.check()


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("error", [LOST, RequestTimeoutError("planned")])
def test_prepare_without_answer_until_deadline_is_rollback(
    world: LastResourceFixture, error: TxmqError, is_executed: bool
) -> None:
    world.home.faults["prepare"].extend([Fault(error, is_executed)] * FOR_EVER)
    with pytest.raises(TransactionTimeoutError):
        world.order(b"x", timeout=5.0)
    assert (world.rows(), set(world.home.states().values())) == ([], {"rolled-back"})
    world.check()


def test_prepare_and_rollback_without_answer_are_left_to_resolver(world: LastResourceFixture, quiet: Quiet) -> None:
    world.home.faults["prepare"].extend([lost(is_executed=True)] * FOR_EVER)
    world.home.faults["rollback"].append(lost(is_executed=False))
    with pytest.raises(RolledBackError), world.block(5.0) as tx:
        world.insert(tx, b"x")
    assert (tx.outcome, world.home.states()[tx.txid], quiet.wakes) == (Outcome.ROLLED_BACK, "prepared", 1)
    session = world.home.session
    assert session.finished_through == 0
    world.heal()
    world.check()
    assert session.finished_through == 1


@pytest.mark.parametrize("refusal", [TransactionConflictError(""), FencedError(""), OverloadedError("")])
def test_a_refused_prepare_is_a_rollback_with_its_cause(world: LastResourceFixture, refusal: TxmqError) -> None:
    world.home.faults["prepare"].append(Fault(refusal))
    with pytest.raises(RolledBackError) as caught:
        world.order(b"x")
    assert caught.value.__cause__ is refusal
    assert world.rows() == []
    world.check()


def test_an_unknown_topic_is_a_rollback(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError) as caught, world.block() as tx:
        world.insert(tx, b"x")
        tx.send("no-such-topic", b"y")
    assert isinstance(caught.value.__cause__, UnknownTopicError)
    assert world.rows() == []
    world.check()


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("error", [LOST, UnavailableError("planned")])
def test_a_commit_without_an_answer_is_sent_again(
    world: LastResourceFixture, error: TxmqError, is_executed: bool
) -> None:
    world.home.faults["commit"].extend([Fault(error, is_executed)] * 3)
    tx = world.order(b"x")
    assert (tx.outcome, tx.results[0].offset, tx.pending) == (Outcome.COMMITTED, 0, ())
    world.check()


def test_broker_that_cannot_be_told_is_pending_not_error(world: LastResourceFixture, quiet: Quiet) -> None:
    world.home.faults["commit"].extend([lost(is_executed=False)] * FOR_EVER)
    tx = world.order(b"x", timeout=5.0)
    assert (tx.outcome, tx.pending, world.rows(), quiet.wakes) == (Outcome.COMMITTED, ("broker",), [b"x"], 1)
    session = world.home.session
    assert session.finished_through == 0
    world.heal()
    world.check()
    assert tx.pending == ()
    assert session.finished_through == 1


def test_prepare_that_broker_calls_late_is_last_one(world: LastResourceFixture) -> None:
    """Its clock was set: until the client asked it anew, every transaction was refused, over reconnects too."""
    world.order(b"1")
    stated_ms = world.home.session.clock_ahead_ms
    world.home.clock.jump(600_000)
    world.home.faults["prepare"].append(Fault(TransactionConflictError("the deadline has passed")))
    with pytest.raises(RolledBackError):
        world.order(b"2")
    assert world.home.session.clock_ahead_ms == stated_ms + 600_000


def test_pending_messages_are_told_in_the_first_possible_round(world: LastResourceFixture) -> None:
    world.home.faults["commit"].extend([lost(is_executed=False)] * FOR_EVER)
    tx = world.order(b"x", timeout=5.0)
    world.home.clock.jump(-3_600_000)  # the broker's deadline is far: only the owner itself may tell
    world.home.pending_commits.settle()
    assert list(tx.pending) == ["broker"]
    world.home.faults.clear()
    world.home.pending_commits.settle()
    assert "prepared" not in world.home.states().values()
    assert list(tx.pending) == []
    world.check()


@pytest.mark.parametrize("refusal", [TransactionConflictError(""), UnknownTransactionError(""), NeverIssuedError("")])
def test_broker_that_gave_messages_up_is_heuristic_and_marker_stays(
    world: LastResourceFixture, refusal: TxmqError
) -> None:
    world.home.faults["commit"].append(Fault(refusal))
    tx = world.order(b"x")
    for _ in range(2):
        with pytest.raises(HeuristicMixedError):
            _ = tx.results
    assert (tx.outcome, world.rows(), world.markers()) == (Outcome.COMMITTED, [b"x"], {tx.txid: "committed"})
    assert list(world.resource.finished) == []


def test_broker_that_committed_what_was_rolled_back_is_heuristic(world: LastResourceFixture) -> None:
    world.home.faults["prepare"].append(Fault(TransactionConflictError("")))
    world.home.faults["rollback"].append(Fault(TransactionConflictError("")))
    with pytest.raises(HeuristicCommitError), world.block() as tx:
        world.insert(tx, b"x")
    assert (tx.outcome, world.rows()) == (Outcome.ROLLED_BACK, [])


# --- the database ----------------------------------------------------------------------------------------------------


def test_deadline_in_the_body_rolls_back_without_asking_the_broker(world: LastResourceFixture) -> None:
    with pytest.raises(TransactionTimeoutError), world.block(5.0) as tx:
        world.insert(tx, b"x")
        world.home.clock.advance(5.1)
    assert (tx.outcome, world.rows(), world.home.requests) == (Outcome.ROLLED_BACK, [], [])


def test_database_whose_clock_is_years_ahead_rolls_back(world: LastResourceFixture) -> None:
    slow = LastResource(NAME, connect=world.connect, clock=world.home.clock)  # years behind SQLite's
    with pytest.raises(RolledBackError, match=f"clock of {NAME!r} was set"), world.block(resource=slow) as tx:
        tx.send("orders", b"x")
    assert world.home.states() == {tx.txid: "rolled-back"}
    assert (world.markers(), world.home.values("orders")) == ({}, [])


def test_a_resolver_that_was_first_makes_it_a_rollback(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError, match="resolver"), world.block() as tx:
        tx.send("orders", b"x")
        connection = tx.connection(world.resource)
        # As if it had come between: the lock on the whole file leaves no room for another connection here.
        connection.execute("INSERT INTO txmq_marker VALUES (?, 'rolled-back', 0, 0, 0)", (tx.txid,))
    assert (tx.outcome, world.home.values("orders")) == (Outcome.ROLLED_BACK, [])


def test_a_commit_refused_by_the_database_is_a_rollback(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError, match="COMMIT failed") as caught, world.block() as tx:
        world.insert(tx, b"x")
        world.opened[-1].fail_before = sqlite3.OperationalError("database is locked")
    assert caught.value.retriable
    assert (tx.outcome, world.rows(), world.home.states()) == (Outcome.ROLLED_BACK, [], {tx.txid: "rolled-back"})
    assert world.markers() == {}, "refused for sure: nothing had to be looked up"


def test_a_constraint_that_commit_refuses_will_not_pass(world: LastResourceFixture) -> None:
    with world.outside() as connection:
        connection.execute("CREATE TABLE lines (number INTEGER REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)")
    world.resource.close()
    world.on_connect = "PRAGMA foreign_keys = ON"
    with pytest.raises(RolledBackError, match="FOREIGN KEY") as caught, world.block() as tx:
        tx.connection(world.resource).execute("INSERT INTO lines VALUES (42)")
    assert not caught.value.retriable
    assert tx.outcome is Outcome.ROLLED_BACK


def test_commit_without_answer_is_looked_up_by_marker(world: LastResourceFixture) -> None:
    with world.block() as tx:
        world.insert(tx, b"x")
        world.opened[-1].fail_behind = sqlite3.OperationalError("connection lost")
    assert (tx.outcome, tx.pending, world.rows()) == (Outcome.COMMITTED, (), [b"x"])
    world.check()


def test_commit_that_undid_itself_is_looked_up_by_marker(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError), world.block() as tx:
        world.insert(tx, b"x")
        connection = world.opened[-1]

        class _UndoneError(sqlite3.OperationalError):
            def __str__(self) -> str:
                connection.rollback()  # what SQLite does by itself on a full disk
                return "disk I/O error"

        connection.fail_before = _UndoneError()
    # A rolled-back marker stands over what the WAL may still have of the commit.
    assert (tx.outcome, world.rows(), world.markers()) == (Outcome.ROLLED_BACK, [], {tx.txid: "rolled-back"})
    world.check()


def test_commit_that_cannot_be_looked_up_is_unknown_until_resolved(world: LastResourceFixture, quiet: Quiet) -> None:
    hidden = world.path.with_suffix(".hidden")
    with pytest.raises(OutcomeUnknownError) as caught, world.block(5.0) as tx:
        world.insert(tx, b"x")
        world.opened[-1].fail_behind = sqlite3.OperationalError("connection lost")
        world.path.rename(hidden)
    assert (caught.value.txid, tx.outcome, quiet.wakes) == (tx.txid, Outcome.UNKNOWN, 1)
    assert not world.path.exists(), "looking it up must not make an empty database"
    hidden.rename(world.path)
    world.heal()
    world.check()
    assert world.rows() == [b"x"]


def test_marker_removed_by_a_resolver_does_not_fake_a_rollback(world: LastResourceFixture) -> None:
    """COMMIT is not answered; a resolver finds the marker, tells the broker, and the marker is swept, all before the
    owner looks: its own rolled-back marker then gets in, and only the broker knows better."""
    with world.block() as tx:
        world.insert(tx, b"x")

        class _SettledError(sqlite3.OperationalError):
            def __str__(self) -> str:
                return "connection lost"

        connection = world.opened[-1]
        original = connection.close

        def close() -> None:
            original()
            world.home.call("commit", tx.txid, timeout=1.0, body=())
            with world.outside() as other:
                other.execute("DELETE FROM txmq_marker")

        connection.close = close  # type: ignore[method-assign]
        connection.fail_behind = _SettledError()
    assert (tx.outcome, tx.results[0].offset, world.rows()) == (Outcome.COMMITTED, 0, [b"x"])
    world.check()


# --- large ones ------------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow(tmp_path: Path, quiet: Quiet, monkeypatch: pytest.MonkeyPatch) -> Iterator[LastResourceFixture]:
    monkeypatch.setattr(module, "_STREAM_AT_BYTES", 100 << 10)
    with closing(LastResourceFixture(tmp_path, request_size_bytes_max=64 << 10)) as made:
        yield made


def _insert_many(world: LastResourceFixture, count: int) -> None:
    tx = current_transaction()
    assert isinstance(tx, module.Transaction)
    for number in range(count):
        world.insert(tx, bytes([number]) * 10_000)


def _fill(world: LastResourceFixture, count: int = 25) -> None:
    with world.block():
        _insert_many(world, count)


def test_a_large_one_streams_its_parts(narrow: LastResourceFixture) -> None:
    _fill(narrow)
    assert narrow.home.requests.count("put") > 1
    assert len(narrow.rows()) == 25
    narrow.check()


def test_a_large_one_whose_body_fails_is_withdrawn(narrow: LastResourceFixture) -> None:
    with pytest.raises(ZeroDivisionError), narrow.block() as tx:
        for number in range(25):
            narrow.insert(tx, bytes([number]) * 10_000)
        _ = 1 / 0
    assert (narrow.home.requests[-1], narrow.home.states()) == ("rollback", {tx.txid: "rolled-back"})
    assert narrow.rows() == []


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("nth", [0, 2])
@pytest.mark.parametrize("count", [8, 25])  # streamed at the end of the block, or from the body on
def test_a_part_without_an_answer_is_nothing_at_all(
    narrow: LastResourceFixture, count: int, nth: int, is_executed: bool
) -> None:
    """The connection lives on, so that the broker keeps what it has; the rest was never sent."""
    narrow.home.faults["put"].extend([*[None] * nth, Fault(RequestTimeoutError("planned"), is_executed)])
    with pytest.raises(RolledBackError), narrow.block(), suppress(RolledBackError):
        _insert_many(narrow, count)
    assert (narrow.rows(), narrow.home.values("orders")) == ([], [])
    narrow.check()


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize(("verb", "nth"), [("put", 0), ("put", 2), ("prepare", 0)])
def test_large_one_that_loses_its_connection_is_whole_or_nothing(
    narrow: LastResourceFixture, verb: str, nth: int, is_executed: bool
) -> None:
    narrow.home.faults[verb].extend([*[None] * nth, lost(is_executed=is_executed)])
    if verb == "prepare" and is_executed:
        _fill(narrow)
    else:
        with pytest.raises(RolledBackError):
            _fill(narrow)
    assert len(narrow.rows()) in {0, 25}
    narrow.heal()
    narrow.check()
