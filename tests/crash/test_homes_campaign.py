"""The short campaign over homes: the cells that ``points.toml`` calls short; ``make crash`` plays every cell."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.crash.test_campaign import SETTLE_S_MAX
from tests.crash.test_points import HOMES
from tools.crash.__main__ import complaints_of
from tools.crash.homes.campaign import HomesCampaign
from tools.crash.homes.cells import BROKER_PATHS, CELLS, CLIENT_POINTS, Cell, HomesDeath, cells
from txmq.runtime.crashpoints import POINTS

SEED = 1
SETTLE_EVERY = 5
OVER_HOMES = ("broker.branch.", "broker.decision.", "client.homes.", "client.foreign.", "client.prepare.")


def _cells(texts: object) -> list[Cell]:
    assert isinstance(texts, list)
    split = [text.partition(": ") for text in texts]
    return [(path, tuple(victims.split(" + "))) for path, _, victims in split]


SHORT = tuple(cell for row in HOMES.values() for cell in _cells(row.get("short", [])))


@pytest.mark.timeout(900)
def test_deaths_of_both_homes_and_client_tear_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    campaign = HomesCampaign(tmp_path, SEED, say=lines.append, chosen=SHORT)
    campaign.settle_s_max, campaign.settle_every = SETTLE_S_MAX, SETTLE_EVERY
    report = campaign.run(len(SHORT) * 5 // 4, check_every=1000)
    assert complaints_of(report) == "", "\n".join(lines)
    assert campaign.cells.keys() == set(SHORT)
    assert report.verdict.counts["ok"] > 50


def test_short_cells_are_cells() -> None:
    assert set(SHORT) <= set(CELLS)
    assert len(set(SHORT)) == len(SHORT)


def test_a_round_plays_every_cell_once() -> None:
    rounds = itertools.islice(cells(random.Random(1)), len(CELLS) * 5 // 4)
    deaths = [death for death in rounds if death.point]
    assert all(isinstance(death, HomesDeath) for death in deaths)
    assert len({(death.point, death.victims) for death in deaths}) == len(deaths) == len(CELLS)
    assert {death.point for death in deaths} == {*CLIENT_POINTS, *BROKER_PATHS}


def test_every_point_over_homes_is_played() -> None:
    played = {point for path, _ in CELLS for point in path.split(">")}
    declared = {point for point in POINTS if point.startswith(OVER_HOMES)}
    assert declared <= played
