"""The longest stall of the event loop in the last minute: how long it took nothing up.

Two things are seen: a timer that fires late, and a callback that takes long. The time that the loop's thread waited
for a processor since the last timer is told apart; the rest is the broker's own: its work, and its waits for the disk
and the interpreter's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 60.0
_SLOT_S: Final = 10.0
NOTICED_S: Final = 0.002


class LoopStalls:
    """Maxima by slots of ten seconds; the oldest slot is partly out of the window.

    Args:
        processor_waits_s: how long the loop's thread has waited for a processor so far.
    """

    def __init__(self, processor_waits_s: Callable[[], float]) -> None:
        self._waits_s = processor_waits_s
        self._waited_s = processor_waits_s()  # at the last tick
        self._slots: deque[list[float]] = deque()  # number, longest, longest without waits for a processor

    def ticked(self, now: float, late_s: float) -> None:
        """The timer fired so late."""
        waited_s, self._waited_s = self._waited_s, self._waits_s()
        self._saw(now, late_s, self._waited_s - waited_s)

    def worked(self, now: float, took_s: float) -> None:
        """A callback took so long; nothing is noted below ``NOTICED_S``."""
        if took_s >= NOTICED_S:
            self._saw(now, took_s, self._waits_s() - self._waited_s)

    def _saw(self, now: float, stall_s: float, waited_s: float) -> None:
        number, own_s = now // _SLOT_S, max(0.0, stall_s - waited_s)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append([number, stall_s, own_s])
            while self._slots[0][0] < number - WINDOW_S / _SLOT_S:
                self._slots.popleft()
            return
        newest = self._slots[-1]
        newest[1], newest[2] = max(newest[1], stall_s), max(newest[2], own_s)

    def figures(self) -> dict[str, float]:
        """For ``stats``, in ms."""
        return {
            "loop_stall_ms_max": round(max((slot[1] for slot in self._slots), default=0.0) * 1000, 1),
            "loop_stall_own_ms_max": round(max((slot[2] for slot in self._slots), default=0.0) * 1000, 1),
        }
