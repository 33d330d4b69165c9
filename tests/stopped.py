"""Wait until a process has stopped: by SIGSTOP, or by a crash point with the mode ``stop``.

SIGCONT that comes before has no effect, and the process then waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from txmq.testing.eventually import eventually


def until_stopped(pid: int, told: Callable[[], str] = str) -> None:
    """Return when the process stands still.

    Args:
        pid: of a process that is ours.
        told: what its log says, for the error.

    Raises:
        AssertionError: it did not stop.
    """
    status = Path(f"/proc/{pid}/status")
    eventually(lambda: "State:\tT" in status.read_text(), lambda: f"process {pid} has stopped; {told()}")
