"""The operating system's clock and random numbers."""

from __future__ import annotations

import secrets
import time


class OSClock:
    """Wall and monotonic time of this machine (port ``Clock``)."""

    def now_ms(self) -> int:
        """Wall clock, ms since 1970-01-01 UTC; may jump."""
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)  # seconds; never goes back. A method around it costs as much again

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)


class OSRandom:
    """Unguessable numbers (port ``Random``)."""

    def bits(self, count: int) -> int:
        """A uniformly drawn unsigned integer of ``count`` bits."""
        return secrets.randbits(count)
