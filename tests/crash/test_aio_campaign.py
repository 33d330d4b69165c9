"""The short campaign of ``txmq.aio``: 64 tasks that are cancelled, and whose processes die; ``make crash`` goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.test_campaign import SETTLE_S_MAX
from tools.crash.__main__ import complaints_of
from tools.crash.aio.campaign import AioCampaign

CYCLES = 4
SEED = 4


@pytest.mark.timeout(600)
def test_cancelled_tasks_and_killed_processes_tear_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    campaign = AioCampaign(tmp_path, seed=SEED, say=lines.append)
    campaign.settle_s_max = SETTLE_S_MAX
    report = campaign.run(CYCLES, check_every=CYCLES)
    assert complaints_of(report) == "", "\n".join(lines)
    assert report.verdict.counts["ok"] > 0
