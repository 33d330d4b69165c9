"""Where the system is not Linux: no fdatasync, no posix_fallocate, no reads that do not wait, no uvloop.

A child is told that it runs on macOS, before it imports anything of txmq, and what only Linux has is taken away. What
macOS has instead of them (F_FULLFSYNC) is a call that does nothing here: these tests show that everything is reached
without what is missing, not what a Mac's disk does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import txmq
from txmq.testing.bench.limits import BARE_LIMITS
from txmq.testing.processes.broker import BrokerProcess

_ELSEWHERE = """
import asyncio, fcntl, os, resource, socket, subprocess, sys, sysconfig
sysconfig.get_config_vars()  # reads a file named after the platform
LINUX = {
    os: ("fdatasync", "posix_fallocate", "posix_fadvise", "RWF_NOWAIT", "sched_getaffinity", "pidfd_open"),
    socket: ("TCP_KEEPIDLE", "TCP_QUICKACK", "TCP_USER_TIMEOUT", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
    resource: ("RUSAGE_THREAD",),
}
for module, names in LINUX.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
fcntl.F_FULLFSYNC = fcntl.F_GETFD
sys.modules["uvloop"] = None
sys.platform = "darwin"
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """Variables of a child that is not on Linux."""
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_ELSEWHERE)
    return {"PYTHONPATH": f"{directory}:{Path.cwd()}"}


def test_a_broker_serves_and_recovers_where_linux_calls_are_missing(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    with BrokerProcess(tmp_path / "broker", env=elsewhere) as broker:
        with txmq.connect(broker.address) as client, client.producer() as producer:
            client.topics.create("orders")
            for number in range(50):
                producer.send("orders", b"%d" % number)
            with producer.transaction() as tx:
                producer.send("orders", b"50")
            assert tx.outcome is txmq.Outcome.COMMITTED
        broker.restart()
        with txmq.connect(broker.address) as client:
            assert [message.value for message in client.browse("orders")] == [b"%d" % number for number in range(51)]
        assert broker.stop() == 0
        assert '"error"' not in broker.logs()


def test_the_bare_limits_are_measured_where_linux_calls_are_missing(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    program = (
        "import json, pathlib, sys; from txmq.testing.bench.limits import bare_limits, facts\n"
        "directory = pathlib.Path(sys.argv[1]); facts(directory)\n"
        "print(json.dumps([sys.platform, bare_limits(directory, 0.05)]))"
    )
    measured = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=os.environ | elsewhere, stdout=subprocess.PIPE,
        timeout=60, check=True,
    )  # fmt: skip
    platform, figures = json.loads(measured.stdout)
    assert platform == "darwin"
    assert set(figures) == set(BARE_LIMITS)
    assert min(figures.values()) > 0
