"""What befalls whom in the outbox campaign, drawn from its seed: rounds of faults.

Besides those of ``tools.crash.faults`` there are three that end with a line that has stopped, and an operator:

``restore``   an older dump of a database, or an older directory of the broker, is put back while services work
``copy``      a copy of a database begins to send after its original has gone on: the copy stops
``overtake``  it begins while the original has no relay: the original stops when it has one again
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

from tools.crash.faults import Fault
from tools.crash.outbox.relay import LEASE_S
from txmq.runtime.crashpoints import POINTS

BROKER: Final = "broker"
RELAYS: Final = ("relay 1", "relay 2")
RELAY_POINTS: Final = tuple(sorted(point for point in POINTS if point.startswith("relay.")))
BROKER_POINTS: Final = ("broker.outbox.page_taken",)
_ACTS: Final = ("operator.settled", "operator.adopted", "operator.released")
_DROP: Final = "operator.dropped"
ALL_POINTS: Final = (*RELAY_POINTS, *BROKER_POINTS, *_ACTS, _DROP)
_AWAY_S: Final = (0.0, 1.2)
_PAUSED_S: Final = (LEASE_S * 1.2, LEASE_S * 2)  # longer than a lease
_VISITS_MAX: Final = 20
_RARE: Final = "relay.page.part_sent"  # large units are


def faults(rng: random.Random, databases: Sequence[str], files: Sequence[str]) -> Iterator[Fault]:
    """Endless: each fault of a round once, in a random order, round after round.

    Args:
        databases: those that are servers.
        files: those that are not.
    """
    while True:
        found = _round(rng, databases, files)
        rng.shuffle(found)
        yield from found


def _round(rng: random.Random, databases: Sequence[str], files: Sequence[str]) -> list[Fault]:
    return [*_alone(rng, databases, files), *_pairs(rng, databases), *_points(rng), *_stops(rng, databases, files)]


def _away(rng: random.Random) -> float:
    return rng.uniform(*_AWAY_S)


def _alone(rng: random.Random, databases: Sequence[str], files: Sequence[str]) -> Iterator[Fault]:
    servers = [f"database {name}" for name in databases]
    services = [f"service {name}" for name in (*databases, *files)]
    for victim in (BROKER, BROKER, *RELAYS, *RELAYS, *servers, *services):
        yield Fault("kill", (victim,), _away(rng))
    for victim in RELAYS:
        yield Fault("pause", (victim,), rng.uniform(*_PAUSED_S))
    for victim in (BROKER, *servers):
        yield Fault("pause", (victim,), _away(rng))


def _pairs(rng: random.Random, databases: Sequence[str]) -> Iterator[Fault]:
    servers = [f"database {name}" for name in databases]
    pairs = [RELAYS, (BROKER, RELAYS[0]), (BROKER, *RELAYS)]
    pairs += [(server, relay) for server, relay in zip(servers, RELAYS, strict=False)]
    pairs += [(BROKER, server) for server in servers]
    pairs += [(*servers, BROKER, *RELAYS)] if servers else []
    for victims in pairs:
        yield Fault("kill", victims, _away(rng))
    for server in servers:
        yield Fault("pause", (server, rng.choice(RELAYS)), rng.uniform(*_PAUSED_S))


def _points(rng: random.Random) -> Iterator[Fault]:
    for point in RELAY_POINTS:
        nth = 1 if point == _RARE else rng.randint(1, _VISITS_MAX)
        for others in ((), (BROKER,)):
            yield Fault("crash", (rng.choice(RELAYS), *others), _away(rng), f"{point}:{nth}")
    for point in BROKER_POINTS:
        yield Fault("crash", (BROKER,), _away(rng), f"{point}:{rng.randint(1, _VISITS_MAX)}")


def _stops(rng: random.Random, databases: Sequence[str], files: Sequence[str]) -> Iterator[Fault]:
    names = rng.sample((*databases, *files), len(databases) + len(files))
    acts = rng.sample(_ACTS, len(_ACTS))
    points = [_DROP, *acts]  # only what a database had before its restore is dropped
    for name, point in zip(names, points, strict=False):
        yield Fault("restore", (f"database {name}",), _away(rng), f"{point}:1")
    yield Fault("restore", (BROKER,), _away(rng), f"{acts[-1]}:1")
    for name in names:
        for kind in ("copy", "overtake"):
            yield Fault(kind, (f"database {name}",), _away(rng))


ROUND: Final = len(_round(random.Random(0), ("mariadb", "postgresql"), ("sqlite",)))
