"""The campaign with XA: workers, a resolver, a reader, a broker and two MariaDB servers, and deaths of any of them.

A cell is a crash point of a client and a set of victims. The client stops there (SIGSTOP), the victims die by SIGKILL
at that moment and come back, and then the client either dies too or goes on, as a zombie that does not know what
happened.
Between cells everybody dies at random moments, alone and in pairs. The rest is as in ``campaign``.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.crash.campaign import POINT_S, Campaign
from tools.crash.plan import WORKERS, Death
from tools.crash.processes import CampaignError, Child, pause
from tools.crash.xa.directory import XaCampaignDirectory
from tools.crash.xa.final_reads import write_bank
from txmq.runtime.crashpoints import POINTS
from txmq.testing.eventually import eventually

# A branch that was prepared is rolled back only where another one fails: tests/services/xa/test_xa.py goes there. The
# marker of a last resource goes with COMMIT on MariaDB: the campaign on SQLite stops between them.
_RARE: Final = frozenset({"client.xa.fenced", "client.xa.rolled_back", "client.tx.marker_inserted"})
CLIENT_POINTS: Final = tuple(
    sorted(point for point in POINTS if point.startswith(("client.xa.", "client.tx.")) and point not in _RARE)
)
# What a worker must leave for a resolver to reach the point.
LEFT_FOR_XA_RESOLVER: Final = {
    "resolver.xa.committed": "client.xa.decided",
    "resolver.xa.completed": "client.xa.decided",
    "resolver.xa.fenced": "client.xa.all_prepared",
    "resolver.xa.rolled_back": "client.xa.all_prepared",
}
RESOLVER: Final = ("resolver",)
# client: it dies; zombie: it goes on when the others are back
VICTIMS: Final = (
    ("client",), ("broker", "zombie"), ("a", "zombie"), ("b", "zombie"), ("client", "broker"), ("client", "a"),
    ("client", "a", "b"), ("broker", "a", "zombie"), ("client", "broker", "a", "b"), ("zombie",),
)  # fmt: skip
CELLS: Final = len(CLIENT_POINTS) * len(VICTIMS) + len(LEFT_FOR_XA_RESOLVER)
_VISITS_MAX = 12
_RUN_S_MAX = 0.5
_ZOMBIE_S = 1.5  # beyond the second that a resolver waits for an owner that has gone


@dataclass(frozen=True, slots=True)
class XADeath(Death):
    """Deaths of servers, too. With a point, the worker stops there while ``victims`` die."""

    databases: tuple[int, ...] = ()
    victims: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.point is not None:
            return f"{' + '.join(self.victims)} at {self.point}:{self.nth}"
        return Death.__str__(self) + "".join(f" + database {'ab'[number]}" for number in self.databases)


def cells(rng: random.Random) -> Iterator[XADeath]:
    """Endless: every cell once in a random order, with deaths at random moments between them."""
    while True:
        listed = [(point, victims) for point in CLIENT_POINTS for victims in VICTIMS]
        listed += [(point, RESOLVER) for point in LEFT_FOR_XA_RESOLVER]
        rng.shuffle(listed)
        for point, victims in listed:
            yield _at_random(rng)
            yield _cell(rng, point, victims)


def _cell(rng: random.Random, point: str, victims: tuple[str, ...]) -> XADeath:
    databases = tuple(number for number, name in enumerate("ab") if name in victims)
    worker, nth = rng.randrange(WORKERS), rng.randint(1, _VISITS_MAX)
    if victims == RESOLVER:
        return XADeath(False, (worker,), True, point, 1, 0.0, (), victims)
    return XADeath("broker" in victims, (worker,), False, point, nth, 0.0, databases, victims)


def _at_random(rng: random.Random) -> XADeath:
    some = tuple(sorted(rng.sample(range(WORKERS), rng.randint(1, 2))))
    broker, workers, databases = rng.choice(
        [
            (True, (), ()), (False, some, ()), (False, (), (0,)), (False, (), (1,)), (True, some, ()), (True, (), (0,)),
            (False, some, (1,)), (False, (), (0, 1)), (True, tuple(range(WORKERS)), (0, 1)),
        ]
    )  # fmt: skip
    return XADeath(broker, workers, rng.random() < 0.3, None, 0, rng.uniform(0, _RUN_S_MAX), databases)


class XACampaign(Campaign):
    """See the module's docstring."""

    points = (*CLIENT_POINTS, *LEFT_FOR_XA_RESOLVER)
    cycles_for_all = 2 * CELLS
    left_for_resolver = LEFT_FOR_XA_RESOLVER
    worker_module, reader_module = "tools.crash.xa.worker", "tools.crash.xa.reader"
    world: XaCampaignDirectory

    def __init__(self, directory: Path, seed: int, sync: str = "always", say: Callable[[str], None] = print) -> None:
        super().__init__(directory, seed, sync, say)
        self.cells: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.database_deaths = 0

    def make_world(self, directory: Path) -> XaCampaignDirectory:
        return XaCampaignDirectory(directory)

    def deaths(self, rng: random.Random) -> Iterator[Death]:
        return cells(rng)

    def let_die(self, death: Death) -> None:
        assert isinstance(death, XADeath)
        if death.point is None:
            pause(death.delay_s)
            self.kill(death)
            self._kill_databases(death)
            return
        self.cells[death.point, death.victims] += 1
        if death.resolver:
            self.die_in_resolver(death, death.point)
        else:
            self._play_cell(death, self.workers[death.workers[0]], death.point)
            self.report.points_hit[death.point] += 1

    def _play_cell(self, death: XADeath, worker: Child, point: str) -> None:
        crash = f"{point}:{death.nth}:stop"
        worker.kill()
        worker.start(crash)
        eventually(lambda: worker.is_stopped, f"{worker.name} reaches {crash}", POINT_S, CampaignError)
        for broker in self.brokers if death.broker else ():
            broker.kill()
        self._kill_databases(death)
        if "client" in death.victims:
            worker.kill()
            return
        self.world.bring_up()
        self.bring_up_brokers()
        if death.nth % 2:  # half of the zombies sleep until a resolver may have acted
            pause(_ZOMBIE_S)
        worker.signal(signal.SIGCONT)

    def _kill_databases(self, death: XADeath) -> None:
        for number in death.databases:
            self.world.servers[number].kill()
            self.database_deaths += 1

    def write_final_reads(self, left: set[str]) -> None:
        super().write_final_reads(left)
        write_bank(self.world, self.address, self.history)
