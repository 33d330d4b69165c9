"""What is played against the outbox: *cells*, each at a crash point or of a kind, and who suffers.

A cell at a point: the client, or the broker, stops or dies there, and with it the victims (as ``homes/cells.py``). What
only happens while messages wait, or when they are drained, is reached by outages: the broker is killed until rows wait,
and started again. Every process that drains is armed then, and the first one there is the client of the cell. A cell of
a kind has no point:

    away         the broker is killed and stays away
    flapping     it is killed and started, several times
    paused       it is stopped (SIGSTOP) for longer than ``away_after_ms``
    slow         it is stopped again and again, for longer than ``slow_after_ms``
    unreachable  one worker does not reach it at all, through an outage for the others
    asleep       a worker is stopped (SIGSTOP) while rows are drained, for longer than its turn lasts
    restored     it is started with an older copy of its directory: nothing may be drained before ``outbox renumber``
    closed       a topic is closed while messages for it wait: they are parked, and released when it is open
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tools.crash.plan import WORKERS, Death
from txmq.runtime.crashpoints import POINTS

BROKER: Final = ("broker",)
# The service's and the drainer's. The last one needs a broker that refuses for good: it is reached in a closed topic.
OUTBOX_POINTS: Final = tuple(sorted(point for point in POINTS if point.startswith("client.outbox.")))
PARKED: Final = "client.outbox.parked"
DRAINER_POINTS: Final = tuple(sorted({*OUTBOX_POINTS} - {"client.outbox.filled", "client.outbox.committed"}))
SERVICE_POINTS: Final = tuple(
    sorted(point for point in POINTS if point.startswith("client.tx.") and point != "client.tx.db_commit_sent")
)
_STAGES: Final = ("", ">journal.append.written", ">journal.sync.done", ">broker.answers.sent", ">broker.apply.done")
BROKER_PATHS: Final = tuple("broker.outbox.taken" + stage for stage in _STAGES)
# zombie: goes on when the others are back.
CLIENT_VICTIMS: Final = (
    ("client",), ("client", "broker"), ("client", "database"), ("broker", "zombie"), ("database", "zombie"),
    ("zombie",), ("client", "broker", "database"),
)  # fmt: skip
BROKER_VICTIMS: Final = (BROKER, ("broker", "client"), ("broker", "database"))
KINDS: Final = {
    "away": (BROKER, ("broker", "client"), ("broker", "database"), ("broker", "relay"), ("broker", "everybody")),
    "flapping": (BROKER, ("broker", "client"), ("broker", "database")),
    "paused": (BROKER, ("broker", "client"), ("broker", "database")),
    "slow": (BROKER, ("broker", "database")),
    "unreachable": (("relay",), ("relay", "broker"), ("relay", "database")),
    "asleep": (("sleeper",), ("sleeper", "broker"), ("sleeper", "database")),
    "restored": (BROKER, ("broker", "client")),
    "closed": (("topic",), ("topic", "broker"), ("topic", "database")),
}
_VISITS_MAX, _DRAINS_MAX = 6, 2
_AWAY_S_MAX = 2.5


@dataclass(frozen=True, slots=True)
class OutboxDeath(Death):
    """One cell.

    Attributes:
        what: a point or a path of points, or a kind.
        worker: who comes to the point (one of ``OUTBOX_POINTS``: somebody), or suffers beside the broker.
        away_s: how long a kind lasts.
    """

    what: str = ""
    worker: int = 0
    victims: tuple[str, ...] = ()
    away_s: float = 0.0

    def __str__(self) -> str:
        where = f"{self.what}:{self.nth}" if self.point else f"{self.what} {self.away_s:.2f} s"
        return f"{' + '.join(self.victims)} {where}, worker {self.worker}"

    @property
    def spares_services(self) -> bool:
        """Whether nobody suffers but the broker, or the way to it: then no order may be refused."""
        return {*self.victims} <= {"broker", "relay"} and self.what != "restored"

    @property
    def stops_services(self) -> bool:
        """Whether a service is stopped for a while, perhaps with locks in hand."""
        return bool({*self.victims} & {"zombie", "sleeper"}) or self.point is not None


Cell = tuple[str, tuple[str, ...]]
CELLS: Final[tuple[Cell, ...]] = (
    *((point, victims) for point in (*OUTBOX_POINTS, *SERVICE_POINTS) for victims in CLIENT_VICTIMS),
    *((path, victims) for path in BROKER_PATHS for victims in BROKER_VICTIMS),
    *((kind, victims) for kind, listed in KINDS.items() for victims in listed),
)


def cells(rng: random.Random, chosen: tuple[Cell, ...] = CELLS) -> Iterator[OutboxDeath]:
    """Endless: every cell once in a random order, round after round."""
    while True:
        for what, victims in rng.sample(chosen, len(chosen)):
            nth = rng.randint(1, 1 if what == PARKED else _DRAINS_MAX if what in DRAINER_POINTS else _VISITS_MAX)
            worker, away_s = rng.randrange(WORKERS), rng.uniform(0.2, _AWAY_S_MAX)
            point = None if what in KINDS else what
            dead = tuple(range(WORKERS)) if "everybody" in victims else (worker,) if "client" in victims else ()
            yield OutboxDeath("broker" in victims, dead, False, point, nth, 0.0, what, worker, victims, away_s)
