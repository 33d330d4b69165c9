"""A reader in ordered mode and its broker, killed at every step: each event is in the topics once, in order.

The source and the check are those of ``test_kills``.
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
from txmq.client.spooling.spool import Spool
from txmq.runtime.crashpoints import VARIABLE
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import ForkServer, Process

WAIT_S = 120.0
SEED, COUNT, MORE = 7, 50, 10
READER_POINTS = (
    "binlog.positions.created:1", "binlog.spool.appended:1", "binlog.tx.committed:1", "binlog.owner.taken:1",
    "binlog.topic.made:2", "binlog.spool.appended:9", "client.ordered.pinned:3", "client.ordered.flown:5",
    "client.ordered.answered:2", "client.ordered.removed:3", "binlog.owner.released:1",
)  # fmt: skip
BROKER_POINTS = ("journal.sync.done:15", "broker.answers.sent:14")


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[ForkServer]:
    """Readers are forked."""
    with ForkServer(("tests.services.binlog.reader_child", "txmq.broker.shell.process")) as server:
        yield server


def start(
    broker: BrokerProcess, name: str, spool: Path, crash: str = "", *, count: int = COUNT, mode: str = "ordered",
    endless: str = "",
) -> Process:  # fmt: skip
    """A reader as a process; in transactional mode its spool names the log alone."""
    command = [
        sys.executable, "-m", "tests.services.binlog.reader_child", broker.address, name, str(SEED), str(count),
        *((str(spool), endless) if mode == "ordered" else ()),
    ]  # fmt: skip
    environment = {**os.environ, VARIABLE: crash} if crash else dict(os.environ)
    return fork_server.start_logged(command, spool.with_suffix(".log"), environment)


def test_reader_killed_at_each_step_repeats_and_skips_nothing(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    readers = {}
    for number, point in enumerate(READER_POINTS):
        name = f"o{number}"
        readers[name] = start(shared_broker, name, tmp_path / name, point)
    with txmq.connect(shared_broker.address) as client:
        for name, killed in readers.items():
            spool, log = tmp_path / name, tmp_path / f"{name}.log"
            assert killed.wait(WAIT_S) == -signal.SIGKILL, (name, log.read_text())
            assert start(shared_broker, name, spool).wait(WAIT_S) == 0, (name, log.read_text())
            assert log.read_text().splitlines()[-1] == "published"
            with Spool(spool, read_only=True) as left:
                assert not left.summary()
            require_published(client, Script(SEED, COUNT), name)


@pytest.mark.parametrize("mode", ["ordered", "transactional"])
def test_killed_behind_its_release_it_is_out_of_date(shared_broker: BrokerProcess, tmp_path: Path, mode: str) -> None:
    name, spool, other = f"released_{mode}", tmp_path / "spool", tmp_path / "other"
    assert start(shared_broker, name, spool, "binlog.owner.released:1").wait(WAIT_S) == -signal.SIGKILL
    assert start(shared_broker, name, other, count=COUNT + MORE, mode=mode).wait(WAIT_S) == 0
    assert other.with_suffix(".log").read_text().splitlines()[-1] == "published"
    assert start(shared_broker, name, spool, count=COUNT + MORE, endless="endless").wait(WAIT_S) == 1
    assert "it is out of date, and nothing of it was sent" in spool.with_suffix(".log").read_text()
    with txmq.connect(shared_broker.address) as client:
        require_published(client, Script(SEED, COUNT + MORE), name)


def test_reader_goes_on_without_broker_and_both_are_killed(tmp_path: Path) -> None:
    spool = tmp_path / "away"
    with BrokerProcess(tmp_path / "broker") as broker:
        assert start(broker, "away", spool, "client.ordered.flown:8").wait(WAIT_S) == -signal.SIGKILL
        broker.kill()
        killed = start(broker, "away", spool, "binlog.spool.appended:3")
        assert killed.wait(WAIT_S) == -signal.SIGKILL
        log = spool.with_suffix(".log")
        assert start(broker, "away", spool).wait(WAIT_S) == 0, log.read_text()
        assert log.read_text().splitlines()[-1] == "published"
        with Spool(spool, read_only=True) as left:
            assert left.summary()
        broker.start()
        assert start(broker, "away", spool).wait(WAIT_S) == 0, log.read_text()
        with txmq.connect(broker.address) as client:
            require_published(client, Script(SEED, COUNT), "away")


def test_broker_killed_at_each_step_is_waited_for(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "broker") as broker:
        broker.stop()
        for number, point in enumerate(BROKER_POINTS):
            spool = tmp_path / f"b{number}"
            broker.start(env={VARIABLE: point})
            reader = start(broker, spool.name, spool)
            assert broker.wait(WAIT_S) == -signal.SIGKILL, point
            broker.start(env={})
            assert reader.wait(WAIT_S) == 0, (point, spool.with_suffix(".log").read_text())
            with txmq.connect(broker.address) as client:
                require_published(client, Script(SEED, COUNT), spool.name)
            broker.stop()
