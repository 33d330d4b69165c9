"""The short campaign of ``make test``: two kills; ``make crash`` plays 20."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.crash.spark.campaign import MESSAGES_PER_ROUND, SparkCampaign

KILLS = 2
SEED = 1


@pytest.mark.timeout(900)
def test_spark_stream_is_exactly_once_through_kills(tmp_path: Path) -> None:
    lines: list[str] = []
    report = SparkCampaign(tmp_path, SEED, lines.append).run(KILLS)
    assert report.complaints == [], "\n".join(lines)
    assert report.messages == (KILLS + 1) * MESSAGES_PER_ROUND
    assert report.kills == {"driver": 1, "broker": 1}
