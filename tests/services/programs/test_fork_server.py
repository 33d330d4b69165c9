"""A forked child is what a started one is; tests rely on that wherever they start a broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import ForkServer, Process, run, start_logged

from .child_facts import POINT

WAIT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One that has loaded what is run, and has run a command."""
    with ForkServer(["tests.services.programs.child_facts"], [["txmq.cli.main", "version"]]) as made:
        yield made


def child_facts(directory: Path, *words: str, server: ForkServer | None = None, **env: str) -> tuple[int, list[str]]:
    """The exit status and the log of ``child_facts``, forked by ``server`` or started."""
    log, command = directory / "log", [sys.executable, "-m", "tests.services.programs.child_facts", *words]
    ForkServer.running, before = server, ForkServer.running
    try:
        log.unlink(missing_ok=True)
        child = start_logged(command, log, {name: os.environ[name] for name in os.environ.keys() - {"HOME"}} | env)
    finally:
        ForkServer.running = before
    assert isinstance(child, subprocess.Popen) is (server is None)
    return child.wait(WAIT_S), log.read_text().splitlines()


@pytest.mark.parametrize("words", [("0",), ("3", "--more")])
def test_a_forked_child_sees_what_a_started_one_sees(tmp_path: Path, server: ForkServer, words: tuple[str]) -> None:
    forked = child_facts(tmp_path, *words, server=server, TXMQ_SYNC="never")
    started = child_facts(tmp_path, *words, TXMQ_SYNC="never")
    assert forked == started
    assert forked[0] == int(words[0])
    said = json.loads(forked[1][0])
    assert said["env"]["TXMQ_SYNC"] == "never"
    assert "HOME" not in said["env"]
    assert said["descriptors"] == [0, 1, 2]
    assert said["is_leader"]
    assert forked[1][-1] == "the end"


def test_exception_of_child_is_logged_and_its_status_is_one(tmp_path: Path, server: ForkServer) -> None:
    for asked in (server, None):
        status, log = child_facts(tmp_path, "raise", server=asked)
        assert (status, [line for line in log if line.startswith("LookupError")]) == (1, ["LookupError: as asked"])


def test_crash_point_is_armed_only_for_child_that_names_it(tmp_path: Path, server: ForkServer) -> None:
    status, log = child_facts(tmp_path, "0", server=server, TXMQ_CRASH=f"{POINT}:1")
    assert status == -signal.SIGKILL
    assert "the end" not in log
    assert child_facts(tmp_path, "0", server=server)[0] == 0


def test_what_interpreter_reads_when_it_starts_asks_for_interpreter(tmp_path: Path, server: ForkServer) -> None:
    command = [sys.executable, "-m", "tests.services.programs.child_facts", "0"]
    environment = dict(os.environ)
    assert server.can(command, environment | {"TXMQ_SYNC": "never"})
    assert not server.can(command, environment | {"PYTHONOPTIMIZE": "1"})
    assert not server.can(["sh", "-c", "exit 0"], environment)
    assert start_logged(["sh", "-c", "exit 5"], tmp_path / "log", environment).wait(WAIT_S) == 5


@pytest.mark.parametrize("is_forked", [True, False])
def test_what_command_reads_writes_and_complains_of_goes_three_ways(is_forked: bool, server: ForkServer) -> None:
    ForkServer.running, before = server if is_forked else None, ForkServer.running
    try:
        formatted = run([sys.executable, "-m", "json.tool", "--compact"], stdin=b'{ "a": 1 }', timeout=WAIT_S)
        refused = run([sys.executable, "-m", "json.tool"], stdin=b"{", timeout=WAIT_S)
        with pytest.raises(subprocess.TimeoutExpired):
            run([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"], timeout=0.0)
    finally:
        ForkServer.running = before
    assert (formatted.returncode, formatted.stdout, formatted.stderr) == (0, b'{"a":1}\n', b"")
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"Expecting property name" in refused.stderr


def test_child_is_waited_for_and_killed_as_one_of_subprocess(tmp_path: Path, server: ForkServer) -> None:
    with BrokerProcess(tmp_path / "broker") as broker:
        child: Process | None = broker._process
        assert child is not None
        assert not isinstance(child, subprocess.Popen)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.0)
        assert child.poll() is None
        assert broker.stop() == 0
        child.kill()  # nobody is there
        assert child.poll() == child.wait() == 0
        assert broker.start().is_running
        broker.kill()
        assert broker.returncode == -signal.SIGKILL


def test_children_outlive_the_server_and_a_later_start_fails_fast(tmp_path: Path) -> None:
    with ForkServer() as server, BrokerProcess(tmp_path / "broker") as broker:
        assert server._server is not None
        server._server.kill()
        server._server.wait()
        with pytest.raises(OSError, match=r"fork server|Broken pipe|reset"):
            child_facts(tmp_path, "0", server=server)
        assert broker.stop() == 0


def test_without_a_block_nothing_is_forked(tmp_path: Path) -> None:
    before = ForkServer.running
    with ForkServer() as server:
        assert ForkServer.running is server
    assert ForkServer.running is before
