"""Transactions with a last resource over homes: the marker row proves every part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash_points import crash_at
from tests.unit.client.transaction.shop import Shop
from tests.unit.xa.support import quiet_resolver
from tools.simulated.broker import SimulatedBroker
from tools.simulated.cluster import SimulatedCluster
from tools.simulated.faults import Fault, lost
from txmq.errors import (
    DiskFullError,
    HeuristicMixedError,
    OutcomeUnknownError,
    RolledBackError,
    TransactionConflictError,
)
from txmq.model import Outcome
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa.resolver import Resolver
from txmq.xa.resolver_ports import SWEEP_AGE_MS, SWEEP_EVERY_S
from txmq.xid import TxId

A, B = b"\x00", b"\x01"
POINTS = [
    "client.tx.body_done", "client.tx.prepare_sent", "client.tx.marker_inserted", "client.tx.prepared",
    "client.tx.db_committed", "client.tx.commit_sent", "client.tx.committed",
]  # fmt: skip


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    quiet_resolver(monkeypatch)
    made = Shop(tmp_path / "orders.db", SimulatedCluster(2))
    yield made
    made.resource.close()
    for connection in made.opened:
        connection.close()


class Moments:
    """Does something at some of the moments before and after each execution, at any home."""

    def __init__(self, shop: Shop) -> None:
        self.passed, self.at = 0, dict[int, Any]()
        for home in shop.cluster.homes:
            home.witness = self._moment

    def _moment(self, _home: SimulatedBroker, _verb: str) -> None:
        self.passed += 1
        happens = self.at.pop(self.passed, None)
        if happens is not None:
            happens()


def heal(shop: Shop) -> None:
    """All homes are there again, the owner has gone, and what is in doubt is resolved."""
    for home in shop.cluster.homes:
        home.is_away, home.witness = False, None
        home.faults.clear()
    for home in shop.cluster.homes:
        home.pending_commits.look()
    shop.resolve(shop.resource)
    shop.die()
    for _ in range(2):
        shop.resolve()


def test_each_home_prepares_its_part_and_the_marker_goes(shop: Shop) -> None:
    tx = shop.order(b"1", A, B)
    assert [home.requests for home in shop.cluster.homes] == [["prepare", "commit"]] * 2
    assert (tx.outcome, [r.offset for r in tx.results]) == (Outcome.COMMITTED, [0, 0])
    assert not tx.pending
    assert [*shop.resource.finished] == [tx.txid]
    assert shop.check()


def test_results_are_there_when_the_block_ends(shop: Shop) -> None:
    tx = shop.order(b"1", A, B, B)
    assert [(r.partition, r.offset) for r in tx.results] == [(0, 0), (1, 0), (1, 1)]
    assert not shop.cluster.homes[1].pending_commits


@pytest.mark.parametrize("number", [0, 1])
def test_home_that_refuses_rolls_back_the_row_and_the_others(shop: Shop, number: int) -> None:
    shop.cluster.homes[number].faults["prepare"].append(Fault(DiskFullError("full")))
    with pytest.raises(RolledBackError):
        shop.order(b"1", A, B)
    assert not shop.check()


def test_lost_prepare_is_sent_again_under_its_id(shop: Shop) -> None:
    shop.cluster.homes[1].faults["prepare"].append(lost(is_executed=True))
    assert shop.order(b"1", A, B).outcome is Outcome.COMMITTED
    assert shop.check()


def test_untold_home_is_pending_and_keeps_the_marker(shop: Shop) -> None:
    shop.cluster.homes[1].faults["commit"].extend([lost(is_executed=False)] * 40)
    tx = shop.order(b"1", A, B)
    assert (tx.outcome, tx.pending) == (Outcome.COMMITTED, ("home 00000000000000a2",))
    assert not shop.resource.finished
    shop.cluster.homes[1].faults.clear()
    shop.cluster.homes[1].pending_commits.look()
    shop.cluster.homes[1].pending_commits.look()
    assert not tx.pending
    assert [*shop.resource.finished] == [tx.txid]
    assert shop.check()


def test_home_of_the_id_that_is_untold_is_pending(shop: Shop) -> None:
    shop.cluster.homes[0].faults["commit"].extend([lost(is_executed=False)] * 40)
    tx = shop.order(b"1", A, B)
    assert tx.pending == ("broker",)
    assert not shop.resource.finished
    shop.cluster.homes[0].faults.clear()
    for home in shop.cluster.homes:
        home.pending_commits.settle()
    assert not tx.pending
    assert [*shop.resource.finished] == [tx.txid]
    assert shop.check()


def test_home_of_a_faster_operator_is_told_to_the_caller(shop: Shop) -> None:
    refusal = Fault(TransactionConflictError("an operator rolled it back"))
    shop.cluster.homes[1].faults["commit"].append(refusal)
    tx = shop.order(b"1", A, B)
    with pytest.raises(HeuristicMixedError):
        _ = tx.results
    assert (tx.outcome, shop.rows(), [*shop.resource.finished]) == (Outcome.COMMITTED, [b"1"], [])


@pytest.mark.parametrize("point", POINTS)
def test_client_that_dies_leaves_all_or_nothing(shop: Shop, point: str) -> None:
    with crash_at(point), pytest.raises(SimulatedCrash):
        shop.order(b"1", A, B)
    shop.die()
    shop.resolve()
    shop.resolve()
    assert shop.check() is (POINTS.index(point) >= POINTS.index("client.tx.db_committed"))


@pytest.mark.parametrize("away", [0, 1])
def test_marker_proves_each_part_when_its_home_returns(shop: Shop, away: int) -> None:
    with crash_at("client.tx.db_committed"), pytest.raises(SimulatedCrash):
        shop.order(b"1", A, B)
    shop.die()
    shop.cluster.homes[away].is_away = True
    resolver = Resolver(shop.cluster, [shop.new_resource()], shop.cluster.clock)
    for _ in range(3):  # long enough for markers that are not needed to go
        resolver.round()
        shop.cluster.clock.advance(SWEEP_EVERY_S)
        with shop.connect() as connection:
            connection.execute("UPDATE txmq_marker SET written_ms = written_ms - ?", (SWEEP_AGE_MS,))
    assert [*shop.markers().values()] == ["committed"], "the home that is away has yet to ask"
    shop.cluster.homes[away].is_away = False
    resolver.round()
    resolver.round()
    resolver.close()
    assert shop.check()


def test_marker_of_dead_owner_is_swept_when_every_home_knows(shop: Shop) -> None:
    with crash_at("client.tx.db_committed"), pytest.raises(SimulatedCrash):
        shop.order(b"1", A, B)
    shop.die()
    resolver = Resolver(shop.cluster, [shop.new_resource()], shop.cluster.clock)
    for _ in range(3):
        resolver.round()
        shop.cluster.clock.advance(SWEEP_EVERY_S)
        with shop.connect() as connection:
            connection.execute("UPDATE txmq_marker SET written_ms = written_ms - ?", (SWEEP_AGE_MS,))
    resolver.close()
    assert shop.markers() == {}
    assert shop.check()


MOMENTS = range(1, 9)  # prepare at A and B, commit at B and A: before and after each


def test_an_order_has_eight_moments(shop: Shop) -> None:
    moments = Moments(shop)
    shop.order(b"1", A, B)
    assert moments.passed == len(MOMENTS)


@pytest.mark.parametrize("second", [None, *MOMENTS])
@pytest.mark.parametrize("first", MOMENTS)
@pytest.mark.parametrize("number", [0, 1])
def test_homes_that_die_at_two_moments_agree_with_caller(
    shop: Shop, number: int, first: int, second: int | None
) -> None:
    def away(home: SimulatedBroker) -> None:
        home.is_away = True

    moments = Moments(shop)
    if second is not None:
        moments.at[second] = lambda: away(shop.cluster.homes[1 - number])
    moments.at[first] = lambda: away(shop.cluster.homes[number])
    told: Outcome | None
    try:
        told = shop.order(b"1", A, B).outcome
    except OutcomeUnknownError:
        told = None
    except RolledBackError:
        told = Outcome.ROLLED_BACK
    heal(shop)
    is_there = shop.check()
    if told is not None:
        assert is_there is (told is Outcome.COMMITTED)


@pytest.mark.parametrize("at", MOMENTS)
def test_interrupt_at_any_moment_leads_to_an_end(shop: Shop, at: int) -> None:
    def strikes() -> None:
        raise KeyboardInterrupt

    moments = Moments(shop)
    moments.at[at] = strikes
    with pytest.raises(KeyboardInterrupt):
        shop.order(b"1", A, B)
    heal(shop)
    assert shop.check() is (at >= 5)


def test_parts_carry_the_id_of_the_marker(shop: Shop) -> None:
    tx = shop.order(b"1", A, B)
    (other,) = shop.cluster.homes[1].states()
    assert TxId.parse(other).home == 0xA2
    assert {m.txid for home in shop.cluster.homes for m in home.messages("orders")} == {tx.txid}
