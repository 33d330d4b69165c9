"""The resolver: what it resolves, what it never touches, how it waits, and how it keeps house."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.crash_points import at_moment, crash_at
from tests.logged import said
from tools.simulated.clock import SimClock
from tools.simulated.connection import Sent
from tools.simulated.faults import Fault, Reply, WatchedReply, lost
from txmq.errors import (
    ClosedError,
    ConnectionLostError,
    NeverIssuedError,
    TransactionConflictError,
    TransactionStateError,
    TxmqError,
    UnknownTransactionError,
)
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.state_machine import next_step
from txmq.xa import resolver_ports
from txmq.xa.database import marker_sweep, marker_table
from txmq.xa.last_resource import in_doubt_outcome
from txmq.xa.last_resource import resource_resolver as module
from txmq.xa.last_resource.in_doubt_outcome import Found, Step, Unresolved
from txmq.xa.last_resource.resource_resolver import is_due
from txmq.xa.resolver import Resolver

from .support import LastResourceFixture, abandon

# --- the steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "found"), list(itertools.product(Step, Found)))
def test_every_step_and_finding_has_a_row_or_an_error(step: Step, found: Found) -> None:
    expected = {
        Step.INSERT: {Found.INSERTED, Found.DUPLICATE, Found.HELD, Found.FAILED},
        Step.READ: {Found.COMMITTED, Found.ROLLED_BACK, Found.HELD, Found.FAILED},
        Step.READ_ELSEWHERE: {Found.COMMITTED, Found.HELD, Found.FAILED},
        Step.REPORT_COMMIT: {Found.REPORTED, Found.CONTRADICTED, Found.FAILED},
        Step.REPORT_ROLLBACK: {Found.REPORTED, Found.CONTRADICTED, Found.FAILED},
    }
    if found in expected.get(step, set()):
        assert next_step(in_doubt_outcome.TRANSITIONS, step, found) is not step
    else:
        with pytest.raises(TransactionStateError) as caught:
            next_step(in_doubt_outcome.TRANSITIONS, step, found)
        assert step.value in str(caught.value)
        assert found.value in str(caught.value)


def test_only_a_read_committed_marker_leads_to_a_commit() -> None:
    assert [pair for pair, step in in_doubt_outcome.TRANSITIONS.items() if step is Step.REPORT_COMMIT] == [
        (Step.READ, Found.COMMITTED),
        (Step.READ_ELSEWHERE, Found.COMMITTED),
    ]
    assert {step for (_, found), step in in_doubt_outcome.TRANSITIONS.items() if found is Found.FAILED} == {
        Step.UNDECIDED
    }


# --- what is due -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("connected", "gone_ms", "age_ms", "deadline_ms", "due"),
    [
        (True, 0, 500, 30_000, False),
        (True, 0, 30_000, 30_000, True),
        (True, 0, 29_999, 30_000, False),
        (False, 999, 500, 30_000, False),
        (False, 1000, 500, 30_000, True),
        (False, 10, 30_000, 30_000, True),
        (True, 0, 10**9, 0, False),
    ],
)
def test_transaction_is_due_if_its_owner_or_deadline_is_gone(
    connected: bool, gone_ms: int, age_ms: int, deadline_ms: int, due: bool
) -> None:
    listed = {
        "owner_connected": connected, "owner_gone_ms": gone_ms, "prepared_ms": 0, "age_ms": age_ms,
        "deadline_ms": deadline_ms,
    }  # fmt: skip
    assert is_due(listed) is due


def test_an_owner_that_lives_is_left_alone_until_its_deadline(world: LastResourceFixture) -> None:
    txid = abandon(world, b"x", dies=False)
    world.lose_database()
    assert world.resolver().run_once() == 0
    assert world.home.states()[txid] == "prepared"
    world.home.clock.advance(31.0)
    assert world.resolver().run_once() == 1


# --- what is resolved -------------------------------------------------------------------------------------------------


def test_many_are_settled_by_their_markers_page_after_page(
    world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_SIZE", 3)
    points = ["client.tx.prepared", "client.tx.db_committed"] * 5
    for number, point in enumerate(points):
        abandon(world, b"%d" % number, point)
    assert world.resolver().run_once() == 10
    assert world.rows() == [b"1", b"3", b"5", b"7", b"9"]
    world.check()


@pytest.mark.parametrize("point", ["client.tx.prepared", "client.tx.db_committed"])
@pytest.mark.parametrize("moment", ["", "resolver.marker_inserted", "resolver.read_committed", "resolver.told_broker"])
def test_two_at_once_are_harmless(world: LastResourceFixture, moment: str, point: str) -> None:
    """The second one's whole round falls into the first one's, at every place."""
    abandon(world, b"x", point)
    second = world.resolver()
    with at_moment(moment, second.run_once):
        assert world.resolver().run_once() == 1
    second.run_once()
    world.check()
    assert world.rows() == ([b"x"] if point.endswith("committed") else [])


def test_an_owner_that_comes_back_behind_the_resolver_cannot_commit(world: LastResourceFixture) -> None:
    """A paused owner: the resolver's marker is in before its own."""
    held: list[str] = []

    def resolve() -> None:
        # The owner holds SQLite's write lock from BEGIN on: only a broken lock lets anybody in between.
        held.extend(world.home.states())
        owner = world.opened[-1]
        owner.rollback()
        world.home.owner_dies()
        assert world.resolver().run_once() == 1
        owner.execute("BEGIN IMMEDIATE")

    with at_moment("client.tx.prepare_sent", resolve), pytest.raises(Exception, match="resolver"):
        world.order(b"x")
    assert world.home.states() == {held[0]: "rolled-back"}
    world.check()


