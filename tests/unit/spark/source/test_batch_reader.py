"""Reading ranges in a task: each partition is read at its home."""

from __future__ import annotations

import pytest

import txmq
from tests.unit.client.scripted_cluster import ScriptedCluster, scripted_cluster
from txmq.errors import PartialResultError
from txmq.spark.source.batch_reader import Reading, read_ranges
from txmq.spark.source.catalog import Catalog
from txmq.spark.source.options import parse
from txmq.spark.source.ranges import Range

ADDRESS = "txmq://host:1"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    made = scripted_cluster(monkeypatch, 1, 2, 3)
    with made.client(1) as client, client.producer() as producer:
        for number in range(9):
            producer.send("t", b"%d" % number, partition=number % 3)
    return made


def planned(timeout: str = "1") -> list[Range]:
    options = parse({"bootstrap": ADDRESS, "topic": "t", "timeout": timeout}, is_stream=False)
    with txmq.connect(ADDRESS) as client:
        return list(Catalog(client, options).held("t").partitions.values())


def test_ranges_are_planned_and_read_at_each_home(cluster: ScriptedCluster) -> None:
    ranges = planned()
    assert [(each.partition, each.start, each.end) for each in ranges] == [(0, 0, 3), (1, 0, 3), (2, 0, 3)]
    found = [batch.to_pydict()["value"] for batch in read_ranges(ranges, Reading(ADDRESS, ("value",), True, 1.0))]
    assert [value for values in found for value in values] == [b"%d" % n for n in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
    assert [home.verbs.count("get") for home in cluster.homes.values()] == [1, 1, 1]


def test_homes_without_replicas_are_read_at_their_leaders(cluster: ScriptedCluster) -> None:
    reading = Reading(ADDRESS, ("value",), True, 1.0, reads_replicas=True)
    found = [value for batch in read_ranges(planned(), reading) for value in batch.to_pydict()["value"]]
    assert found == [b"%d" % n for n in (0, 3, 6, 1, 4, 7, 2, 5, 8)]


def test_plan_without_a_home_that_is_away_is_refused(cluster: ScriptedCluster) -> None:
    cluster.kill(3)
    with pytest.raises(PartialResultError, match=r"1 of 3 homes did not answer: .*tried for 0.01 s"):
        planned(timeout="0.01")
