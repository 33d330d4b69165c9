"""XA transactions over homes: databases and other homes are branches of one decision."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.xa.xa_support import Database, FakeResource, Notes
from tools.simulated.broker import SimulatedBroker
from tools.simulated.cluster import SimulatedCluster
from tools.simulated.faults import Fault
from txmq.client.transaction.block import Transaction
from txmq.errors import DiskFullError, OutcomeUnknownError, RolledBackError
from txmq.model import Outcome
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa.resolver import Resolver

A, B = b"\x00", b"\x01"


class World:
    """Two homes, two databases, one client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = SimulatedCluster(2)
        self.databases = [Database(name, n, self.cluster.clock) for n, name in enumerate("ab", 1)]
        self.resources = [FakeResource(database) for database in self.databases]
        self.notes = Notes(self.cluster)
        self.passed, self.at = 0, dict[int, Any]()
        monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _: self.notes)

    def transfer(self) -> Transaction:
        """A row in each database, a message for each home."""
        with Transaction(self.cluster, self.cluster, self.resources, 30.0) as tx:
            for resource in self.resources:
                tx.connection(resource).add(b"1")
            tx.send("orders", b"1", key=A)
            tx.send("orders", b"1", key=B)
        return tx

    def watch(self) -> None:
        """Count the moments at all homes, and do what is planned."""
        for home in self.cluster.homes:
            home.witness = self._moment

    def _moment(self, _home: SimulatedBroker, _verb: str) -> None:
        self.passed += 1
        happens = self.at.pop(self.passed, None)
        if happens is not None:
            happens()

    def heal(self) -> None:
        """The owner has gone, everything else is there again; all that is left is resolved."""
        for home in self.cluster.homes:
            home.is_away, home.witness = False, None
        for home in self.cluster.homes:
            home.pending_commits.look()
        self.cluster.owner_dies()
        for database in self.databases:
            for session in list(database.sessions):
                database.end_session(session)
        resolver = Resolver(self.cluster, [FakeResource(database) for database in self.databases], self.cluster.clock)
        for _ in range(3):
            self.cluster.talk()
            resolver.round()
        self.cluster.talk()

    def check(self) -> bool:
        """Rows and messages are everywhere or nowhere; whether they are."""
        self.cluster.check()
        values = [home.values("orders") for home in self.cluster.homes]
        rows = [database.rows for database in self.databases]
        assert values + rows in ([[]] * 4, [[b"1"]] * 4)
        assert all(not database.prepared for database in self.databases)
        return bool(rows[0])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_one_decision_lists_databases_and_homes(world: World) -> None:
    tx = world.transfer()
    assert [home.requests for home in world.cluster.homes] == [
        ["decide", "complete", "complete"], ["prepare", "commit"],
    ]  # fmt: skip
    assert (tx.outcome, [r.offset for r in tx.results]) == (Outcome.COMMITTED, [0, 0])
    assert not tx.pending
    world.heal()
    assert world.check()


def test_other_homes_hold_their_part_until_the_rows_are_there(world: World) -> None:
    world.transfer()
    sent = [sent for home in world.cluster.homes for sent in home.sent if sent.verb == "prepare"]
    assert [one.line.split(" ")[2:4] for one in sent] == [["branch", "held"]]


@pytest.mark.parametrize("database", [0, 1])
def test_database_that_refuses_rolls_back_homes(world: World, database: int) -> None:
    world.databases[database].faults["prepare"].append("refuse")
    with pytest.raises(RolledBackError):
        world.transfer()
    world.heal()
    assert not world.check()


def test_home_that_refuses_rolls_back_databases(world: World) -> None:
    world.cluster.homes[1].faults["prepare"].append(Fault(DiskFullError("full")))
    with pytest.raises(RolledBackError):
        world.transfer()
    world.heal()
    assert not world.check()


def test_home_left_after_a_rollback_keeps_no_id(world: World) -> None:
    """Found: the session's window of outcomes stood still from there on."""
    here, there = world.cluster.homes
    world.watch()
    world.at[2] = lambda: setattr(there, "is_away", True)  # after its prepare
    with pytest.raises(RolledBackError):
        world.transfer()
    there.is_away = False
    world.transfer()
    assert here.session.finished_through == 2
    world.heal()


@pytest.mark.parametrize("has_databases", [False, True])
def test_home_that_was_not_asked_to_decide_blocks_no_other(world: World, *, has_databases: bool) -> None:
    """Found: a part at a living home stayed in doubt until its deadline, and its keys waited."""
    here, there = world.cluster.homes
    if not has_databases:
        world.resources.clear()
    world.watch()
    world.at[2] = lambda: setattr(here, "is_away", True)  # after the other one's prepare
    with pytest.raises(RolledBackError):
        world.transfer()
    world.cluster.talk()
    assert [state for state, _ in there.branches().values()] == ["rolled-back"]
    world.heal()
    assert not world.check()


def test_untold_home_is_pending_beside_databases(world: World) -> None:
    world.databases[0].faults["commit"].append("-")
    world.watch()
    world.at[4] = lambda: setattr(world.cluster.homes[1], "is_away", True)  # after decide
    tx = world.transfer()
    assert (tx.outcome, tx.pending) == (Outcome.COMMITTED, ("a", "home 00000000000000a2"))
    world.heal()
    assert world.check()


MOMENTS = range(1, 11)  # prepare at B, decide at A, commit at B, complete twice at A: before and after each


def test_a_transfer_has_ten_moments(world: World) -> None:
    world.watch()
    world.transfer()
    assert world.passed == len(MOMENTS)


@pytest.mark.parametrize("at", MOMENTS)
def test_client_that_dies_leaves_all_or_nothing(world: World, at: int) -> None:
    def dies() -> None:
        raise SimulatedCrash("client")

    world.watch()
    world.at[at] = dies
    with pytest.raises(SimulatedCrash):
        world.transfer()
    world.heal()
    assert world.check() is (at >= 4)


@pytest.mark.parametrize("second", [None, *MOMENTS])
@pytest.mark.parametrize("first", MOMENTS)
@pytest.mark.parametrize("number", [0, 1])
def test_homes_that_die_at_two_moments_agree_with_caller(
    world: World, number: int, first: int, second: int | None
) -> None:
    def away(home: SimulatedBroker) -> None:
        home.is_away = True

    world.watch()
    if second is not None:
        world.at[second] = lambda: away(world.cluster.homes[1 - number])
    world.at[first] = lambda: away(world.cluster.homes[number])
    told: Outcome | None
    try:
        told = world.transfer().outcome
    except OutcomeUnknownError:
        told = None
    except RolledBackError:
        told = Outcome.ROLLED_BACK
    world.heal()
    is_there = world.check()
    if told is not None:
        assert is_there is (told is Outcome.COMMITTED)


@pytest.mark.parametrize("at", MOMENTS)
def test_interrupt_at_any_moment_leads_to_an_end(world: World, at: int) -> None:
    def strikes() -> None:
        raise KeyboardInterrupt

    world.watch()
    world.at[at] = strikes
    with pytest.raises(KeyboardInterrupt):
        world.transfer()
    for home in world.cluster.homes:
        home.pending_commits.look()
    if at >= 4:
        ((state, _of),) = world.cluster.homes[1].branches().values()
        assert state == "committed", "told in spite of the interrupt"
    world.heal()
    assert world.check() is (at >= 4)
