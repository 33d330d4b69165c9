"""What befalls whom: the faults of a cluster's campaign, drawn from its seed.

A fault befalls some processes at one moment. In each round every broker and every ZooKeeper server suffers everything
once, and the majority of the servers dies at once; so do the databases and each kind of client, at a random moment or
at a named point of its code, alone or together with a broker or a database.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.crash.faults import Fault
from tools.crash.ordered.campaign import ORDERED_POINTS
from tools.crash.plan import SQLITE_POINTS
from tools.crash.xa.campaign import CLIENT_POINTS as XA_POINTS

BROKERS, SERVERS, DATABASES, WORKERS, BANKERS, MEMBERS = 3, 3, 2, 2, 2, 3
HOMES_POINTS = ("client.homes.prepare_sent", "client.homes.prepared", "client.homes.commit_sent", "client.homes.told")
SERVER_KINDS = ("kill", "pause", "restart")
WORKER_POINTS = tuple(point for point in SQLITE_POINTS if point.startswith("client."))
AWAY_S = (0.2, 2.0)  # a victim is dead, or stopped, for so long; now and then
LONG_S = 6.0  # which is longer than its session with ZooKeeper
_VISITS_MAX = 12
DRIVER = "driver"


def faults(rng: random.Random, *, has_stream: bool) -> Iterator[Fault]:
    """Endless; without a Spark stream no driver dies."""
    while True:
        chosen = _one_round(rng)
        rng.shuffle(chosen)
        yield from (fault for fault in chosen if has_stream or DRIVER not in fault.victims)


def _one_round(rng: random.Random) -> list[Fault]:
    return [*_servers(rng), *_clients(rng), *_points(rng), *_pairs(rng)]


def _servers(rng: random.Random) -> Iterator[Fault]:
    for kind in SERVER_KINDS:
        for number in range(BROKERS):
            yield Fault(kind, (f"broker {number}",), _away_s(rng, kind))
        for number in range(SERVERS):
            yield Fault(kind, (f"zookeeper {number}",), _away_s(rng, kind))
    majority = sorted(rng.sample(range(SERVERS), SERVERS // 2 + 1))
    yield Fault("kill", tuple(f"zookeeper {number}" for number in majority), _away_s(rng, "kill"))
    for kind in ("kill", "pause"):
        yield Fault(kind, (_one(rng, "database", DATABASES),), rng.uniform(*AWAY_S))


def _clients(rng: random.Random) -> Iterator[Fault]:
    for victim in _one_of_each(rng):
        yield Fault("kill", (victim,), _away_s(rng, "kill"))
    yield Fault("pause", (_one(rng, "member", MEMBERS),), LONG_S)
    yield Fault("pause", (_one(rng, "banker", BANKERS),), rng.uniform(*AWAY_S))


def _points(rng: random.Random) -> Iterator[Fault]:
    yield _crash(rng, _one(rng, "worker", WORKERS), rng.choice(WORKER_POINTS))
    for point in (*rng.sample(XA_POINTS, 2), *rng.sample(HOMES_POINTS, 2)):
        yield _crash(rng, _one(rng, "banker", BANKERS), point)
    point = f"{rng.choice(ORDERED_POINTS)}:1"
    yield Fault("spool", ("ordered", _one(rng, "broker", BROKERS)), 1.5, point)


def _pairs(rng: random.Random) -> Iterator[Fault]:
    brokers = [f"broker {number}" for number in rng.sample(range(BROKERS), BROKERS)]
    yield _crash(rng, _one(rng, "banker", BANKERS), rng.choice(XA_POINTS), brokers[0])
    yield _crash(rng, _one(rng, "banker", BANKERS), rng.choice(XA_POINTS), _one(rng, "database", DATABASES))
    yield _crash(rng, _one(rng, "worker", WORKERS), rng.choice((*WORKER_POINTS, *HOMES_POINTS)), brokers[1])
    bankers = [f"banker {number}" for number in rng.sample(range(BANKERS), BANKERS)]
    yield _crash(rng, bankers[0], "client.xa.decided", *bankers[1:], "resolver")  # nobody is left to complete it
    yield Fault("kill", (brokers[0], _one(rng, "database", DATABASES)), rng.uniform(*AWAY_S))
    yield Fault("kill", (brokers[1], _one(rng, "member", MEMBERS)), rng.uniform(*AWAY_S))
    yield Fault("kill", (brokers[2], "resolver"), rng.uniform(*AWAY_S))
    yield Fault("kill", (brokers[2], DRIVER), rng.uniform(*AWAY_S))


def _one_of_each(rng: random.Random) -> list[str]:
    numbered = {"worker": WORKERS, "banker": BANKERS, "member": MEMBERS}
    return [*(_one(rng, name, count) for name, count in numbered.items()), "ordered", "resolver", DRIVER]


def _one(rng: random.Random, name: str, count: int) -> str:
    return f"{name} {rng.randrange(count)}"


def _crash(rng: random.Random, victim: str, point: str, *others: str) -> Fault:
    return Fault("crash", (victim, *others), rng.uniform(*AWAY_S), f"{point}:{rng.randint(1, _VISITS_MAX)}")


def _away_s(rng: random.Random, kind: str) -> float:
    is_long = kind == "pause" and rng.random() < 0.3
    return LONG_S if is_long else rng.uniform(*AWAY_S)


FAULTS_A_ROUND = len(_one_round(random.Random(0)))
