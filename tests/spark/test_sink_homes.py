"""Sink, source, streams and the audit over two real brokers and their ZooKeeper; deaths of brokers, tasks, drivers."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import txmq
from txmq.client.admin.cluster import describe_cluster
from txmq.spark.audit.rows import open_rows
from txmq.spark.audit.spec import AuditSpec, Kind, parse_terms
from txmq.spark.audit.topic import TopicAudit
from txmq.spark.sink import queries, task
from txmq.spark.sink.digest import Attempt
from txmq.spark.sink.options import SinkOptions
from txmq.spark.sink.queries import Opened, Queries
from txmq.spark.sink.task import Written
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
ROWS = 40
CHILD = Path(__file__).with_name("sink_child.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, ensemble: Ensemble) -> Iterator[Cluster]:
    """Two brokers."""
    with Cluster(tmp_path_factory.mktemp("homes"), ensemble, chroot="/sink", size=2) as made:
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[txmq.Client]:
    with txmq.connect(cluster.address, timeout=20.0) as connected:
        eventually(lambda: _led(connected) == 2, "both homes are led")
        yield connected


def _led(client: txmq.Client) -> int:
    """How many homes take new partitions."""
    return sum(home["leader"] is not None for home in describe_cluster(client.routes, 20.0)["homes"])


@pytest.fixture
def topic(client: txmq.Client, request: pytest.FixtureRequest) -> str:
    """A topic whose partitions are at both homes."""
    name = str(request.node.name)[:60].replace("[", ".").replace("]", "")
    client.topics.create(name, partitions=PARTITIONS)
    assert len(client.routes.owners(name)) == 2
    return name


def values(client: txmq.Client, topic: str) -> Counter[bytes | None]:
    """How often readers see each value."""
    return Counter(message.value for message in client.browse(topic))


def once(count: int = PARTITIONS) -> Counter[bytes | None]:
    """Each value once."""
    return Counter({b"%d" % number: 1 for number in range(count)})


# --- Spark -----------------------------------------------------------------------------------------------------------


def test_batch_stream_source_and_audit_over_both_homes(
    spark: SparkSession, cluster: Cluster, client: txmq.Client, topic: str, tmp_path: Path
) -> None:
    frame = spark.range(0, ROWS, numPartitions=2).selectExpr("cast(id as string) key", "cast(id as string) value")
    for _ in range(2):  # a job that is run again
        _written(frame, cluster, topic)
    assert values(client, topic) == once(ROWS)
    assert {message.partition for message in client.browse(topic)} == set(range(PARTITIONS))
    client.topics.create("copies", partitions=PARTITIONS)
    for _ in range(2):  # a driver that died after the decision: Spark does not know of it
        _copied(spark, cluster, topic, tmp_path / "checkpoint")
        for commit in (tmp_path / "checkpoint" / "commits").glob("[.0]*"):
            commit.unlink()
    assert values(client, "copies") == once(ROWS)
    read = spark.read.format("txmq").options(bootstrap=cluster.registry, topic="copies").load()
    assert {int(row["key"]) for row in read.select("key").collect()} == set(range(ROWS))
    assert _missing(spark, cluster, client, tmp_path / "orders.db") == [str(ROWS)]
    rows = [row for link in client.routes.links() for row in Queries(link).list()]
    assert (len(rows), sum(row["prepared"] for row in rows)) == (2, 0)
    eventually(lambda: client.transactions.list() == [], "nothing is in doubt")


def _written(frame: DataFrame, cluster: Cluster, topic: str) -> None:
    options = {"bootstrap": cluster.registry, "topic": topic, "queryId": "job", "batchId": "7"}
    frame.write.format("txmq").options(**options).mode("append").save()


def _copied(spark: SparkSession, cluster: Cluster, topic: str, checkpoint: Path) -> None:
    source = spark.readStream.format("txmq").options(bootstrap=cluster.address, topic=topic, startingOffsets="earliest")
    writer = source.load().select("key", "value").writeStream.format("txmq").trigger(availableNow=True)
    told = {"bootstrap": cluster.address, "topic": "copies", "checkpointLocation": str(checkpoint)}
    assert writer.options(**told).start().awaitTermination(600.0)


def _missing(spark: SparkSession, cluster: Cluster, client: txmq.Client, path: Path) -> list[object]:
    """The rows of a table, one more than were written, that the audit finds no message for."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        connection.executemany("INSERT INTO orders VALUES (?)", [(number,) for number in range(ROWS + 1)])
    spec = AuditSpec("copies", parse_terms(["id = key"]), settle_ms=0)
    result = TopicAudit(spark, client, cluster.address, open_rows(spark, f"sqlite:{path}", "orders"), spec).run()
    assert {kind: count for kind, count in result.counts.items() if count} == {Kind.MISSING: 1}
    return [row["identity"] for row in result.sample(Kind.MISSING, 10)]


