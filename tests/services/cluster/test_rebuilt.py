"""An ensemble that lost all it had, or was restored from a backup: real brokers' journals make it whole again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import txmq
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

from .asking import asked, described


def _tried(*words: str) -> subprocess.CompletedProcess[bytes]:
    return fork_server.run([sys.executable, "-m", "txmq.cli.main", *words], timeout=WITHIN_S)


def _run(*words: str, status: int = 0) -> subprocess.CompletedProcess[bytes]:
    done = _tried(*words)
    assert done.returncode == status, done.stderr
    return done


def _filled(cluster: Cluster, name: str) -> None:
    with txmq.connect(cluster.address) as client:
        client.topics.create(name, partitions=4)
        for number in range(4):
            client.producer().send(name, name.encode(), partition=number)


def _rebuild(cluster: Cluster, directory: Path) -> None:
    files = [str(directory / f"facts-{number}.json") for number in range(len(cluster.brokers))]
    for broker, file in zip(cluster.brokers, files, strict=True):
        _run("cluster", "facts", file, "--data", str(broker.data_dir))
    rebuild = ["cluster", "rebuild", cluster.registry, *files]
    eventually(lambda: _tried(*rebuild).returncode == 0, "the sessions of the brokers are over")
    _run(*rebuild)  # it may be repeated


def _check(cluster: Cluster, names: list[str]) -> None:
    """Everything is there, at both brokers; and topics are created as ever."""
    with txmq.connect(cluster.address) as client:
        assert sorted(topic.name for topic in client.topics.list()) == names
        for name in names:
            assert [message.value for message in client.browse(name)] == [name.encode()] * 4
    for broker in cluster.brokers:
        assert described(broker)["registry"]["refused"] == []
    _filled(cluster, "later")
    for broker in cluster.brokers:
        ids = {row["name"]: row["topic_id"] for row in json.loads(asked(broker, "topic", "list", "*")[1])["topics"]}
        assert ids["later"] == max(ids.values())


def test_lost_ensemble_is_made_from_the_journals(tmp_path: Path) -> None:
    with Ensemble(tmp_path / "zoo") as ensemble, Cluster(tmp_path, ensemble, chroot="/prod", size=2) as cluster:
        _filled(cluster, "orders")
        _filled(cluster, "payments")
        before = [described(broker)["home"] for broker in cluster.brokers]
        early = Path(shutil.copytree(cluster.brokers[0].data_dir, tmp_path / "copy"))
        for broker in cluster.brokers:
            broker.restart()
        cluster.kill()
        ensemble.kill()
        shutil.rmtree(ensemble.servers[0].directory / "data")
        ensemble.start()
        _rebuild(cluster, tmp_path)
        cluster.start()
        assert [described(broker)["home"] for broker in cluster.brokers] == before
        _check(cluster, ["orders", "payments"])
        refused = _run("cluster", "rebuild", cluster.registry, *map(str, tmp_path.glob("facts-*.json")), status=1)
        assert b"stop all brokers first" in refused.stderr
        cluster.kill()
        shutil.rmtree(cluster.brokers[0].data_dir)
        shutil.copytree(early, cluster.brokers[0].data_dir)  # from before the newest start: still found out
        cluster.brokers[0].launch()
        assert cluster.brokers[0].wait(WITHIN_S) == 1
        assert "is a copy, or was restored" in cluster.brokers[0].logs().splitlines()[-1]


def test_ensemble_of_a_backup_is_brought_up_to_date(tmp_path: Path) -> None:
    with Ensemble(tmp_path / "zoo") as ensemble, Cluster(tmp_path, ensemble, chroot="/prod", size=2) as cluster:
        _filled(cluster, "orders")
        cluster.kill()
        data = ensemble.servers[0].directory / "data"
        ensemble.kill()
        shutil.copytree(data, tmp_path / "backup")
        ensemble.start()
        cluster.start()
        _filled(cluster, "payments")
        cluster.kill()
        ensemble.kill()
        shutil.rmtree(data)
        shutil.copytree(tmp_path / "backup", data)
        ensemble.start()
        _rebuild(cluster, tmp_path)
        cluster.start()
        _check(cluster, ["orders", "payments"])
