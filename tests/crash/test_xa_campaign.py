"""The short XA campaign of ``make test``; ``make crash`` plays every cell."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.crash.test_campaign import SETTLE_S_MAX
from tools.crash.__main__ import complaints_of
from tools.crash.xa.campaign import CELLS, CLIENT_POINTS, LEFT_FOR_XA_RESOLVER, XACampaign, XADeath, cells

CYCLES = 10
SEED = 2


@pytest.mark.timeout(900)
def test_ten_deaths_of_clients_broker_and_databases_tear_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    campaign = XACampaign(tmp_path, seed=SEED, say=lines.append)
    campaign.settle_s_max = SETTLE_S_MAX
    report = campaign.run(CYCLES, check_every=5)
    assert complaints_of(report) == "", "\n".join(lines)


def test_a_round_plays_every_cell_once() -> None:
    deaths = [death for death in itertools.islice(cells(random.Random(1)), 2 * CELLS) if death.point]
    assert len({(death.point, death.victims) for death in deaths}) == len(deaths) == CELLS
    assert {death.point for death in deaths} == {*CLIENT_POINTS, *LEFT_FOR_XA_RESOLVER}
    assert {number for death in deaths for number in death.databases} == {0, 1}
    assert all(isinstance(death, XADeath) for death in deaths)