# --- deaths, without Spark -------------------------------------------------------------------------------------------


class Job:
    """A driver, and its tasks' rows: one for each partition."""

    def __init__(self, client: txmq.Client, topic: str) -> None:
        self.client, self.options = client, SinkOptions("", topic, None, client.timeout, None, None)
        self.at = Attempt(topic, queries.new_epoch(client), 0, 0, 0)
        self.opened: Opened = queries.open_query(client, topic, topic, self.at.epoch, 0)

    def write(self, attempt: int = 0) -> Written:
        columns: dict[str, Any] = {"value": pa.array([b"%d" % number for number in range(PARTITIONS)])}
        columns["partition"] = pa.array(range(PARTITIONS), pa.int32())
        rows = iter([pa.record_batch(columns)])
        return task.write(self.client, self.options, self.at._replace(attempt=attempt), rows, self.opened.home)

    def commit(self, written: Written) -> None:
        queries.commit(self.client, self.opened.home, self.at, written.transactions)

    def broker(self, cluster: Cluster, *, is_anchor: bool) -> BrokerProcess:
        """The process that leads the query's anchor, or the other home."""
        links = [link for link in self.client.routes.links() if (link.home == self.opened.home) is is_anchor]
        return next(broker for broker in cluster.brokers if links[0].address == (broker.host, broker.port))


@pytest.mark.parametrize("is_anchor", [True, False], ids=["anchor", "branch"])
def test_broker_killed_before_the_decision_costs_nothing(
    cluster: Cluster, client: txmq.Client, topic: str, is_anchor: bool
) -> None:
    job = Job(client, topic)
    loser, winner = job.write(), job.write(attempt=1)
    assert loser.txids != winner.txids
    broker = job.broker(cluster, is_anchor=is_anchor)
    broker.kill()
    broker.start()
    assert values(client, topic) == Counter()
    job.commit(winner)
    assert values(client, topic) == once()
    eventually(lambda: client.transactions.list() == [], "the loser is rolled back at both homes", within_s=60.0)
    assert values(client, topic) == once()


def test_home_away_behind_the_decision_shows_it_when_back(cluster: Cluster, client: txmq.Client, topic: str) -> None:
    job = Job(client, topic)
    written = job.write()
    broker = job.broker(cluster, is_anchor=False)
    broker.kill()
    with txmq.connect(cluster.address, timeout=5.0) as hasty:
        queries.commit(hasty, job.opened.home, job.at, written.transactions)
    broker.start()
    eventually(lambda: values(client, topic) == once(), "the home has asked", within_s=60.0)


@pytest.mark.parametrize("point", ["client.sink.branches_prepared", "client.sink.decided"], ids=["task", "driver"])
def test_task_or_driver_killed_leaves_all_or_nothing(
    cluster: Cluster, client: txmq.Client, topic: str, point: str
) -> None:
    command = [sys.executable, str(CHILD), cluster.address, topic, topic, str(PARTITIONS)]
    done = subprocess.run(command, env={**os.environ, "TXMQ_CRASH": f"{point}:1"}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    eventually(lambda: client.transactions.list() == [], "nothing is in doubt", within_s=60.0)
    assert values(client, topic) == (once() if point.endswith("decided") else Counter())
    job = Job(client, topic)
    if not job.opened.standing.is_committed:
        job.commit(job.write())
    assert values(client, topic) == once()
