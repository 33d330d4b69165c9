"""Sink, source, a stream and the audit's job on a Spark standalone cluster: a master and two workers of one core."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from shlex import quote

import pytest

import txmq
from txmq.testing.eventually import eventually
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.spark import SparkCluster, environment
from txmq.testing.processes.zookeeper import Ensemble

ROWS = 2_000
TASKS_MAX = 60  # 18 were seen; 2,600 before partitions followed the size of the data
TIMEOUT_S = 1200  # under a load of 8 a session of Spark alone takes minutes
CONF = {
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false",
    "spark.executor.memory": "512m", "spark.ui.showConsoleProgress": "false",
}  # fmt: skip


def table(path: Path) -> str:
    """2,000 orders, of which the last has no message; the database's URL."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        connection.executemany("INSERT INTO orders VALUES (?)", [(number,) for number in range(ROWS + 1)])
    return f"sqlite:{path}"


@pytest.fixture
def cluster(tmp_path: Path, ensemble: Ensemble) -> Iterator[Cluster]:
    """Three brokers."""
    with Cluster(tmp_path, ensemble, chroot="/spark") as made:
        yield made


def _whose_classes_are_not_of(archive: Path, spark: SparkCluster) -> list[int]:
    """Found: master, workers and executors had another class path, and Java leaves the archive out without a word."""
    processes = [*spark.daemons, *spark.executors()]
    return [pid for pid in processes if archive.exists() and str(archive) not in Path(f"/proc/{pid}/maps").read_text()]


def _lose_one_of_each(spark: SparkCluster, cluster: Cluster) -> None:
    """Kill a broker and an executor at once; Spark makes another executor."""
    broker, executor = cluster.brokers[1], spark.executors()[0]
    os.kill(executor, signal.SIGKILL)
    broker.restart()


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_standalone_cluster_runs_sink_source_stream_and_audit(cluster: Cluster, tmp_path: Path) -> None:
    """Over three brokers; one of them and an executor are killed between two batches of the stream."""
    with txmq.connect(cluster.address) as client, SparkCluster(tmp_path / "spark") as spark:
        eventually(lambda: len(client.routes.all_links()) == 3, "all homes are known")
        for topic in ("orders", "copies"):
            client.topics.create(topic, partitions=3)
        quick = environment()
        settings = {**CONF, "spark.executor.extraJavaOptions": quick["SPARK_SUBMIT_OPTS"]}
        words = [f"--conf {quote(f'{name}={value}')}" for name, value in settings.items()]
        submit = " ".join(["--master", spark.master, *words, "pyspark-shell"])
        child = Path(__file__).with_name("cluster_child.py")
        told = [cluster.registry, cluster.address, table(tmp_path / "o.db"), str(tmp_path), str(ROWS)]
        variables = {**os.environ, **quick, "PYSPARK_SUBMIT_ARGS": submit}
        with (
            (tmp_path / "driver.log").open("w") as log,
            subprocess.Popen([sys.executable, str(child), *told], env=variables, stdout=log, stderr=log, cwd=tmp_path)
            as driver,
        ):  # fmt: skip
            try:
                eventually(
                    lambda: driver.poll() is not None or any(client.offsets("copies", n).end for n in range(3)),
                    "a batch of the stream", within_s=TIMEOUT_S,
                )  # fmt: skip
                if driver.poll() is None:
                    assert _whose_classes_are_not_of(Path(quick["SPARK_SUBMIT_OPTS"].rpartition("=")[2]), spark) == []
                    _lose_one_of_each(spark, cluster)
                driver.wait(TIMEOUT_S)
            finally:
                driver.kill()
        out = (tmp_path / "driver.log").read_text("utf-8")
        assert driver.returncode == 0, out[-4000:]
        seen = json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))
        assert seen["tasks"] <= TASKS_MAX
        assert seen | {"tasks": 0} == {"master": spark.master, "read": ROWS, "status": 1, "tasks": 0}
        found = json.loads((tmp_path / "audit" / "audit.json").read_text())["findings"]
        assert [line["identity"] for line in found["missing"]] == [str(ROWS)]
        for topic in ("orders", "copies"):
            keys = Counter(message.key for message in client.browse(topic))
            assert keys == {b"%d" % number: 1 for number in range(ROWS)}
            assert all(client.offsets(topic, partition).end for partition in range(3))
