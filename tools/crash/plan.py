"""What dies when: the deaths of a campaign, drawn from its seed.

Every second death is SIGKILL from outside at a random moment, of the broker, a worker, both, or all at once. The
others go through the declared crash points in a random order, round after round, so that each is hit often in a long
campaign, at a random visit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from txmq.runtime.crashpoints import POINTS

# Reached by other campaigns and scenarios.
_ELSEWHERE = (
    "client.xa.", "resolver.xa.", "client.half.", "client.check.", "client.ordered.", "client.deferred.",
    "client.dead_letter.", "client.redrive.", "audit.", "client.tx.db_commit_sent", "registry.", "broker.branch.",
    "broker.database.", "broker.decision.", "broker.outbox.", "client.homes.", "client.prepare.", "client.foreign.",
    "relay.", "operator.", "client.sink.", "binlog.",
)  # fmt: skip
SQLITE_POINTS = tuple(sorted(point for point in POINTS if not point.startswith(_ELSEWHERE)))
WORKERS = 4
RUN_S_MAX = 0.6  # until a kill at a random moment
# How many visits of a point a process lives through at most: what is reached often may be hit late.
_VISITS_MAX = {
    "checkpoint": 3,
    "segment": 3,
    "retention": 3,
    "resolver": 1,
    "client": 15,
    "journal": 150,
    "broker": 150,
}
# What a worker must leave in doubt for a resolver to reach the point.
LEFT_FOR_RESOLVER = {
    "resolver.marker_inserted": "client.tx.prepared",
    "resolver.token_drawn": "client.tx.prepared",
    "resolver.read_committed": "client.tx.db_committed",
    "resolver.told_broker": "client.tx.db_committed",
}


@dataclass(frozen=True, slots=True)
class Death:
    """One cycle's deaths. ``point`` None: from outside, after ``delay_s``."""

    broker: bool
    workers: tuple[int, ...]
    resolver: bool
    point: str | None
    nth: int
    delay_s: float

    def __str__(self) -> str:
        victims = ["broker"] if self.broker else []
        victims += [f"worker {number}" for number in self.workers] + (["resolver"] if self.resolver else [])
        where = f"at {self.point}:{self.nth}" if self.point else f"after {self.delay_s * 1000:.0f} ms"
        return f"{' + '.join(victims)} {where}"


def deaths(rng: random.Random) -> Iterator[Death]:
    """Endless."""
    while True:
        for point in rng.sample(SQLITE_POINTS, len(SQLITE_POINTS)):
            yield _at_random(rng)
            yield _at_point(rng, point)


def _at_random(rng: random.Random) -> Death:
    delay_s = rng.uniform(0, RUN_S_MAX)
    some = tuple(sorted(rng.sample(range(WORKERS), rng.randint(1, 2))))
    broker, workers = rng.choice([(True, ()), (True, ()), (False, some), (True, some), (True, tuple(range(WORKERS)))])
    return Death(broker, workers, rng.random() < 0.3, None, 0, delay_s)


def _at_point(rng: random.Random, point: str) -> Death:
    kind = point.partition(".")[0]
    nth = rng.randint(1, _VISITS_MAX[kind])
    if kind == "client":
        return Death(False, (rng.randrange(WORKERS),), False, point, nth, 0.0)
    if kind == "resolver":
        return Death(False, (rng.randrange(WORKERS),), True, point, nth, 0.0)
    return Death(True, (), False, point, nth, 0.0)
