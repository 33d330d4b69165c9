"""The clock by which the silence of peers is judged: it stops while the broker is stopped.

Theory of operation. The broker gives up a silent peer after some time: a member of a consumer group, a connection in
the middle of a request. Bytes that a peer sent while the broker was stopped (SIGSTOP, a suspended machine, a long
stall) wait in the socket and are not read yet. So time is counted in ticks of the broker's timer, each for ``TICK_MS``
however late it comes. A tick counts after it has judged: between two ticks the event loop reads every socket. While
the broker reads no socket, because too much is queued, no tick counts.

Invariants:
    * silence is judged by the bytes that had arrived before the previous tick, all of which have been read;
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
        """All peers were judged: count the time since the last tick, unless the broker reads no socket."""
        if is_reading:
            self.now_ms += TICK_MS
