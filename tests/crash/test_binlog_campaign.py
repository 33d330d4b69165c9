"""The short campaign of a binlog sync; ``make crash`` plays 100 cycles."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tools.crash.binlog.campaign import BinlogCampaign
from tools.crash.binlog.plan import MODES, ROUND, faults, opening, points

CYCLES, ROWS = 4, 100
SEED = 4


@pytest.mark.timeout(900)
def test_kills_around_a_snapshot_lose_and_repeat_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    report = BinlogCampaign(tmp_path, SEED, lines.append, rows=ROWS).run(CYCLES, check_every=CYCLES)
    assert report.complaints == [], "\n".join(lines)
    assert report.counts["r"] > 2 * ROWS
    assert report.counts["units"] > 50


@pytest.mark.parametrize("has_snapshots", [True, False])
def test_a_round_plays_every_point_and_kills_everybody(*, has_snapshots: bool) -> None:
    rng = random.Random(1)
    played = opening(rng, has_snapshots=has_snapshots)
    for mode in MODES:
        played += itertools.islice(faults(rng, mode), ROUND)
    assert {fault.point.partition(":")[0] for fault in played} - {""} == points(has_snapshots=has_snapshots)
    assert {victim for fault in played if fault.kind == "kill" for victim in fault.victims} == {
        "source", "target", "broker", "reader", "applier", "load",
    }  # fmt: skip