def test_commits_are_all_sent_before_one_is_waited_for(world: LastResourceFixture) -> None:
    """A commit may wait at the broker for an earlier one of the same rows."""
    for number in range(3):
        abandon(world, b"%d" % number, "client.tx.db_committed")
    said: list[str] = []

    def noting(sent: Sent, take: Callable[[], Reply]) -> Reply:
        reply = take()
        if sent.verb == "commit":
            said.append("sent")
            return WatchedReply(reply, lambda _timeout: said.append("waited"))
        return reply

    world.home.intercept = noting
    assert world.resolver().run_once() == 3
    assert said == ["sent"] * 3 + ["waited"] * 3


def test_commit_that_waits_for_its_turn_holds_up_no_round(world: LastResourceFixture) -> None:
    earlier = world.home.prepare_earlier("orders", world.resource.uuid or "")
    abandon(world, b"x", "client.tx.db_committed")
    world.home.requests.clear()
    resolver = world.resolver()
    assert [resolver.run_once() for _ in range(2)] == [0, 0]
    earlier()
    assert resolver.run_once() == 1
    assert world.home.requests.count("commit") == 1
    world.check()


# --- what is not touched ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"txid": "00000000000000c2-00000000000000a1-7-1"},
        {"txid": "00000000000000c1-00000000000000a2-7-1"},
        {"txid": "not-a-txid"},
        {"kind": "xa"},
        {"kind": "half"},
        {"uuid": "f" * 32},
    ],
)
def test_what_is_not_ours_is_not_touched(world: LastResourceFixture, change: dict[str, str]) -> None:
    abandon(world, b"x")
    listed = json.loads(world.home.call("recover", timeout=1.0, extensions={"uuid": world.resource.uuid}))
    listed["transactions"][0].update(change)
    world.home.stand_in("recover", lambda _: json.dumps(listed).encode())
    world.home.requests.clear()
    assert world.resolver().run_once() == 0
    assert (set(world.home.requests), world.markers()) == ({"recover", "resource", "token"}, {})


def test_another_database_of_the_name_settles_nothing(world: LastResourceFixture) -> None:
    """The file was lost and made anew: the marker is not absent there, it is unreachable."""
    abandon(world, b"x", "client.tx.db_committed")
    resolver = world.resolver(world.resource)
    world.path.rename(world.path.with_suffix(".lost"))
    with world.outside() as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, value BLOB)")
    made_anew = world.new_resource()
    made_anew.install()
    made_anew.close()
    assert resolver.run_once() == 0
    world.path.with_suffix(".lost").rename(world.path)
    assert resolver.run_once() == 1
    world.check()


