"""A reader and its broker, killed at every step of publishing: each event is in the topics once, in order.

The source is a script (``scripted``), whose connection ends now and then; the check knows nothing of the publisher.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from tests.services.binlog.scripted import Script, require_published
from txmq.runtime.crashpoints import VARIABLE
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import ForkServer, Process

WAIT_S = 120.0
SEED, COUNT = 7, 60
READER_POINTS = (
    "binlog.positions.created:1", "binlog.positions.begun:1", "binlog.topic.made:2", "binlog.tx.filled:1",
    "binlog.tx.filled:6", "binlog.tx.committed:1", "binlog.tx.committed:5", "binlog.position.read:4",
)  # fmt: skip
BROKER_POINTS = (
    "broker.put.accepted:1", "journal.append.before:9", "journal.append.written:12", "journal.sync.done:10",
    "journal.sync.done:15", "broker.apply.before:13", "broker.apply.done:11", "broker.answers.sent:14",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[ForkServer]:
    """Readers are forked."""
    with ForkServer(("tests.services.binlog.reader_child", "txmq.broker.shell.process")) as server:
        yield server


def start(broker: BrokerProcess, name: str, log: Path, crash: str = "", seed: int = SEED) -> Process:
    """A reader as a process."""
    command = [sys.executable, "-m", "tests.services.binlog.reader_child", broker.address, name, str(seed), str(COUNT)]
    environment = {**os.environ, VARIABLE: crash} if crash else dict(os.environ)
    return fork_server.start_logged(command, log, environment)


def finish(broker: BrokerProcess, name: str, log: Path) -> None:
    """A reader that publishes what is left, to the end."""
    assert start(broker, name, log).wait(WAIT_S) == 0, log.read_text()
    assert log.read_text().splitlines()[-1] == "published"


def test_reader_killed_at_each_step_repeats_nothing_and_skips_nothing(
    shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with txmq.connect(shared_broker.address) as client:
        for number, point in enumerate(READER_POINTS):
            name = f"r{number}"
            assert start(shared_broker, name, log, point).wait(WAIT_S) == -signal.SIGKILL, (point, log.read_text())
            finish(shared_broker, name, log)
            require_published(client, Script(SEED, COUNT), name)


def test_broker_killed_at_each_step_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with BrokerProcess(tmp_path / "broker") as broker:
        broker.stop()
        for number, point in enumerate(BROKER_POINTS):
            name = f"b{number}"
            broker.start(env={VARIABLE: point})
            reader = start(broker, name, log)
            assert broker.wait(WAIT_S) == -signal.SIGKILL, point
            broker.start(env={})
            assert reader.wait(WAIT_S) == 0, (point, log.read_text())
            with txmq.connect(broker.address) as client:
                require_published(client, Script(SEED, COUNT), name)
            broker.stop()
