"""The campaign's child processes: workers, reader, resolver; each start has a new name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import txmq
from txmq.config import ENVIRONMENT_PREFIX
from txmq.testing.eventually import eventually
from txmq.testing.processes.database_programs import VARIABLE as TEST_DATABASE
from txmq.testing.processes.fork_server import Process, start_logged

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 90.0  # a statement of MariaDB waits 50 s for a lock that a killed process had
CONNECT_S, CONNECT_AGAIN_S = 60.0, 0.05


class CampaignError(Exception):
    """The campaign itself could not go on: something that it waits for did not happen."""


class Child:
    """One role and the process that plays it now."""

    def __init__(self, name: str, directory: Path, command: Callable[[str], list[str]]) -> None:
        self.name, self._directory, self._command = name, directory, command
        self._runs = 0
        self._process: Process | None = None

    def start(self, crash: str | None = None) -> None:
        """A new process; ``crash`` is ``point:nth``."""
        self._runs += 1
        environment = {
            name: text for name, text in os.environ.items()
            if not name.startswith(ENVIRONMENT_PREFIX) or name == TEST_DATABASE
        }  # fmt: skip
        if crash is not None:
            environment["TXMQ_CRASH"] = crash
        command = [sys.executable, "-m", *self._command(f"{self.name}.{self._runs}")]
        self._process = start_logged(command, self._directory / f"{self.name}.log", environment, str(ROOT))

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether the process has stopped itself (SIGSTOP).

        Raises:
            CampaignError: it ended.
        """
        if self._process is None or not self.is_running:
            raise CampaignError(f"{self.name} ended with status {self.status}; see {self.name}.log")
        return has_stopped(self._process.pid)

    @property
    def run_name(self) -> str:
        """The name of its last process."""
        return f"{self.name}.{self._runs}"

    @property
    def status(self) -> int | None:
        """How the last process ended."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None and self.is_running:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL and wait."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, and ``wait_stopped``."""
        self.signal(signal.SIGTERM)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Wait for the end after SIGTERM.

        Raises:
            CampaignError: it does not end, or not with status 0.
        """
        eventually(lambda: not self.is_running, f"{self.name} stops", STOP_S, CampaignError)
        if self.status not in (0, -signal.SIGTERM):  # the latter before it was ready to hear it
            raise CampaignError(f"{self.name} ended with status {self.status}; see {self.name}.log")


def connect(address: str, name: str) -> txmq.Client:
    """Connect to a broker that may be away for a while.

    Raises:
        txmq.errors.ConnectionLostError: it stays away.
    """
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return txmq.connect(address, name=name)
        except txmq.errors.ConnectionLostError:
            if time.monotonic() > deadline:
                raise
            pause(CONNECT_AGAIN_S)


def has_stopped(pid: int) -> bool:
    """Whether a process that is there has stopped itself (SIGSTOP)."""
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(") ")[2][0] == "T"


def run_in_threads(runs: Iterable[Callable[[], None]]) -> None:
    """Run each in a thread of its own, and wait for their ends.

    Signals are the main thread's: Linux hands one to any thread that does not block it and changes its mask just then,
    as ``pause`` does, and Python would run the handler only when the main thread wakes.
    """
    threads = [threading.Thread(target=run) for run in runs]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        for thread in threads:
            thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for thread in threads:
        thread.join()


def pause(seconds: float) -> None:
    """Let the children work; there is nothing to be notified by across processes."""
    signal.sigtimedwait((), seconds)
