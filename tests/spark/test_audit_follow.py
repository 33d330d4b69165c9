"""An audit that goes on: faults that are planted while it runs are told; killed anywhere, it loses none of them."""

from __future__ import annotations

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
    request = asked(shop, broker, interval="1s", since="1h")
    state = request.directory / STATE_FILE
    child = AuditChild(spark, asdict(request), tmp_path / "child.log")
    with child:
        assert child.start(crash="audit.round.kept:1").wait(WAIT_S) == KILLED
        began = state.read_text()
        assert child.told() == []
        assert child.start(crash="audit.round.told:1").wait(WAIT_S) == KILLED
        assert state.read_text() == began  # also where --from says how long ago
        assert [(line["kind"], line["identity"]) for line in child.told()] == [("phantom", "2")]
        child.start()
        shop.order(3, now_ms(), message=False)
        shop.order(4, now_ms(), row=False)
        child.wait_until_told(("missing", "3"), ("phantom", "4"))
        assert child.stop(WAIT_S) == FINDINGS
    assert Counter(line["identity"] for line in child.told()) == {"2": 2, "3": 1, "4": 1}
    kept = spark.read.parquet(str(request.directory / "findings")).select("kind", "identity").collect()
    assert sorted(map(tuple, kept)) == [("missing", "3"), ("phantom", "2"), ("phantom", "4")]
