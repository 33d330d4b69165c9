"""The broker as a process: ready file, signals, exit statuses, logs, and what it refuses at the door."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import txmq
from tests.stats_page import OF_CLUSTERS, fields
from txmq.broker.shell.first_administrator import content_of
from txmq.protocol.scram import keys_of
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess, free_port
from txmq.testing.processes.fork_server import ForkServer

from .bad_inputs import batch
from .wire import Wire


@pytest.fixture(autouse=True)
def _started_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkServer, "running", None)


class Closed(BrokerProcess):
    """A broker that is started with standard input, output and error closed."""

    def _command(self) -> list[str]:
        return ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *super()._command()]


def test_last_words_of_a_process_without_streams_spare_the_journal(tmp_path: Path) -> None:
    """Python's faulthandler writes them to descriptor 2."""
    closed: BrokerProcess = Closed(tmp_path / "broker", env={"PYTHONFAULTHANDLER": "1"})
    with closed as broker, txmq.connect(broker.address) as client:
        client.topics.create("orders")
        with client.producer() as producer:
            for number in range(20):
                producer.send("orders", b"%d" % number)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGABRT)
        broker.wait(60.0)
    with BrokerProcess(tmp_path / "broker") as broker, txmq.connect(broker.address) as client:
        assert client.offsets("orders", 0).end == 20


def test_page_on_stats_has_every_field_and_no_other(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        told = json.loads(client.stats("json"))
    assert told["broker"].keys() == fields("The broker") - OF_CLUSTERS
    assert told["transactions"].keys() == fields("`transactions`") - OF_CLUSTERS


def test_ready_file_holds_the_address_and_goes_at_the_stop(broker: BrokerProcess) -> None:
    ready = broker.data_dir.with_name(broker.data_dir.name + ".ready")
    assert ready.read_text() == f"{broker.host}:{broker.port}\n"
    with txmq.connect(broker.address) as client:
        client.ping()
    assert broker.stop() == 0
    assert not ready.exists()


def test_kill_leaves_the_signal_and_a_restart_keeps_the_address(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders", partitions=2)
    before = broker.address
    broker.kill()
    assert broker.returncode == -signal.SIGKILL
    broker.restart()
    assert broker.address == before
    with txmq.connect(broker.address) as client:
        assert client.topics.describe("orders").partitions == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_order(broker: BrokerProcess, number: signal.Signals) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, number)
    assert broker.wait(60.0) == 0
    assert json.loads(broker.logs().splitlines()[-1])["event"] == "stopped"


def test_a_hangup_leaves_a_broker_without_certificates_serving(broker: BrokerProcess) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGHUP)
    eventually(lambda: "nothing to reload" in broker.logs(), "the signal is told")
    with txmq.connect(broker.address) as client:
        client.ping()
    assert broker.stop() == 0


def test_a_hangup_during_the_start_is_taken_behind_it(tmp_path: Path) -> None:
    """The broker stands still before it serves: somebody has yet to write the file that it reads."""
    file = tmp_path / "administrator"
    os.mkfifo(file, 0o600)
    broker = BrokerProcess(tmp_path / "broker", settings={"first_administrator": str(file)})

    def is_written() -> bool:
        assert broker.is_running
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False  # it does not read yet
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(content_of("ops", keys_of("pencil", bytes(16))))
        return True

    try:
        broker.launch()
        eventually(lambda: '"recovered"' in broker.logs(), "it has recovered")
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGHUP)
        eventually(is_written, "it reads the file")
        broker.wait_until_ready()
        eventually(lambda: "nothing to reload" in broker.logs(), "the signal is told")
        assert broker.stop() == 0
    finally:
        broker.kill()


def test_every_line_of_its_log_is_json(broker: BrokerProcess) -> None:
    broker.stop()
    lines = [json.loads(line) for line in broker.logs().splitlines()]
    assert [line["event"] for line in lines if line["event"] in ("serving", "stopped")] == ["serving", "stopped"]


def test_a_port_that_is_taken_ends_it_in_one_line(broker: BrokerProcess, tmp_path: Path) -> None:
    second = BrokerProcess(tmp_path / "second", listen=f"127.0.0.1:{broker.port}")
    with pytest.raises(BrokerFailedError) as caught:
        second.start()
    assert "address already in use" in str(caught.value).lower()
    assert "--listen" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_the_ready_file_of_an_ipv6_address_is_an_address(tmp_path: Path) -> None:
    ready = tmp_path / "broker.ready"
    process = BrokerProcess(tmp_path / "broker", listen="[::1]:0")
    if not _has_ipv6():
        with pytest.raises(BrokerFailedError, match="cannot listen on"):
            process.start()
        return
    with process as broker, txmq.connect(f"txmq://{ready.read_text().strip()}") as client:
        client.ping()
        assert ready.read_text() == f"[::1]:{broker.port}\n"


