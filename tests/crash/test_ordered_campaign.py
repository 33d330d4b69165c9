"""The short campaign of an ordered producer; ``make crash`` plays 200 cycles."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tools.crash.ordered.campaign import KINDS, ORDERED_POINTS, OrderedCampaign, cycles

CYCLES = 9
SEED = 1


@pytest.mark.timeout(900)
def test_outages_kills_and_full_spools_lose_repeat_and_reorder_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    report = OrderedCampaign(tmp_path, SEED, lines.append).run(CYCLES, check_every=5)
    assert report.complaints == [], "\n".join(lines)
    assert report.told["acknowledged"] > 20  # ten times as many where nobody else uses the machine
    assert report.told["spooled"] > 20


def test_a_round_plays_every_point_and_every_kind() -> None:
    played = list(itertools.islice(cycles(random.Random(1)), 9 * len(ORDERED_POINTS)))
    assert {cycle.point for cycle in played} == {*ORDERED_POINTS, None}
    assert {cycle.kind for cycle in played} == {*KINDS, "point"}
