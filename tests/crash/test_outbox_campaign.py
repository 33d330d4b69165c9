"""The campaign of the outbox: what ``make crash`` plays, and its two rules beside the checker's."""

from __future__ import annotations

import itertools
import random

import pytest

from tools.crash.outbox.cells import CELLS, cells
from tools.crash.outbox.promises import broken
from txmq.runtime.crashpoints import POINTS
from txmq.testing.checkers.events import Fault, History, Operation


def test_a_round_of_the_outbox_plays_every_cell_once() -> None:
    deaths = list(itertools.islice(cells(random.Random(1)), len(CELLS)))
    assert {(death.what, death.victims) for death in deaths} == set(CELLS)


def test_every_point_of_the_outbox_is_played() -> None:
    played = {point for what, _ in CELLS for point in what.split(">")}
    assert {point for point in POINTS if ".outbox." in point} <= played


@pytest.mark.parametrize(("status", "seconds", "rule"), [("fail", 1, "O1"), ("ok", 60, "O2")])
def test_refused_and_hanging_orders_are_found(status: str, seconds: int, rule: str) -> None:
    order = Operation("w0-1L", "w0", "txn", 0, [], [], status=status, completed_ns=seconds * 10**9, error="away")
    history = History(operations={order.id: order}, faults={"fault-1": Fault("fault-1", 0)})
    (outage,) = itertools.islice(cells(random.Random(1), (("away", ("broker",)),)), 1)
    (hurt,) = itertools.islice(cells(random.Random(1), (("client.outbox.sent", ("database", "zombie")),)), 1)
    (finding,) = broken(history, [outage])
    assert finding.startswith(rule)
    assert broken(history, [hurt]) == []
