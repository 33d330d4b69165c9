"""The operating system's clock and random numbers; and the broker's clock, wall time that does not jump.

Theory of operation. A broker uses wall time for times that it sends to others or keeps over restarts: deadlines, how
long an owner, a member or a session has been gone, how long messages wait for their rows. If the machine's clock is set
an hour ahead, all of that would be over at once, and messages would be seen before their rows. If it is set back, no
owner would count as gone for an hour, and its transactions would wait. So ``SteadyClock`` follows the machine's at
between half and twice the speed of time until it has caught up. Adjustments as of NTP, which slews, are followed as
they come.

Invariants:
    * ``SteadyClock.now_ms`` never goes back, and over any while it counts between half and twice what ``monotonic``
      does;
    * while the machine's clock is not set, it shows the same, to the ms; ``ahead_ms`` tells the difference.

Thread safety: ``SteadyClock.now_ms`` by one thread; everything else by any.
"""

from __future__ import annotations

import secrets
import time

from txmq.runtime.ports import Clock

_SPEED_MIN, _SPEED_MAX = 0.5, 2.0


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


class SteadyClock:
    """See the module's docstring. Begins with the time that ``clock`` shows."""

    def __init__(self, clock: Clock) -> None:
        self.monotonic, self.sleep = clock.monotonic, clock.sleep
        self._wall_ms = clock.now_ms
        self._told_ms = float(clock.now_ms())
        self._told_at = clock.monotonic()

    def now_ms(self) -> int:
        """Wall clock, ms since 1970-01-01 UTC; does not jump."""
        at = self.monotonic()
        passed_ms = (at - self._told_at) * 1000
        low, high = self._told_ms + passed_ms * _SPEED_MIN, self._told_ms + passed_ms * _SPEED_MAX
        wall_ms = float(self._wall_ms())
        self._told_ms, self._told_at = low if wall_ms < low else high if wall_ms > high else wall_ms, at
        return int(self._told_ms)

    def ahead_ms(self) -> int:
        """How much later it shows than the machine's clock; negative where that one is later."""
        return self.now_ms() - self._wall_ms()
