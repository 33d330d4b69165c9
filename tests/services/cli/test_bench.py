"""``txmq bench``: it measures, it says what failed, and it leaves neither broker nor files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import txmq
from txmq.testing.bench.limits import bare_limits
from txmq.testing.bench.loads import LOADS
from txmq.testing.bench.model import PERCENTILES, Target, client_with_topic
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

TIMEOUT_S = 60
NOTICED_S = 0.5  # in which a child would have told that its connection was reset
NAMES = [load.name for load in LOADS]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "txmq.cli.main", "bench", "--seconds", "0.02", *words]


def bench(*words: str, status: int = 0) -> dict[str, Any]:
    result = subprocess.run(command(*words, "--json"), capture_output=True, timeout=TIMEOUT_S, check=False)
    assert (result.returncode, result.stderr) == (status, b""), result.stderr.decode()
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


def refusal(*words: str, status: int = 2) -> str:
    result = subprocess.run(command(*words), capture_output=True, timeout=TIMEOUT_S, check=False, text=True)
    assert (result.returncode, result.stdout) == (status, "")
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_broker_of_its_own_is_measured_and_gone(tmp_path: Path) -> None:
    report = bench("--messages", "200", "--threads", "4", "--directory", str(tmp_path))
    assert [row["name"] for row in report["rows"]] == NAMES
    assert [row["name"] for row in report["rows"] if row["failure"] or row["count"] != 200] == []
    for row in report["rows"]:
        figures = {name: figure["value"] for name, figure in row["figures"].items()}
        assert figures["rate"] > 0
        latencies = [figures[name] for name in PERCENTILES if name in figures]
        assert latencies == sorted(latencies)
    assert report["own_broker"]
    assert report["broker"] == {"sync": "always"}
    assert min(report["bare"].values()) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(txmq.errors.ConnectionLostError):
        txmq.connect(report["server"])


def test_the_table_has_every_row_and_every_bare_limit(tmp_path: Path) -> None:
    chosen = command("--messages", "20", "--rows", "put-single,tx-local", "--directory", str(tmp_path))
    result = subprocess.run(chosen, capture_output=True, timeout=TIMEOUT_S, check=True, text=True)
    for words in ("put-single", "tx-local", "p99.9", "sync 4 KiB", "echo after a sync", "loopback", "ping"):
        assert words in result.stdout
    assert "consume" not in result.stdout


def test_a_running_broker_keeps_only_what_was_its_own(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("bench")
        report = bench("--server", broker.address, "--rows", "put,send-many,consume,deliv")
        assert [row["failure"] for row in report["rows"]] == [None] * 5
        assert not report["own_broker"]
        assert [topic.name for topic in client.topics.list()] == ["bench"]
        assert client.offsets("bench", 0).end == 0


@pytest.mark.parametrize("row", ["put-single", "send-many", "delivery", "tx-threads"])
def test_ctrl_c_shows_what_was_measured_and_deletes_the_topic(broker: BrokerProcess, row: str) -> None:
    words = ("--server", broker.address, "--rows", f"{row},tx-local", "--messages", "5000000", "--json")
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            with txmq.connect(broker.address) as client:
                eventually(lambda: _messages(client) or running.poll() is not None, "the bench sends messages")
                assert running.poll() is None
                running.send_signal(signal.SIGINT)
                said, errors = running.communicate(timeout=TIMEOUT_S)
                assert errors.decode() == ""
                assert running.returncode == 130
                report = json.loads(said)
                assert (report["interrupted"], report["rows"]) == (True, [])
                assert client.topics.list() == []
        finally:
            running.kill()


def test_interrupt_on_shut_connection_stays_one_and_deletes_topic(
    broker: BrokerProcess,
) -> None:
    def interrupted() -> None:
        with client_with_topic(Target(broker.address, "interrupted")) as client:
            client.close()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with txmq.connect(broker.address) as other:
        assert other.topics.list() == []


def _messages(client: txmq.Client) -> int:
    return sum(client.offsets(topic.name, n).end for topic in client.topics.list() for n in range(topic.partitions))


def test_a_row_that_fails_says_why_and_the_others_stay(tmp_path: Path) -> None:
    words = ("--rows", "put-single,tx-local", "--messages", "20", "--size", "100000", "--directory", str(tmp_path))
    report = bench(*words, "--set", "batch_size_bytes_max=65536", status=1)
    assert [row["name"] for row in report["rows"] if "result 413" in (row["failure"] or "")] == ["put-single"]
    assert list(tmp_path.iterdir()) == []


def test_bad_command_line_is_reported_in_one_line(broker: BrokerProcess, tmp_path: Path) -> None:
    assert "--rows puts: no such row; there are put-pipelined" in refusal("--rows", "puts")
    assert "has its settings" in refusal("--server", broker.address, "--sync", "never")
    assert "did you mean 'sync'" in refusal("--set", "synk=never")
    assert "there is no such directory" in refusal("--directory", str(tmp_path / "none"))
    assert "bench measures one broker" in refusal("--server", "txmq://127.0.0.1:1,127.0.0.1:2")
    broker.kill()
    assert "is a broker running" in refusal("--server", broker.address, status=1)


def test_echo_of_bare_limits_is_killed_before_its_connection_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kill = subprocess.Popen.kill

    def kill_late(process: subprocess.Popen[bytes]) -> None:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(NOTICED_S)
        kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill_late)
    assert min(bare_limits(tmp_path, seconds_max=0.02).values()) > 0
    assert capfd.readouterr().err == ""
