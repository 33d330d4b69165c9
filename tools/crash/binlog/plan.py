"""What befalls whom in the binlog campaign, drawn from its seed: a sync's opening, then rounds.

Within the opening a snapshot is read; on a server that has none, the binlog from the position of empty tables on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from tools.crash.faults import Fault

SOURCE, TARGET, BROKER, READER, APPLIER, LOAD = "source", "target", "broker", "reader", "applier", "load"
BEGUN_POINTS: Final = ("binlog.positions.created", "binlog.positions.begun")
TOPIC_POINT, SNAPSHOT_BEGUN_POINT = "binlog.topic.made", "binlog.snapshot.begun"
SNAPSHOT_POINTS: Final = (TOPIC_POINT, "binlog.snapshot.viewed", "binlog.snapshot.read", "binlog.snapshot.left")
READER_POINTS: Final = ("binlog.tx.filled", "binlog.tx.committed", "binlog.position.read")
SPOOL_POINTS: Final = ("binlog.spool.appended", "binlog.owner.taken", "binlog.tx.filled", "binlog.tx.committed")
MODES: Final = {"transactional": READER_POINTS, "ordered": SPOOL_POINTS}  # of the syncs, in turn
APPLIER_POINTS: Final = (
    "binlog.apply.filled", "binlog.apply.committed", "binlog.ddl.begun", "binlog.ddl.run", "binlog.ddl.noted",
)  # fmt: skip
_AWAY_S = (0.0, 1.5)
_LONG_S = 4.0  # longer than a session of reader and applier, and than the silence after which a database is away
_VISITS_MAX = 8


def points(*, has_snapshots: bool) -> frozenset[str]:
    """Those at which somebody dies in a whole campaign."""
    of_all = (*BEGUN_POINTS, TOPIC_POINT, *READER_POINTS, *SPOOL_POINTS, *APPLIER_POINTS)
    return frozenset((*of_all, SNAPSHOT_BEGUN_POINT, *SNAPSHOT_POINTS) if has_snapshots else of_all)


def opening(rng: random.Random, *, has_snapshots: bool) -> list[Fault]:
    """Of a sync that begins: the first ones in the order in which its points are reached once."""
    once = (*BEGUN_POINTS, SNAPSHOT_BEGUN_POINT if has_snapshots else TOPIC_POINT)
    first = [Fault("crash", (READER,), rng.uniform(*_AWAY_S), f"{point}:1") for point in once]
    during = list[Fault]()
    if has_snapshots:
        during += [_snapshot(rng, point) for point in SNAPSHOT_POINTS]
        during += [_snapshot(rng, rng.choice(SNAPSHOT_POINTS[1:]), other) for other in (BROKER, SOURCE)]
    during += [Fault("kill", (victim,), rng.uniform(0, 0.3)) for victim in (BROKER, SOURCE, READER)]
    rng.shuffle(during)
    return [*first, *during]


def faults(rng: random.Random, mode: str) -> Iterator[Fault]:
    """Endless, of a sync whose snapshot is complete."""
    while True:
        chosen = [*_alone(rng), *_points(rng, mode), *_pairs(rng, mode)]
        rng.shuffle(chosen)
        yield from chosen


def _snapshot(rng: random.Random, point: str, *others: str) -> Fault:
    """As a crash, but for a point that is not reached again if the snapshot ends first."""
    return Fault("snapshot", (READER, *others), rng.uniform(0, 0.3), f"{point}:{rng.randint(1, 3)}")


def _alone(rng: random.Random) -> Iterator[Fault]:
    for victim in (SOURCE, TARGET, BROKER, READER, APPLIER, LOAD):
        yield Fault("kill", (victim,), rng.uniform(*_AWAY_S))
    for victim in (SOURCE, TARGET, BROKER, READER, APPLIER):
        yield Fault("pause", (victim,), _LONG_S if rng.random() < 0.3 else rng.uniform(*_AWAY_S))


def _points(rng: random.Random, mode: str) -> Iterator[Fault]:
    for victim, points in ((READER, MODES[mode]), (APPLIER, APPLIER_POINTS)):
        for point in points:
            nth = 1 if ".ddl." in point or ".owner." in point else rng.randint(1, _VISITS_MAX)
            yield Fault("crash", (victim,), rng.uniform(*_AWAY_S), f"{point}:{nth}")


def _pairs(rng: random.Random, mode: str) -> Iterator[Fault]:
    pairs = (
        (READER, BROKER), (READER, SOURCE), (APPLIER, BROKER), (APPLIER, TARGET), (READER, APPLIER), (SOURCE, TARGET),
        (SOURCE, BROKER), (TARGET, BROKER),
    )  # fmt: skip
    for pair in pairs:
        yield Fault("kill", pair, rng.uniform(*_AWAY_S))
    for victim, points, others in (
        (READER, MODES[mode], (BROKER, SOURCE)), (APPLIER, APPLIER_POINTS, (BROKER, TARGET)),
    ):  # fmt: skip
        for other in others:
            yield Fault("crash", (victim, other), rng.uniform(*_AWAY_S), f"{rng.choice(points)}:1")
    yield Fault("pause", (SOURCE, BROKER), rng.uniform(*_AWAY_S))


_ANY: Final = random.Random(0)
ROUND: Final = len(
    [
        *opening(_ANY, has_snapshots=True), *_alone(_ANY), *_points(_ANY, "transactional"),
        *_pairs(_ANY, "transactional"),
    ]
)  # fmt: skip
