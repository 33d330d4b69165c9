"""The operating system's process: its descriptors, its heap, its waits for a processor.

Theory of operation. A broker without free descriptors cannot open a segment, and a broker that cannot write must
stop. So connections must never use up the descriptors that files need. ``raise_descriptor_limit`` raises the soft limit
(1024 on most machines) to the hard one; ``divide_descriptors`` sets aside the broker's own descriptors and gives
connections the rest. ``DescriptorBudget.backlog`` bounds what one iteration of the loop accepts: a connection that is
refused is closed in the next one, so that many stand open meanwhile.

A process may be started with 0, 1 or 2 closed, and the next file that it opens gets that number. Then ``print``, a
crash's last words and the programs that it starts write into that file. ``take_standard_descriptors`` opens them first.
"""

from __future__ import annotations

import gc
import os
import resource
from typing import Final, NamedTuple

# Loop, signals, log, journal, lock, listener: 19 at rest. Then a checkpoint, a walk through directories, two readers'
# pinned files and the journal's next file: 12 at most.
DESCRIPTORS_OWN = 36
FILES_MIN = 8
CONNECTIONS_MIN = 4
BACKLOG_MAX = 1024
_STANDARD = 3  # 0, 1 and 2
_NEVER: Final = 1 << 30


class DescriptorBudget(NamedTuple):
    """Descriptors by use."""

    connections: int
    files: int
    backlog: int


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the soft limit towards ``wanted`` as far as the hard one lets; returns what holds from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (limit if limit != resource.RLIM_INFINITY else 1 << 30 for limit in (soft, hard))
    if soft >= wanted:
        return soft
    target = min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):  # some systems have a lower limit of their own
        return soft
    return target


def needed(connections: int, files: int) -> int:
    """The limit under which both have what they ask for."""
    return DESCRIPTORS_OWN + BACKLOG_MAX + files + connections


def divide_descriptors(limit: int, connections: int, files: int) -> DescriptorBudget | None:
    """The part of ``connections`` and ``files`` that fits under ``limit``; None if a broker cannot live under it."""
    backlog = max(8, min(BACKLOG_MAX, limit // 8))
    free = limit - DESCRIPTORS_OWN - backlog
    if free < FILES_MIN + CONNECTIONS_MIN:
        return None
    files = min(files, max(FILES_MIN, free // 3))
    return DescriptorBudget(min(connections, free - files), files, backlog)


def take_standard_descriptors() -> None:
    """Let 0 to 2 lead nowhere if they are closed: no file and no socket gets their numbers from now on.

    SQLite does the same for its own files. Raises OSError if there is no descriptor left.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < _STANDARD:  # the lowest that is free
        os.set_inheritable(number, True)
    os.close(number)


def collect_young_only() -> None:
    """Have the collector look at young objects only from now on, not now and then at the whole heap.

    A walk over the whole heap holds the interpreter's lock for its length, which grows with what the process remembers
    (docs/benchmarks.md, "Stalls of the loop"). Objects that form a cycle and have grown old are never freed then, so
    what a process makes again and again must not be such: ``tests/unit/runtime/test_os_process_garbage.py`` holds that.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


class ProcessorWaits:
    """How long a thread was ready to run and had no processor: the thread that makes this object.

    Source: Linux, Documentation/scheduler/sched-stats: the second field of ``schedstat``, ns. Always 0 if there is
    none.
    """

    def __init__(self) -> None:
        try:
            self._descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def total_s(self) -> float:
        """Seconds, in all."""
        if self._descriptor < 0:
            return 0.0
        return int(os.pread(self._descriptor, 64, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Give back the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
