"""Time in the core: items by the time at which they are due, and the clock by which the silence of peers is judged.

Theory of operation. A tick takes the items of ``Deadlines`` that are due, and touches no others.

The broker gives up a silent peer after some time: a member of a consumer group, a connection in the middle of a
request. Bytes that a peer sent while the broker was stopped (SIGSTOP, a suspended machine, a long stall) wait in the
socket and are not read yet. So the ``LivenessClock`` stops with the broker: it counts ticks of the broker's timer, each
for ``TICK_MS`` however late it comes. A tick counts after it has judged: between two ticks the event loop reads every
socket. While the broker reads no socket, because too much is queued, no tick counts.

Invariants:
    * of items that ended before their time at most as many are kept as of others, and a few;
    * silence is judged by the bytes that had arrived before the previous tick, all of which have been read;
    * a clock that is set forth or back changes nothing of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")
_OVER_MAX = 64  # items that are over, beyond the number of those that are not
TICK_MS = 50  # between two ticks of the broker's timer


class Deadlines(Generic[Item]):
    """Items by time.

    Args:
        is_over: whether an item needs no deadline any more.
    """

    __slots__ = ("_bound", "_heap", "_is_over", "_serial")

    def __init__(self, is_over: Callable[[Item], bool]) -> None:
        self._is_over = is_over
        self._heap: list[tuple[int, int, Item]] = []
        self._serial = count()  # items of one time in order of arrival; items themselves are not compared
        self._bound = _OVER_MAX

    def __len__(self) -> int:
        return len(self._heap)

    def count(self) -> int:
        """How many items are not over; looks at each."""
        return sum(not self._is_over(item) for _, _, item in self._heap)

    def add(self, at_ms: int, item: Item) -> None:
        """One more."""
        if len(self._heap) >= self._bound:
            self._heap = [entry for entry in self._heap if not self._is_over(entry[2])]
            heapq.heapify(self._heap)
            self._bound = 2 * len(self._heap) + _OVER_MAX
        heapq.heappush(self._heap, (at_ms, next(self._serial), item))

    def take_due(self, now_ms: int, limit: int = 1 << 62) -> list[Item]:
        """Take out items whose time has come, the earliest first; those that are over are left out."""
        due: list[Item] = []
        while self._heap and self._heap[0][0] <= now_ms and len(due) < limit:
            item = heapq.heappop(self._heap)[2]
            if not self._is_over(item):
                due.append(item)
        return due

    def take_all(self) -> list[Item]:
        """Take out every item that is not over, whatever its time; the earliest first."""
        taken, self._heap = self._heap, []
        return [item for _, _, item in sorted(taken, key=lambda entry: entry[:2]) if not self._is_over(item)]


class LivenessClock:
    """Stops while the broker is stopped.

    Attributes:
        now_ms: never 0, which may stand for "not yet".
    """

    __slots__ = ("now_ms",)

    def __init__(self) -> None:
        self.now_ms = 1

    def tick(self, *, is_reading: bool) -> None:
        """All peers were judged: count the time since the last tick, unless the broker reads no socket."""
        if is_reading:
            self.now_ms += TICK_MS
