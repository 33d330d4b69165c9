"""A child process and Ctrl-C: none is left that nobody knows of."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

from txmq.errors import TxmqError
from txmq.testing.processes.child import ChildProcess
from txmq.testing.processes.fork_server import Process, start_logged


class Sleeper(ChildProcess):
    """A process that does nothing for an hour."""

    failure, title = TxmqError, "the sleeper"

    def start(self, error: type[BaseException] | None = None) -> Self:
        self._spawn([sys.executable, "-c", "import time; time.sleep(3600)"])
        if error is not None:
            raise error
        return self


def test_interrupt_while_it_is_spawned_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, started = signal.getsignal(signal.SIGINT), list[Process]()

    def struck(command: Sequence[str], log_file: Path, env: Mapping[str, str]) -> Process:
        started.append(start_logged(command, log_file, env))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr("txmq.testing.processes.child.start_logged", struck)
    with pytest.raises(KeyboardInterrupt), Sleeper(tmp_path / "log"):
        pytest.fail("the block must not begin")
    assert started[0].poll() == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is handler


def test_start_that_fails_leaves_no_process(tmp_path: Path) -> None:
    class Failing(Sleeper):
        def start(self, error: type[BaseException] | None = TxmqError) -> Self:
            return super().start(error)

    sleeper = Failing(tmp_path / "log")
    with pytest.raises(TxmqError), sleeper:
        pytest.fail("the block must not begin")
    assert sleeper.returncode == -signal.SIGKILL
