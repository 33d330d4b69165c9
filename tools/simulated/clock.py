"""Simulated clock and random numbers (ports ``Clock`` and ``Random``): they move only when they are told to.

Invariant: ``monotonic`` never goes back, whatever happens to the wall clock.
"""

from __future__ import annotations

import random

START_MS = 1_700_000_000_000  # 2023-11-14; any fixed date serves


class SimClock:
    """A clock turned by hand. The wall clock is the monotonic one plus an offset that may jump."""

    def __init__(self, start_ms: int = START_MS) -> None:
        self._elapsed_ns = 0
        self._offset_ms = start_ms

    def now_ms(self) -> int:
        """Wall clock, ms since 1970-01-01 UTC."""
        return self._offset_ms + self._elapsed_ns // 1_000_000

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        return self._elapsed_ns / 1e9

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        self._elapsed_ns += round(seconds * 1e9)

    def sleep(self, seconds: float) -> None:
        """Advance the time without a wait."""
        self.advance(seconds)

    def jump(self, offset_ms: int) -> None:
        """Move the wall clock alone, either way."""
        self._offset_ms += offset_ms

    def set_ms(self, now_ms: int) -> None:
        """Set the wall clock alone."""
        self.jump(now_ms - self.now_ms())


class SimRandom:
    """Numbers that repeat with their seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def bits(self, count: int) -> int:
        """A uniformly drawn unsigned integer of ``count`` bits."""
        return self._rng.getrandbits(count)
