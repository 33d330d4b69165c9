"""The short campaign of a cluster, without Spark; ``make crash`` plays a round, with the bounds that are promised."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tools.crash.cluster.campaign import ClusterCampaign
from tools.crash.cluster.plan import FAULTS_A_ROUND, faults
from tools.crash.faults import Fault

SEED = 6
CHOSEN = (
    Fault("crash", ("banker 0", "broker 1"), 0.3, "client.xa.decided:2"),
    Fault("kill", ("zookeeper 0", "zookeeper 2"), 0.3),
    Fault("kill", ("broker 0", "database 0", "member 1", "ordered", "worker 0"), 0.3),
)
# What is promised is 2 s and 5 s; here a machine that is busy with other tests must not fail one.
PAUSE_S_MAX, SETTLE_S_MAX = 60.0, 60.0


@pytest.mark.timeout(600)
def test_cluster_keeps_every_promise_while_each_process_dies(tmp_path: Path) -> None:
    lines: list[str] = []
    campaign = ClusterCampaign(
        tmp_path, SEED, lines.append, pause_s_max=PAUSE_S_MAX, settle_s_max=SETTLE_S_MAX, streamed=0
    )
    report = campaign.play(CHOSEN)
    assert report.complaints == [], "\n".join(lines)
    assert len(report.faults) == len(CHOSEN)
    assert report.messages.counts["ok"] > 50
    assert report.group.counts["handled"] > 10
    assert report.over_homes["XA, two databases"] > 0
    assert report.over_homes["last resource, MariaDB"] > 0
    assert report.over_homes["local"] > 0


def test_in_a_round_every_kind_of_process_suffers() -> None:
    played = list(itertools.islice(faults(random.Random(1), has_stream=True), FAULTS_A_ROUND))
    assert {(fault.kind, fault.victims) for fault in played} >= {
        (kind, (f"{victim} {number}",))
        for kind in ("kill", "pause", "restart")
        for victim in ("broker", "zookeeper")
        for number in range(3)
    }
    killed = {victim.partition(" ")[0] for fault in played if fault.kind == "kill" for victim in fault.victims}
    assert killed == {
        "broker", "zookeeper", "database", "worker", "banker", "member", "ordered", "resolver", "driver",
    }  # fmt: skip
    assert {fault.kind for fault in played if fault.point} == {"crash", "spool"}


def test_without_a_stream_no_driver_dies() -> None:
    played = itertools.islice(faults(random.Random(1), has_stream=False), FAULTS_A_ROUND)
    assert not any("driver" in fault.victims for fault in played)
