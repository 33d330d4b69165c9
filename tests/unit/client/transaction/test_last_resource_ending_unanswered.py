"""The database's COMMIT is the answer: the broker's own comes later, and nothing of this client goes before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.xa.support import LastResourceFixture, Quiet, quiet_resolver
from tests.unit.xa.xa_support import Database, FakeResource
from tools.simulated.faults import Fault
from txmq.client.admin.transactions import Transactions
from txmq.client.transaction import homes
from txmq.client.transaction.background_resolver import BackgroundResolver
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.half_message import CheckBacks, HalfMessage
from txmq.errors import (
    ConnectionLostError,
    HeuristicMixedError,
    NeverIssuedError,
    NotOwnerError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TransactionStateError,
    TransactionTimeoutError,
    TxmqError,
    UnknownTransactionError,
)
from txmq.model import Outcome, Resolution
from txmq.xa import LastResource

FOR_EVER = 5000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LastResourceFixture]:
    made = LastResourceFixture(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    return quiet_resolver(monkeypatch)


def order(world: LastResourceFixture, value: bytes, resource: LastResource | None = None) -> Transaction:
    """An order to whose commit the broker does not answer yet."""
    with world.block(resource=resource) as tx:
        tx.connection(resource or world.resource).execute("INSERT INTO orders (value) VALUES (?)", (value,))
        tx.send("orders", value)
        tx.send("orders", b"as well")
        hold_commit(world, tx.txid)
    return tx


def hold_commit(world: LastResourceFixture, txid: str) -> None:
    """The broker answers to ``prepare`` and not to what follows."""

    def witness(_home: Any, verb: str) -> None:
        if verb == "commit":
            world.home.holds.txids.add(txid)

    world.home.witness = witness


def fail(world: LastResourceFixture, error: TxmqError) -> None:
    """The broker answers this to the commits that it was sent."""
    for held in world.home.holds.replies:
        held.fail(error)
    world.home.holds.replies, world.home.witness = [], None
    world.home.holds.txids.clear()


def another(world: LastResourceFixture, folder: Path) -> LastResourceFixture:
    """Another database of the same client."""
    folder.mkdir()
    made = LastResourceFixture(folder)
    made.home = world.home
    made.resource = LastResource("stock-db", connect=made.connect, table="txmq_stock")
    made.resource.install(world.home)
    return made


def values(world: LastResourceFixture) -> list[bytes]:
    """The messages that readers see, in order."""
    return [value or b"" for value in world.home.values("orders") if value != b"as well"]


def test_block_ends_before_the_broker_answers(world: LastResourceFixture) -> None:
    tx = order(world, b"1")
    assert (tx.outcome, tx.pending, world.rows(), values(world)) == (Outcome.COMMITTED, (), [b"1"], [])
    assert world.home.requests[:2] == ["prepare", "commit"]


def test_commit_says_that_no_caller_waits_until_one_does(world: LastResourceFixture) -> None:
    tx = order(world, b"1")
    with pytest.raises(RequestTimeoutError):
        tx.wait_visible(0.5)
    commits = [sent for sent in world.home.sent if sent.verb == "commit"]
    assert [(sent.txid, " delayable " in sent.line) for sent in commits] == [(tx.txid, True), (tx.txid, False)]


def test_nothing_is_forgotten_before_the_answer(world: LastResourceFixture) -> None:
    tx = order(world, b"1")
    assert (world.home.session.finished_through, [*world.resource.finished]) == (0, [])
    world.home.holds.let_go()
    world.home.pending_commits.look()
    assert (world.home.session.finished_through, [*world.resource.finished]) == (1, [tx.txid])


def test_results_wait_for_the_offsets(world: LastResourceFixture) -> None:
    tx = order(world, b"1")
    assert [result.offset for result in tx.results] == [None, None]
    assert list(tx.pending) == ["broker"], "it was waited for in vain"
    world.home.holds.let_go()
    assert [result.offset for result in tx.results] == [0, 1]
    assert list(tx.pending) == []


def test_messages_are_waited_for(world: LastResourceFixture) -> None:
    tx = order(world, b"1")
    with pytest.raises(RequestTimeoutError):
        tx.wait_visible(0.5)
    world.home.holds.answers_waits = True
    tx.wait_visible(0.5)
    assert values(world) == [b"1"]


def test_only_what_is_committed_is_waited_for(world: LastResourceFixture) -> None:
    with pytest.raises(ZeroDivisionError), world.block() as tx:
        raise ZeroDivisionError
    with pytest.raises(TransactionStateError):
        tx.wait_visible()


def test_outcome_is_known_without_the_broker(world: LastResourceFixture) -> None:
    tx, transactions = order(world, b"1"), Transactions(world.home.routes, 5.0)  # type: ignore[arg-type]
    assert transactions.outcome(tx.txid) is Outcome.COMMITTED


# --- what comes after it ---------------------------------------------------------------------------------------------


def test_local_transaction_goes_behind_it(world: LastResourceFixture) -> None:
    order(world, b"1")
    world.home.holds.answers_waits = True
    with Transaction(world.home, world.home) as tx:
        tx.send("orders", b"2")
    assert values(world) == [b"1", b"2"]


def test_local_transaction_to_another_partition_does_not_wait(world: LastResourceFixture) -> None:
    order(world, b"1")
    with Transaction(world.home, world.home) as tx:
        tx.send("audit", b"2")
    assert (tx.outcome, values(world)) == (Outcome.COMMITTED, [])


def test_local_transaction_that_waits_in_vain_is_rolled_back(world: LastResourceFixture) -> None:
    order(world, b"1")
    with pytest.raises(TransactionTimeoutError), Transaction(world.home, world.home, (), 2.0) as tx:
        tx.send("orders", b"2")
    world.home.holds.let_go()
    assert values(world) == [b"1"]


def test_xa_decision_goes_behind_it(world: LastResourceFixture) -> None:
    order(world, b"1")
    world.home.holds.answers_waits = True
    resource = FakeResource(Database("a", 1, world.home.clock))
    with Transaction(world.home, world.home, (resource,)) as tx:
        tx.connection(resource).add(b"2")
        tx.send("orders", b"2")
    assert values(world) == [b"1", b"2"]


def test_half_message_goes_behind_it(world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.client.transaction.half_message.start_daemon", lambda _name, _run: None)
    group = CheckBacks(world.home, "g", lambda _half: Resolution.UNKNOWN)
    order(world, b"1")
    world.home.holds.answers_waits = True
    HalfMessage(world.home, group, 30.0, None).prepare("orders", 0, (None, b"2", (), 0)).commit()
    assert values(world) == [b"1", b"2"]


def test_last_resource_of_another_database_goes_behind_it(world: LastResourceFixture, tmp_path: Path) -> None:
    stock = another(world, tmp_path / "stock")
    order(world, b"1")
    world.home.holds.answers_waits = True
    with stock.block() as tx:
        tx.send("orders", b"2")
    assert world.home.values("orders")[:1] == [b"1"]
    stock.close()


def test_next_order_of_the_same_database_does_not_wait(world: LastResourceFixture) -> None:
    order(world, b"1")
    order(world, b"2")
    assert (world.rows(), len(world.home.holds.replies)) == ([b"1", b"2"], 2)
    world.home.holds.let_go()
    assert values(world) == [b"1", b"2"]


# --- answers that do not come, or are others -------------------------------------------------------------------------


def test_lost_answer_is_asked_for_again(world: LastResourceFixture) -> None:
    tx = order(world, b"1")
    fail(world, ConnectionLostError("planned"))
    world.home.pending_commits.settle()
    assert tx.results[0].offset == 0
    assert values(world) == [b"1"]


def test_lost_answer_is_asked_for_before_a_later_write(world: LastResourceFixture) -> None:
    order(world, b"1")
    fail(world, ConnectionLostError("planned"))
    with Transaction(world.home, world.home) as tx:
        tx.send("orders", b"2")
    assert values(world) == [b"1", b"2"]


@pytest.mark.parametrize(
    "refusal", [TransactionConflictError("given up"), UnknownTransactionError("given up"), NeverIssuedError("given up")]
)
def test_contradiction_behind_the_end_is_raised_by_results(
    world: LastResourceFixture, refusal: TxmqError, caplog: pytest.LogCaptureFixture
) -> None:
    tx = order(world, b"1")
    fail(world, refusal)
    world.home.pending_commits.look()
    assert (tx.outcome, tx.pending, [*world.resource.finished]) == (Outcome.COMMITTED, (), [])
    assert "heuristic" in caplog.text
    with pytest.raises(HeuristicMixedError, match="given up"):
        _ = tx.results
    assert world.markers() == {tx.txid: "committed"}


def test_broker_that_lost_the_transaction_keeps_that(world: LastResourceFixture, quiet: Quiet) -> None:
    """Its session was in the copy: it may not be called finished before, or the marker would look needless."""
    tx = order(world, b"1")
    fail(world, UnknownTransactionError("given up"))
    world.home.pending_commits.look()
    ((hazard, on_reported),) = quiet.hazards
    assert (hazard.txid, hazard.resource, hazard.kind.value) == (tx.txid, "orders-db", "last-resource")
    assert world.home.session.finished_through == 0
    on_reported()
    assert world.home.session.finished_through == 1


def test_broker_that_is_another_one_leaves_it_to_the_resolver(world: LastResourceFixture) -> None:
    tx, session = order(world, b"1"), world.home.session
    fail(world, NotOwnerError("not mine"))
    world.home.pending_commits.look()
    assert session.finished_through == 0
    world.heal()
    assert (values(world), session.finished_through) == ([b"1"], 1)
    assert tx.results[0].offset is None


def test_owner_hears_what_the_resolver_heard_in_its_stead(world: LastResourceFixture) -> None:
    """Another broker had the address; the one that has it then was restored from an older copy."""
    tx = order(world, b"1")
    fail(world, NotOwnerError("not mine"))
    world.home.pending_commits.look()
    world.home.faults["commit"].append(Fault(NeverIssuedError("given up")))
    world.resolver(world.resource).run_once()
    with pytest.raises(HeuristicMixedError, match="given up"):
        _ = tx.results
    assert (world.markers(), [*world.resource.finished]) == ({tx.txid: "committed"}, [])


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_commit_beyond_the_bound_is_left_to_the_resolver(
    world: LastResourceFixture, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "COMMITS_IN_FLIGHT_MAX", 2)
    orders = [order(world, b"%d" % number) for number in range(3)]
    assert [tx.pending for tx in orders] == [(), (), ("broker",)]
    assert (len(world.home.holds.replies), quiet.wakes) == (2, 1)
    world.home.witness = None
    world.home.holds.let_go()
    world.home.pending_commits.settle()
    world.home.pending_commits.settle()
    assert ([tx.pending for tx in orders], values(world)) == ([()] * 3, [b"0", b"1", b"2"])


def test_block_begins_when_there_is_room(world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "OPEN_MAX", 1)
    order(world, b"1")
    with pytest.raises(RolledBackError, match="too many"):
        order(world, b"2")
    assert world.rows() == [b"1"]
    world.home.holds.answers_waits = True
    order(world, b"3")
    assert world.rows() == [b"1", b"3"]


# --- ends ------------------------------------------------------------------------------------------------------------


def test_drain_waits_for_the_answers(world: LastResourceFixture) -> None:
    order(world, b"1")
    world.home.holds.answers_waits = True
    world.home.pending_commits.drain(world.home.clock.monotonic() + 1.0)
    assert values(world) == [b"1"]


def test_drain_waits_no_longer_than_it_may(world: LastResourceFixture) -> None:
    order(world, b"1")
    began = world.home.clock.monotonic()
    world.home.pending_commits.drain(began + 1.0)
    assert world.home.clock.monotonic() <= began + 1.1
    assert world.home.pending_commits


def test_child_of_a_fork_tells_nothing(world: LastResourceFixture) -> None:
    order(world, b"1")
    world.home.pending_commits.forked()
    assert not world.home.pending_commits
    requests = list(world.home.requests)
    world.home.pending_commits.settle()
    assert world.home.requests == requests


def test_block_that_dies_unanswered_is_healed_by_its_marker(world: LastResourceFixture) -> None:
    order(world, b"1")
    fail(world, ConnectionLostError("planned"))
    world.home.pending_commits.forked()  # all that the process knew
    world.die()
    world.resolver().run_once()
    assert (world.rows(), values(world)) == ([b"1"], [b"1"])
    assert "prepared" not in world.home.states().values()


@pytest.mark.parametrize("word", ["rolled back", "committed"])
def test_acks_stay_claimed_until_the_answer(
    world: LastResourceFixture, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Outcome] = []
    told: Callable[[Transaction, Outcome], None] = lambda _tx, outcome: ended.append(outcome)  # noqa: E731
    monkeypatch.setattr(Transaction, "_ended_in_broker", told)
    order(world, b"1")
    assert not ended
    if word == "rolled back":
        fail(world, TransactionConflictError("given up"))
    world.home.holds.let_go()
    world.home.pending_commits.look()
    assert ended == [Outcome.UNKNOWN if word == "rolled back" else Outcome.COMMITTED]


def test_resolver_takes_the_answer_that_nobody_waits_for(
    world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.client.transaction.background_resolver.start_daemon", lambda _name, _run: None)
    resolver, commits = BackgroundResolver(world.home), world.home.pending_commits
    order(world, b"1")
    for _ in range(2):
        resolver.tell(commits)
        resolver.wait(0.0)
        assert commits
    world.home.holds.let_go()
    resolver.wait(0.0)
    assert not commits
    order(world, b"2")
    world.home.witness = None
    resolver.tell(commits)
    world.home.holds.let_go()
    resolver.wait(0.0)
    assert not commits
