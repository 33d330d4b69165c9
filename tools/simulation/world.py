"""One simulated world: time, chance, a trace, and the interesting situations that were met. All from one seed."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable

from tools.simulated.clock import SimClock

STANDING_MAX = 1_000_000  # events at one moment
_USERS = 0.3  # of worlds have users
_TLS = 0.5  # of these speak TLS

SITUATIONS = frozenset(
    {
        "broker killed", "power lost", "died at a crash point", "died of EIO", "recovery crashed", "redo of records",
        "broker paused",
        "checkpoint written", "link lost", "client died", "put acknowledged", "put sent again", "session resumed",
        "local committed", "commit asked again", "streamed committed", "rolled back", "fence journaled",
        "late commit refused", "torn tail cut",
        "database answer lost", "resolver committed", "resolver rolled back", "marker locked",
        "last resource committed",
        "commit waited for order", "unknown resolved", "topic deleted", "topic altered", "read by a reader",
        "disk full", "a clock was set",
        "one direction stalled", "waited for a database lock", "statement failed",
        "real client died", "client died at a crash point", "real send acknowledged", "real send unknown",
        "real local committed", "real last resource committed", "real xa committed", "xa answer lost",
        "xa database died", "xa commit met the end of a session", "real block rolled back", "real outcome unknown",
        "real unknown resolved", "committed, broker to be told",
        "commit not awaited", "deadline passed before commit",
        "real resolver committed", "real resolver rolled back", "two resolvers met", "outcome below the floor",
        "a thread waited for a lock", "deadline passed while prepared", "segments expired", "sync=interval recovered",
        "sync=never recovered", "checkpoint fell back", "bit flip refused", "bit flip refused to a reader",
        "a batch was committed", "a batch was committed already", "a former driver was fenced",
        "a consumer's disk was lost", "a message was rejected", "a message was acknowledged",
        "a message became a dead letter", "a message is deferred",
        "an ordered message was spooled", "an ordered message was acknowledged",
        "a spool was full or a topic not known",
        "a real consumer acknowledged in a transaction",
        "a member slept", "a partition was handed over", "a fenced save was refused", "an offset was saved",
        "a fenced ack rolled its transaction back", "an offset was saved by a transaction",
        "a task was cancelled", "a cancelled end committed",
        "a user was removed", "a removed user was refused", "a stranger was refused", "a handshake was completed",
        "a resolver fenced a branch of another user's",
        "endless load", "read behind its acknowledgement",
        "bit flip written over by redo", "bit flip in the journal without effect",
    }
)  # fmt: skip


class Violation(AssertionError):
    """A promise was broken."""


class Simulation:
    """The scheduler; events at the same time happen in the order in which they were planned.

    Args:
        sync: the broker's setting; drawn if empty.
        endless: its queue is never empty; else drawn.
        users: there are users; else drawn, apart, so that worlds without them are what they were.
        situations: those that may be met.
    """

    def __init__(
        self, seed: int, *, sync: str = "", endless: bool = False, users: bool = False,
        situations: frozenset[str] = SITUATIONS,
    ) -> None:  # fmt: skip
        self.has_users = users or random.Random(f"users {seed}").random() < _USERS
        self.has_tls = self.has_users and random.Random(f"tls {seed}").random() < _TLS
        self.sync, self.is_endless, self._situations = sync, endless, situations
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = SimClock()
        self.met: set[str] = set()
        self.tail: deque[str] = deque(maxlen=120)
        self._hash = hashlib.sha256()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def now(self) -> float:
        """Simulated seconds."""
        return self.clock.monotonic()

    def trace(self, *words: object) -> None:
        """One line of what happened."""
        line = f"{self.clock.monotonic():9.4f} " + " ".join(map(str, words))
        self._hash.update(line.encode())
        self.tail.append(line)

    def meet(self, situation: str) -> None:
        """An interesting situation."""
        if situation not in self._situations:
            raise LookupError(situation)
        self.met.add(situation)

    @property
    def digest(self) -> str:
        """Of the whole trace."""
        return self._hash.hexdigest()

    def chance(self, probability: float) -> bool:
        """Draw."""
        return self.rng.random() < probability

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Plan something."""
        self._count += 1
        heapq.heappush(self._events, (self.clock.monotonic() + seconds, self._count, call))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass; stops early when ``until`` holds.

        Raises:
            AssertionError: something keeps itself busy, and time stands still.
        """
        events, clock = self._events, self.clock
        end, standing = clock.monotonic() + seconds, 0
        while events and events[0][0] <= end and not until():
            at, _, call = heapq.heappop(events)
            now = clock.monotonic()
            if at > now:
                standing = 0
                clock.advance(at - now)
            else:
                standing += 1
                if standing > STANDING_MAX:
                    raise AssertionError(f"time stands still at {now}: {call}")
            call()
