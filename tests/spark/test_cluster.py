"""Sink, source, a stream and the audit's job on a Spark standalone cluster: a master and two workers of one core."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import txmq
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.spark import environment
from txmq.testing.processes.spark_cluster import SparkCluster

ROWS = 2_000
TASKS_MAX = 60  # 18 were seen; 2,600 before partitions followed the size of the data
TIMEOUT_S = 280
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


def test_standalone_cluster_runs_sink_source_stream_and_audit(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    for topic in ("orders", "copies"):
        client.topics.create(topic, partitions=2)
    with SparkCluster(tmp_path / "spark") as cluster:
        words = [f"--conf {name}={value}" for name, value in CONF.items()]
        submit = " ".join(["--master", cluster.master, *words, "pyspark-shell"])
        child = Path(__file__).with_name("cluster_child.py")
        command = [sys.executable, str(child), broker.address, table(tmp_path / "o.db"), str(tmp_path), str(ROWS)]
        variables = {**os.environ, **environment(is_quick_start=False), "PYSPARK_SUBMIT_ARGS": submit}
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["tasks"] <= TASKS_MAX
    assert seen | {"tasks": 0} == {"master": cluster.master, "read": ROWS, "status": 1, "tasks": 0}
    told = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert [line["identity"] for line in told["findings"]["missing"]] == [str(ROWS)]
    assert {message.key for message in client.browse("copies")} == {b"%d" % number for number in range(ROWS)}
