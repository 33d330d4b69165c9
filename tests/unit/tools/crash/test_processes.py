"""tools/crash/processes.py."""

from __future__ import annotations

import signal

from tools.crash.processes import run_in_threads


def blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_threads_leave_signals_to_the_main_one() -> None:
    before, found = blocked(), list[set[int]]()
    run_in_threads([lambda: found.append(blocked())] * 2)
    assert all({signal.SIGTERM, signal.SIGINT, signal.SIGHUP} <= mask for mask in found)
    assert len(found) == 2
    assert blocked() == before
