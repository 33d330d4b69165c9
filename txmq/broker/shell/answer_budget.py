"""Which connections get long answers, where peers do not take theirs: one budget of bytes over all connections. No I/O.

Theory of operation. Answers that a client does not take stay in this process's memory. So a request whose answer may
be long, and a read for a poll, are carried out only if there is room:

    * a connection that has taken everything gets an answer while less than the whole budget is in use;
    * one that has left some gets another one while less than half is: clients that do not read leave room to others;
    * a user, with all connections together, is given another one while they hold less than half (their share): what
      one user leaves keeps no other one waiting. Where there are no users nobody has a share;
    * the others wait, in order, and are asked one at a time, since each answer may use up the room there is.

Room is made, too: if a client that does take its answers waits, or the budget is overdrawn, connections that have taken
nothing for ``STALLED_MS`` are cut off, the one that has stood still for longest first, until half is free. For a client
that waits only for its user's share, that user's connections alone are, until half of the share is free.

How much a connection holds is known from when it was last looked at; before a request has to wait, all are looked at
anew. The first ``OWN_BYTES`` of each connection are its own and do not count.

Invariants:
    * ``used`` is the sum of what connections hold; it passes the limit by the answers that were admitted last, and so
      does what a user holds pass the share;
    * a waiting connection is asked again as soon as there is room for it, or is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.broker.shell.connection import Connection

OWN_BYTES = 4096
STALLED_MS = 1000  # longer than a lost packet takes to be sent again


class _Held:
    """The bytes that a connection had left when it was last looked at, whose it was, and since when it took none."""

    __slots__ = ("since_ms", "size_bytes", "taken_bytes", "user")

    def __init__(self, user: str, taken_bytes: int, now_ms: int) -> None:
        self.user, self.size_bytes, self.taken_bytes, self.since_ms = user, 0, taken_bytes, now_ms


class AnswerBudget:
    """See the module's docstring.

    Attributes:
        used: bytes that connections hold.
        used_max: the most there ever were.
        waiting: those that are notified when there is room, in this order.
        is_fresh: whether all were looked at since the loop last turned.
    """

    __slots__ = ("_held", "_limit", "_of_user", "_share", "is_fresh", "used", "used_max", "waiting")

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._share, self.used, self.used_max = limit_bytes, limit_bytes // 2, 0, 0
        self._held: dict[Connection, _Held] = {}
        self._of_user: dict[str, int] = {}  # bytes that the connections of a user hold
        self.waiting: dict[Connection, None] = {}
        self.is_fresh = False

    def holds(self, taker: Connection, size_bytes: int, taken_bytes: int, now_ms: int) -> None:
        """A connection was looked at.

        Args:
            size_bytes: bytes that it has not taken.
            taken_bytes: bytes that it has taken since it was opened.
            now_ms: by the ``LivenessClock``.
        """
        held = self._held.get(taker)
        if size_bytes <= OWN_BYTES:
            if held is not None:
                del self._held[taker]
                self._hold(held, 0)
            return
        if held is None:
            held = self._held[taker] = _Held(taker.user, taken_bytes, now_ms)
        elif taken_bytes != held.taken_bytes:
            held.taken_bytes, held.since_ms = taken_bytes, now_ms
        if held.user != taker.user:  # it has logged in, or its user was removed
            self._hold(held, 0)
            held.user = taker.user
        self._hold(held, size_bytes)
        self.used_max = max(self.used_max, self.used)

    def _hold(self, held: _Held, size_bytes: int) -> None:
        change, held.size_bytes = size_bytes - held.size_bytes, size_bytes
        self.used += change
        if held.user:
            left = self._of_user.get(held.user, 0) + change
            if left:
                self._of_user[held.user] = left
            else:
                self._of_user.pop(held.user, None)

    def is_holding(self, taker: Connection) -> bool:
        """Whether it had left something when it was last looked at."""
        return taker in self._held

    def forget(self, taker: Connection) -> None:
        """A connection is gone."""
        self.waiting.pop(taker, None)
        self.holds(taker, 0, 0, 0)

    def admits(self, taker: Connection) -> bool:
        """Whether a long answer may be made for it now."""
        if self._has_room(taker):
            return True
        if not self.is_fresh:
            self.look()
        return self._has_room(taker)

    def wait(self, taker: Connection) -> None:
        """Wait for room; ``has_room`` is called when its turn has come."""
        self.waiting[taker] = None

    def turned(self) -> bool:
        """The loop has turned: let the first go on for whom there is room; whether there was one."""
        self.is_fresh = False
        for taker in self.waiting:
            if self.admits(taker):
                del self.waiting[taker]
                taker.has_room()
                return True
            if self.used >= self._limit:
                break
        return False

    def look(self) -> None:
        """Look at all that hold something."""
        self.is_fresh = True
        for taker in list(self._held):
            taker.look()

    def stalled(self, now_ms: int) -> list[Connection]:
        """The connections to cut off, so that others can go on."""
        if not self.waiting and self.used <= self._limit:
            return []
        self.look()
        still = {taker: held for taker, held in self._held.items() if now_ms - held.since_ms >= STALLED_MS}
        waiting = [taker for taker in self.waiting if taker not in still]
        crowded = {taker.user for taker in waiting if self._is_share_used(taker)}
        is_whole = self.used > self._limit or any(taker.user not in crowded for taker in waiting)
        found: list[Connection] = []
        left, of_user = self.used, dict(self._of_user)
        for taker, held in sorted(still.items(), key=lambda item: item[1].since_ms):
            is_crowded = held.user in crowded and of_user[held.user] >= self._share // 2
            if is_crowded or (is_whole and left >= self._limit // 2):
                found.append(taker)
                left -= held.size_bytes
                if held.user:
                    of_user[held.user] -= held.size_bytes
        return found

    def _is_share_used(self, taker: Connection) -> bool:
        user = taker.user
        return bool(user) and self._of_user.get(user, 0) >= self._share

    def _has_room(self, taker: Connection) -> bool:
        if self._is_share_used(taker):
            return False
        return self.used < (self._limit // 2 if taker in self._held else self._limit)
