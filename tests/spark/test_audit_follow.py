"""An audit that goes on: faults that are planted while it runs are told; killed anywhere, it loses none of them."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import txmq
from tests.spark.audit_child import AuditChild
from tests.spark.shop import Shop, asked
from txmq.spark.audit.follow import STATE_FILE
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)  # on a machine with eight others
KILLED, FINDINGS = -9, 1
WAIT_S = 300.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_killed_audit_repeats_its_round_and_finds_the_next_faults(
    spark: SparkSession, broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    shop = Shop(client, tmp_path / "shop.db", "followed")
    shop.order(1, now_ms() - 60_000)
    shop.order(2, now_ms() - 60_000, row=False)
    request = asked(shop, broker, interval="1s", since="1h", late="1s")
    state = request.directory / STATE_FILE
    child = AuditChild(spark, asdict(request), tmp_path / "child.log")
    with child:
        assert child.start(crash="audit.round.kept:1").wait(WAIT_S) == KILLED
        began = state.read_text()
        assert child.told() == []
        assert child.start(crash="audit.round.told:1").wait(WAIT_S) == KILLED
        assert state.read_text() == began  # also where --from says how long ago
        assert [(line["kind"], line["identity"]) for line in child.told()] == [("phantom", "2")]
        assert child.start(crash="audit.round.saved:1").wait(WAIT_S) == KILLED
        # Found: a row that is committed so late was in no round.
        shop.order(5, json.loads(state.read_text())["to_ms"] - 1, message=False)
        child.start()
        shop.order(3, third := now_ms(), message=False)
        shop.order(4, now_ms(), row=False)
        child.wait_until_told(("missing", "3"), ("phantom", "4"), ("missing", "5"))
        eventually(lambda: json.loads(state.read_text())["again_to_ms"] > third, child.logs, WAIT_S)
        assert child.stop(WAIT_S) == FINDINGS
    assert Counter(line["identity"] for line in child.told()) == {"2": 2, "3": 1, "4": 1, "5": 1}
    kept = spark.read.parquet(str(request.directory / "findings")).select("kind", "identity").collect()
    assert sorted(map(tuple, kept)) == [("missing", "3"), ("missing", "5"), ("phantom", "2"), ("phantom", "4")]
