"""A disk that is lost for ever, of one of three real brokers: reads go on, and nothing waits once it is given up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import txmq
from txmq.errors import PartialResultError
from txmq.redo import entries, inspect
from txmq.runtime.os_disk import OSDisk
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

from .asking import asked, described
from .conftest import NUMBERS

PARTITIONS, REASON = 9, "ada: disk burnt"


@pytest.fixture
def cluster(tmp_path: Path, ensemble: Ensemble) -> Iterator[Cluster]:
    """Three brokers with a message in each partition, and with groups."""
    with Cluster(tmp_path, ensemble, chroot=f"/lost-{next(NUMBERS)}") as made:
        with txmq.connect(made.address) as client:
            for name in ("orders", "gone"):
                client.topics.create(name, partitions=PARTITIONS)
            for number in range(PARTITIONS):
                client.producer().send("orders", b"%d" % number, partition=number)
            client.groups.reset("billing", [["orders", number, 0] for number in range(PARTITIONS)], create=True)
        yield made


def _run(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "txmq.cli.main", *words, "--bootstrap", cluster.address]
    return fork_server.run(command, timeout=WITHIN_S)


def _lose(cluster: Cluster) -> str:
    """The directory of the last broker is lost; its home."""
    lost = cluster.brokers[2]
    home = str(described(lost)["home"])
    lost.kill()
    shutil.rmtree(lost.data_dir)
    for broker in cluster.brokers[:2]:
        eventually(partial(_misses_partitions, broker), "its session is over")
    return home


def _misses_partitions(broker: BrokerProcess) -> bool:
    return any(row["unavailable"] for row in described(broker)["topics"])


def _left(cluster: Cluster, home: str) -> list[int]:
    body = json.loads(asked(cluster.brokers[0], "topic", "describe", "orders")[1])
    return [number for number, owner in enumerate(body["homes"]) if owner != home]


def test_reads_give_what_is_there_then_what_is_missing(cluster: Cluster) -> None:
    home = _lose(cluster)
    left = _left(cluster, home)
    read = _run(cluster, "consume", "--topic", "orders")
    assert sorted(read.stdout.split()) == [b"%d" % number for number in left]
    assert read.returncode == 1
    assert f"home broker-2 ({home}) is away" in read.stderr.decode()
    with txmq.connect(cluster.address) as client:
        values: list[bytes | None] = []
        with pytest.raises(PartialResultError, match=f"topic orders, partition .*{home}") as partial_result:
            values.extend(message.value for message in client.browse("orders"))
        assert sorted(filter(None, values)) == [b"%d" % number for number in left]
        assert partial_result.value.away == [f"broker-2 ({home})"]
        with pytest.raises(PartialResultError) as of_ranges:
            client.ranges("orders")
        assert [found.partition for found in of_ranges.value.found] == left


def test_nothing_waits_for_a_home_that_is_given_up(cluster: Cluster) -> None:
    assert asked(cluster.brokers[0], "topic", "delete", "gone")[0] == 200
    refused = _run(cluster, "cluster", "retire", "broker-2", "--lost", "--yes", "--reason", REASON)
    assert (refused.returncode, b"it is not lost" in refused.stderr) == (1, True)
    cluster.brokers[2].kill()
    assert asked(cluster.brokers[0], "topic", "create", "last", "partitions=4")[0] == 200
    cluster.brokers[2].start()
    assert asked(cluster.brokers[2], "topic", "create", "while-led", f"partitions={PARTITIONS}")[0] == 200
    home = _lose(cluster)
    left = _left(cluster, home)
    assert asked(cluster.brokers[0], "topic", "delete", "while-led")[0] == 200
    assert _run(cluster, "group", "delete", "billing").returncode == 1
    unsaid = _run(cluster, "cluster", "retire", "broker-2", "--yes", "--reason", REASON)
    assert (unsaid.returncode, b"say --lost" in unsaid.stderr) == (2, True)
    said = _run(cluster, "cluster", "retire", "broker-2", "--lost", "--yes", "--reason", REASON)
    assert (said.returncode, said.stderr.decode()) == (0, f"home {home} is given up\n")
    for words in (
        ("group", "reset", "billing", "--topic", "orders", "--to", "latest"), ("group", "delete", "billing"),
        ("group", "list"), ("topic", "create", "while-led"), ("tx", "list"), ("stats",),
    ):  # fmt: skip
        done = _run(cluster, *words)
        assert done.returncode == 0, (words, done.stderr)
        assert b"away" not in done.stderr, (words, done.stderr)
    read = _run(cluster, "consume", "--topic", "orders")
    assert (read.returncode, sorted(read.stdout.split())) == (0, [b"%d" % number for number in left])
    shown = _run(cluster, "cluster", "describe")
    assert f"given up: {REASON}" in shown.stdout.decode()
    fields = {"home": home, "reason": REASON}
    for broker in cluster.brokers[:2]:
        eventually(partial(_is_journaled, OSDisk(broker.data_dir), fields), "each of the others journals it")
        broker.restart()
    with txmq.connect(cluster.address) as client, client.consumer("new", ["orders"], start="earliest") as consumer:
        values: list[bytes | None] = []
        eventually(lambda: len(_taken(consumer, values)) >= len(left), "a consumer reads what is left")
        assert sorted(filter(None, values)) == [b"%d" % number for number in left]


def _taken(consumer: txmq.Consumer, values: list[bytes | None]) -> list[bytes | None]:
    values.extend(message.value for message in consumer.poll(100, 0.1))
    return values


def _is_journaled(disk: OSDisk, fields: dict[str, str]) -> bool:
    found = [
        json.loads(bytes(body))
        for record in inspect.dump(disk)
        for kind, _, body in entries.split(record.payload)
        if kind == entries.HOME_RETIRED
    ]
    return found == [fields]
