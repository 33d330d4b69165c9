"""The short campaign of the outbox: a cell of each sort; ``make crash`` plays every one."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.crash.test_campaign import SETTLE_S_MAX
from tools.crash.__main__ import complaints_of
from tools.crash.doors import GuardedDoors
from tools.crash.outbox.campaign import OutboxCampaign
from tools.crash.outbox.cells import CELLS, Cell, cells
from tools.crash.outbox.promises import broken
from txmq.runtime.crashpoints import POINTS
from txmq.testing.checkers.events import Fault, History, Operation

SEED = 1
SHORT: tuple[Cell, ...] = (
    ("client.outbox.filled", ("client", "broker")),
    ("client.outbox.chosen", ("client",)),
    ("client.outbox.sent", ("database", "zombie")),
    ("client.outbox.deleted", ("client",)),
    ("client.outbox.parked", ("client", "broker")),
    ("broker.outbox.taken>journal.sync.done", ("broker",)),
    ("paused", ("broker",)),
    ("restored", ("broker",)),
)

WITH_USERS: tuple[Cell, ...] = (("client.tx.db_committed", ("client", "broker")), ("client.outbox.sent", ("client",)))


@pytest.mark.timeout(300)
def test_outages_deaths_and_a_restored_broker_lose_no_order(tmp_path: Path) -> None:
    lines: list[str] = []
    campaign = OutboxCampaign(tmp_path, SEED, say=lines.append, chosen=SHORT)
    campaign.settle_s_max = SETTLE_S_MAX
    report = campaign.run(len(SHORT), check_every=1000)
    assert complaints_of(report) == "", "\n".join(lines)
    assert campaign.cells.keys() == set(SHORT)
    assert campaign.waited_max > 0
    assert len(campaign.enclosed_max) == 2, "some services use their outbox always"


@pytest.mark.timeout(300)
def test_users_drain_and_settle_what_others_left(tmp_path: Path) -> None:
    lines: list[str] = []
    campaign = OutboxCampaign(tmp_path, SEED, say=lines.append, chosen=WITH_USERS)
    campaign.settle_s_max, campaign.doors = SETTLE_S_MAX, GuardedDoors(tmp_path / "tls")
    report = campaign.run(len(WITH_USERS), check_every=1000)
    assert complaints_of(report) == "", "\n".join(lines)
    assert report.verdict.counts["ok"] > 10


def test_short_cells_of_the_outbox_are_cells() -> None:
    assert {*SHORT, *WITH_USERS} <= set(CELLS)


def test_a_round_of_the_outbox_plays_every_cell_once() -> None:
    deaths = list(itertools.islice(cells(random.Random(1)), len(CELLS)))
    assert {(death.what, death.victims) for death in deaths} == set(CELLS)


def test_every_point_of_the_outbox_is_played() -> None:
    played = {point for what, _ in CELLS for point in what.split(">")}
    assert {point for point in POINTS if ".outbox." in point} - {"broker.outbox.page_taken"} <= played


@pytest.mark.parametrize(("status", "seconds", "rule"), [("fail", 1, "O1"), ("ok", 60, "O2")])
def test_refused_and_hanging_orders_are_found(status: str, seconds: int, rule: str) -> None:
    order = Operation("w0-1L", "w0", "txn", 0, [], [], status=status, completed_ns=seconds * 10**9, error="away")
    history = History(operations={order.id: order}, faults={"fault-1": Fault("fault-1", 0)})
    (outage,) = itertools.islice(cells(random.Random(1), (("away", ("broker",)),)), 1)
    (hurt,) = itertools.islice(cells(random.Random(1), (("client.outbox.sent", ("database", "zombie")),)), 1)
    (finding,) = broken(history, [outage])
    assert finding.startswith(rule)
    assert broken(history, [hurt]) == []
