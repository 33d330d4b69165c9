"""A bucket of so much a second. No I/O, the time is handed in.

It is one number, the time at which all that was taken is paid for at the rate (GCRA: ITU-T I.371, the virtual
scheduling algorithm). It is open while that time is at most the burst ahead. What is taken counts whole, however much
it is: the bucket stays closed for longer then.

Invariant: over any time t, at most rate x (t + burst) is taken, and whatever was taken last.
"""

from __future__ import annotations


class TokenBucket:
    """See the module's docstring.

    Args:
        rate: what flows in, a second.
        burst_s: so many seconds' worth may be taken at once.

    Attributes:
        waiting: how many wait for it to open; the owner counts them.
    """

    __slots__ = ("_burst_s", "_paid_s", "rate", "waiting")

    def __init__(self, rate: int, burst_s: float) -> None:
        self.rate, self._burst_s, self._paid_s = rate, burst_s, 0.0
        self.waiting = 0

    def is_open(self, now_s: float) -> bool:
        """Whether anything may be taken."""
        return self._paid_s - now_s <= self._burst_s

    def is_full(self, now_s: float) -> bool:
        """Whether everything that was taken is paid for: it is as a new one."""
        return self._paid_s <= now_s

    def take(self, amount: int, now_s: float) -> None:
        """Take so much, open or not; below 0: give it back."""
        self._paid_s = max(self._paid_s, now_s) + amount / self.rate