def test_an_address_of_another_machine_is_told_as_such(tmp_path: Path) -> None:
    """192.0.2.0/24 is for documentation (RFC 5737): nobody has it."""
    allowed = {"insecure_plaintext": True, "insecure_anonymous": True}
    process = BrokerProcess(tmp_path / "broker", listen="192.0.2.1:8123", settings=allowed)
    with pytest.raises(BrokerFailedError, match="this machine has no such address"):
        process.start()


@pytest.mark.parametrize(
    ("option", "said"), [("--data", "cannot open the data directory"), ("--ready-file", "cannot write the ready file")]
)
def test_unusable_path_ends_the_broker_in_one_line_naming_it(tmp_path: Path, option: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "below")
    given = {"--data": str(tmp_path / "data"), "--listen": "127.0.0.1:0", option: path}
    words = [word for pair in given.items() for word in pair]
    result = subprocess.run(
        [sys.executable, "-m", "txmq.cli.main", "broker", "--set", "log_level=error", *words],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith(f"txmq: {said} {path}: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("sync", ["interval", "never"])
def test_relaxed_put_is_synced_in_time_and_not_tick_later(tmp_path: Path, sync: str) -> None:
    (tmp_path / "sitecustomize.py").write_text("import txmq.broker.shell.server\ntxmq.broker.server.TICK_S = 3600.0\n")
    env = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    with BrokerProcess(tmp_path / "broker", settings={"sync": sync}, env=env) as broker, Wire(broker) as wire:
        assert wire.ask(b"topic create t 1\r\n")[0] == 200
        assert wire.ask(b"put t 0 raw 5 2\r\nhello")[0] == 200
        assert wire.ask(b"get t 0 0 1000 wait=30000 3\r\n")[1].endswith(b"hello\x00")


def test_a_crash_point_ends_the_process_where_it_says(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
    broker.restart(env={"TXMQ_CRASH": "broker.put.accepted:1"})
    with txmq.connect(broker.address) as client, client.producer() as producer:
        with pytest.raises(txmq.TxmqError):
            producer.send("orders", b"never acknowledged", timeout=10.0)
        assert broker.wait(60.0) == -signal.SIGKILL
        broker.start(env={})
        assert client.offsets("orders", 0).end == 0


def test_settings_reach_the_broker_and_a_bad_one_is_named(tmp_path: Path) -> None:
    process = BrokerProcess(tmp_path / "broker", settings={"connections_max": 0})
    with pytest.raises(BrokerFailedError, match="status 2") as caught:
        process.start()
    assert "connections_max = '0'" in str(caught.value)


def test_variables_of_the_parent_do_not_reach_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXMQ_SYNC", "nonsense")
    with BrokerProcess(tmp_path / "broker") as broker:
        assert broker.is_running


def test_a_start_that_is_interrupted_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_timeout: float) -> None:
        raise KeyboardInterrupt

    process = BrokerProcess(tmp_path / "broker")
    monkeypatch.setattr(process, "wait_until_ready", interrupted)
    with pytest.raises(KeyboardInterrupt), process:
        pytest.fail("it did not start")
    assert process.returncode == -signal.SIGKILL


def test_free_ports_are_below_those_that_the_system_hands_out() -> None:
    assert 18_000 <= free_port() < 32_768


def test_no_two_processes_are_given_one_port(tmp_path: Path) -> None:
    """Found: a broker got the port at which another test's clients looked for one that was away."""
    program = """
import sys, pathlib
from txmq.testing.processes.broker import BrokerProcess, free_port
BrokerProcess.ports_file = pathlib.Path(sys.argv[1])
for _ in range(300):
    print(free_port())
"""
    command = [sys.executable, "-c", program, str(tmp_path / "ports")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    given = [port for process in running for port in process.communicate()[0].split()]
    assert len({*given}) == len(given) == 900


def test_nothing_but_the_loopback_address_is_served_without_insecure(tmp_path: Path) -> None:
    with pytest.raises(BrokerFailedError, match="--insecure"):
        BrokerProcess(tmp_path / "broker", listen="0.0.0.0:0").start()


def test_clean_stop_rolls_an_open_stream_back_without_a_failure(broker: BrokerProcess) -> None:
    with Wire(broker) as wire:
        assert wire.ask(b"topic create t 1\r\n")[0] == 200
        hello = json.loads(wire.ask(b"hello 1 me session=new 2\r\n")[1])
        txid = f"{hello['cluster']}-{hello['home']}-{hello['session']}-1".encode()
        content = bytes(batch())
        assert wire.ask(b"put t 0 tx=%b %d 3\r\n%b" % (txid, len(content), content))[0] == 200
        assert broker.stop() == 0
    assert '"error"' not in broker.logs()
    broker.start()
    with Wire(broker) as wire:
        assert wire.ask(b"outcome %b 1\r\n" % txid) == (200, b"rolled-back\n")
