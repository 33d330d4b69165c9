"""The door to the processor: how long the caller waited for it."""

from __future__ import annotations

import os


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
