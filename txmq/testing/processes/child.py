"""A real server as a child process, to be killed, paused and restarted: the base of all launchers.

Invariants:
* No wait without a deadline; a child that ends early is reported at once, with the end of its log.
* The log is one file, appended to by every start.
* The child is killed when the object's block ends, and when this process ends in an orderly way. Ctrl-C leaves none:
  it waits until the process is known, and one whose block has not begun yet is killed.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import ClassVar, Self

from txmq.errors import TxmqError
from txmq.testing.eventually import eventually
from txmq.testing.processes.fork_server import Process, start_logged

STOP_TIMEOUT_S = 60.0
_LOG_TAIL_BYTES = 2000


class ChildProcess(ABC):
    """One server; its launcher derives from this. Usable as a block: killed at its end.

    Args:
        log_file: for its output.

    Attributes:
        failure: raised if it does not start, serve or stop; the text ends with the end of the log.
        title: what it is called in errors.
    """

    failure: ClassVar[type[TxmqError]]
    title: ClassVar[str]

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        self._process: Process | None = None

    @abstractmethod
    def start(self) -> object:
        """Start it, and wait until it serves."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # no block will end that could kill it
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int | None:
        """The running process, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self.pid is not None

    @property
    def returncode(self) -> int | None:
        """Exit status of the last process; minus the signal's number if a signal ended it."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """SIGKILL, as a crash would; no error if nothing runs."""
        atexit.unregister(self.kill)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, wait for the end; returns the exit status.

        Raises:
            TxmqError: nothing runs, or it did not end in time (and was killed).
        """
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended by itself; returns the exit status.

        Raises:
            TxmqError: it did not end in time, and was killed.
        """
        if self._process is None:
            raise self.failure(f"{self.title} was not started")
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self.failure(f"{self.title} did not end within {timeout} s\n{self.log_tail()}") from None
        atexit.unregister(self.kill)
        return status

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay open and get no answer.

        Returns when every thread stands still: the signal reaches one of them, which stops the others in its turn, and
        until then they answer.
        """
        pid = self.pid
        if pid is None:
            return
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: _stands_still(pid), f"{self.title} stands still", STOP_TIMEOUT_S, self._failure)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGCONT)

    def logs(self) -> str:
        """Everything it has logged, over all starts."""
        return self.log_file.read_text("utf-8", "replace") if self.log_file.exists() else ""

    def log_tail(self) -> str:
        """The end of the log, for an error."""
        return self.logs()[-_LOG_TAIL_BYTES:]

    # --- for launchers -----------------------------------------------------------------------------------------------

    def _require_stopped(self) -> None:
        if self.is_running:
            raise self.failure(f"{self.title} is running already")

    def _spawn(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start ``command``; what it writes goes to the log."""

        def start() -> None:
            self._process = start_logged(command, self.log_file, os.environ if env is None else env)
            atexit.register(self.kill)

        _without_interrupts(start)

    def _wait_until(self, serves: Callable[[], bool], timeout: float) -> Self:
        """Wait until ``serves`` says so."""

        def is_serving() -> bool:
            if serves():
                return True
            if not self.is_running:
                raise self._failure(f"{self.title} ended with status {self.returncode}")
            return False

        eventually(is_serving, f"{self.title} serves", timeout, self._failure)
        return self

    def _failure(self, text: str) -> TxmqError:
        return self.failure(f"{text}\n{self.log_tail()}")


class ServerGroup(ABC):
    """Several servers, usable as a block: started at its beginning, killed at its end."""

    @abstractmethod
    def start(self) -> Self:
        """Start the servers that do not run, and wait until each serves."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to all of them."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:  # no block will end that could kill them
            self.kill()
            raise

    def __exit__(self, *_: object) -> None:
        self.kill()


def _without_interrupts(work: Callable[[], None]) -> None:
    """Call ``work``; a SIGINT that comes meanwhile is handled after it. It strikes the main thread alone."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        work()
        return
    late: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: late.append(frame))
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, handler)
    if late:
        handler(signal.SIGINT, late[0])


def _stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or it has ended; if that cannot be seen, true."""
    states = []
    for status in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            states.append(status.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)