def test_database_that_becomes_another_under_open_connection_proves_nothing(world: LastResourceFixture) -> None:
    txid = abandon(world, b"x")
    database = world.resource.open_for_resolver("00000000000000c1")
    with world.outside() as connection:
        connection.execute("UPDATE txmq_marker_identity SET uuid = ?", ("f" * 32,))
    assert in_doubt_outcome.prove(database, txid, 0) == (Step.UNDECIDED, None)
    assert world.markers() == {}
    database.close()


def test_file_that_is_gone_is_unreachable_and_not_made_anew(world: LastResourceFixture) -> None:
    abandon(world, b"x")
    lost_path = world.path.with_suffix(".lost")
    world.path.rename(lost_path)
    resolver = world.resolver(world.resource)
    assert resolver.run_once() == 0
    assert not world.path.exists()
    lost_path.rename(world.path)
    assert resolver.run_once() == 1
    world.check()


# --- what stays undecided --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["client.tx.prepared", "client.tx.db_committed"])
def test_a_locked_database_leaves_it_undecided(
    world: LastResourceFixture, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.xa.last_resource.resource.RESOLVE_WAIT_S", 0.01)
    txid = abandon(world, b"x", point)
    resolver = world.resolver()
    with world.outside() as other:
        other.execute("BEGIN IMMEDIATE")
        assert resolver.run_once() == 0
        other.execute("ROLLBACK")
    assert world.home.states()[txid] == "prepared"
    assert resolver.run_once() == 1
    world.check()


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("point", ["client.tx.prepared", "client.tx.db_committed"])
def test_a_broker_that_could_not_be_told_is_told_again(
    world: LastResourceFixture, point: str, is_executed: bool
) -> None:
    abandon(world, b"x", point)
    verb = "rollback" if point.endswith("prepared") else "commit"
    world.home.faults[verb].append(lost(is_executed=is_executed))
    resolver = world.resolver()
    assert resolver.run_once() == 0
    resolver.run_once()
    world.check()


def test_a_row_that_has_gone_is_undecided(world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was removed by a resolver that had settled the transaction: the broker says so next time."""
    txid = abandon(world, b"x", "client.tx.db_committed")
    database = world.resource.open_for_resolver("00000000000000c1")
    monkeypatch.setattr(type(database.table), "read_durably", lambda *_: None)
    assert in_doubt_outcome.prove(database, txid, 0) == (Step.UNDECIDED, None)
    database.close()


def test_finding_is_made_durable_by_write_before_it_is_told(world: LastResourceFixture) -> None:
    abandon(world, b"x", "client.tx.db_committed")
    with crash_at("resolver.read_committed"), pytest.raises(SimulatedCrash):
        world.resolver().run_once()
    with world.outside() as connection:
        assert connection.execute("SELECT seen FROM txmq_marker").fetchall() == [(1,)]
    assert "commit" not in world.home.requests


@pytest.mark.parametrize("refusal", [TransactionConflictError("an operator rolled it back"), NeverIssuedError("lost")])
def test_heuristic_keeps_its_marker_and_is_not_tried_for_ever(
    world: LastResourceFixture, refusal: TxmqError, caplog: pytest.LogCaptureFixture
) -> None:
    txid = abandon(world, b"x", "client.tx.db_committed")
    world.home.faults["commit"].append(Fault(refusal))
    resolver = world.resolver()
    assert resolver.run_once() == 1
    assert world.markers() == {txid: "committed"}
    (line,) = [line for line in said(caplog) if "heuristic" in line["event"]]
    assert (line["level"], line["txid"]) == ("error", txid)


def test_loss_that_resolver_hears_of_is_kept_by_the_broker(world: LastResourceFixture) -> None:
    """The broker has the session from before the copy, and not the transaction; told again until it keeps that."""
    txid = abandon(world, b"x", "client.tx.db_committed")
    ends = list[str]()
    world.resource.unresolved.append(Unresolved(txid, marker_table.COMMITTED, 0, lambda: ends.append(txid)))
    world.home.faults["commit"].extend([Fault(UnknownTransactionError("lost"))] * 2)
    world.home.faults["rollback"].append(lost(is_executed=False))
    resolver = world.resolver(world.resource)
    assert (resolver.run_once(), ends) == (0, [])
    assert (resolver.run_once(), ends) == (1, [txid])
    assert [what for what, _ in world.home.heuristics(txid)] == ["hazard"]
    assert world.markers() == {txid: "committed"}


def test_one_resource_that_is_away_does_not_stop_another(world: LastResourceFixture, tmp_path: Path) -> None:
    abandon(world, b"x")

    def away() -> sqlite3.Connection:
        raise sqlite3.OperationalError("away")

    from txmq.xa import LastResource

    with closing(Resolver(world.home, [LastResource("away", connect=away), world.new_resource()])) as resolver:
        assert resolver.run_once() == 1
    world.check()


# --- rounds ----------------------------------------------------------------------------------------------------------


class Rounds:
    """Ends ``run`` after some rounds; notes the length of each wait."""

    def __init__(self, count: int) -> None:
        self.waits: list[float] = []
        self._count = count

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return len(self.waits) > self._count


def test_rounds_begin_at_once_and_go_on_whatever_fails(world: LastResourceFixture) -> None:
    world.home.faults["recover"].extend([lost(is_executed=False), None])
    rounds = Rounds(3)
    world.resolver().run(rounds)
    assert rounds.waits[0] == 0
    assert (rounds.waits[1], rounds.waits[2]) == (resolver_ports.FAILED_POLL_S_MAX, resolver_ports.POLL_S)
    assert resolver_ports.OWNER_GONE_MS / 1000 + resolver_ports.POLL_S <= 2.0
    assert resolver_ports.FAILED_POLL_S_MAX <= 1.0


def test_rounds_end_with_the_client(world: LastResourceFixture) -> None:
    world.home.faults["recover"].append(Fault(ClosedError("closed")))
    rounds = Rounds(100)
    world.resolver().run(rounds)
    assert len(rounds.waits) == 1


# --- housekeeping ----------------------------------------------------------------------------------------------------


def test_finished_markers_leave_in_bulk_and_only_then(world: LastResourceFixture) -> None:
    for number in range(5):
        world.order(b"%d" % number)
    assert set(world.markers().values()) == {"committed"}
    resolver = Resolver(world.home, [world.resource])
    resolver.run_once()
    assert world.markers() == {}
    resolver.close()


def test_few_finished_markers_wait_for_more(world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_sweep, "DELETE_SIZE", 3)
    clock = SimClock()
    resolver = Resolver(world.home, [world.resource], clock)

    def left_after(orders: int, seconds: float) -> int:
        for _ in range(orders):
            world.order(b"x")
        clock.advance(seconds)
        resolver.run_once()
        return len(world.markers())

    assert left_after(1, 0.0) == 0, "the first round owes nothing to an earlier one"
    assert [left_after(orders, 4.0) for orders in (1, 1, 0)] == [1, 2, 0]
    assert [left_after(orders, 0.6) for orders in (2, 1)] == [2, 0], "as many as one DELETE takes go at once"
    assert [left_after(orders, 0.6) for orders in (3, 0)] == [3, 0], "but not twice a second"
    resolver.close()


def test_marker_of_commit_that_was_told_leaves_in_later_round(
    world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marker_sweep, "DELETE_FEW_EVERY_S", 0.0)
    abandon(world, b"x", "client.tx.db_committed")
    resolver = world.resolver()
    resolver.run_once()
    resolver.run_once()
    assert world.markers() == {}
    resolver.close()


def test_a_marker_whose_broker_was_not_told_stays(world: LastResourceFixture) -> None:
    world.home.faults["commit"].extend([Fault(ConnectionLostError(""), is_executed=False)] * 5000)
    world.order(b"x", timeout=5.0)
    resolver = Resolver(world.home, [world.resource])
    resolver.run_once()
    assert set(world.markers().values()) == {"committed"}
    resolver.close()
