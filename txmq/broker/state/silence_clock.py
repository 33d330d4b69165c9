"""The clock by which the silence of peers is judged: it stands still while the broker does.

Theory of operation. A peer is given up when nothing was heard of it for some time: a member of a consumer group, a
connection in the middle of a request. What it sent while the broker was stopped (SIGSTOP, a suspended machine, a long
stall) waits in the socket and is not read yet. So time is counted in ticks of the broker's timer, each for ``TICK_MS``
however late it comes, and counts only after the tick has judged: between two ticks the event loop reads what every
socket holds. While the broker reads nobody, because too much is queued, no tick counts.

Invariants:
    * silence is judged by what had come before the previous tick, all of which has been read;
    * a clock that is set forth or back changes nothing.
"""

from __future__ import annotations

TICK_MS = 50  # between two ticks of the broker's timer


class LivenessClock:
    """See the module's docstring.

    Attributes:
        now_ms: never 0, which may stand for "not yet".
    """

    __slots__ = ("now_ms",)

    def __init__(self) -> None:
        self.now_ms = 1

    def tick(self, *, is_reading: bool) -> None:
        """Everything was judged: let the time since the last tick count, unless the broker reads nobody."""
        if is_reading:
            self.now_ms += TICK_MS
