"""What is played over homes: at which point of which process, what dies with it, and what must be left before.

A *cell* is a point, or a path of points as ``TXMQ_CRASH`` takes it, and the victims. Roles are those of a transaction
of the moment: it is decided at one home (``decider``) and has a branch at the other one (``other``). A broker's point
says by its name which role is meant. A victim other than the process at the point dies while that one is stopped there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tools.crash.directory import LAST_RESOURCE, LOCAL
from tools.crash.homes.directory import ACKED, EXTERNAL, HALF, XA
from tools.crash.plan import WORKERS, Death
from txmq.runtime.crashpoints import POINTS

ALL_KINDS: Final = LOCAL + LOCAL + LAST_RESOURCE + LAST_RESOURCE + XA + EXTERNAL + ACKED + HALF
# The kinds of transactions that reach a client's point.
CLIENT_POINTS: Final[Mapping[str, str]] = {
    "client.homes.prepare_sent": LOCAL + LAST_RESOURCE + XA + EXTERNAL + ACKED,
    "client.homes.prepared": LOCAL + LAST_RESOURCE + XA + EXTERNAL + ACKED,
    "client.homes.commit_sent": LOCAL + LAST_RESOURCE + XA + EXTERNAL + ACKED,
    "client.homes.told": LOCAL + LAST_RESOURCE + XA + EXTERNAL + ACKED,
    "client.homes.rollback_sent": EXTERNAL,
    "client.homes.rolled_back": EXTERNAL,
    "client.prepare.sent": EXTERNAL + HALF,
    "client.foreign.prepared": EXTERNAL,
    "client.foreign.resolved": EXTERNAL,
    "client.half.prepared": HALF,
    "client.half.decided": HALF,
    **{
        point: XA if point in ("client.xa.branch_started", "client.xa.prepared", "client.xa.committed") else
        LOCAL + XA + ACKED
        for point in POINTS
        if point.startswith("client.xa.") and point not in ("client.xa.fenced", "client.xa.rolled_back")
    },
    **{
        point: LAST_RESOURCE
        for point in POINTS
        if point.startswith("client.tx.") and point != "client.tx.db_commit_sent"
    },
}  # fmt: skip
_JOURNALED: Final = (
    "broker.branch.prepared", "broker.branch.placed", "broker.branch.reported", "broker.branch.told_rolled_back",
    "broker.decision.prepared", "broker.decision.decided", "broker.decision.awaits_place", "broker.decision.fenced",
    "broker.decision.reported",
)  # fmt: skip
# Of what is in the journal buffer only: dead before its record, after it, before the answer, after it.
_STAGES: Final = ("", ">journal.append.written", ">journal.sync.done", ">broker.answers.sent", ">broker.apply.done")
_SENDING: Final = ("broker.branch.asks", "broker.branch.fences", "broker.branch.reports")
BROKER_PATHS: Final = (
    *(point + stage for point in _JOURNALED for stage in _STAGES),
    *(point + stage for point in _SENDING for stage in ("", ">broker.branch.ask_sent")),
    "broker.branch.told_committed", "broker.decision.asked", "broker.decision.shows",
)  # fmt: skip
# Where a client is killed before, so that a broker reaches its point.
_LEFT_UNDECIDED, _LEFT_DECIDED = "client.homes.prepared", "client.xa.decided"
LEFT: Final[Mapping[str, str]] = {
    "broker.branch.asks": _LEFT_UNDECIDED,
    "broker.branch.fences": _LEFT_UNDECIDED,
    "broker.branch.told_rolled_back": _LEFT_UNDECIDED,
    "broker.branch.told_committed": _LEFT_DECIDED,
    "broker.decision.asked": _LEFT_UNDECIDED,
    "broker.decision.fenced": _LEFT_UNDECIDED,
    "broker.decision.awaits_place": _LEFT_UNDECIDED,
}
# client: dies; zombie: goes on when the others are back.
CLIENT_VICTIMS: Final = (
    ("client",), ("client", "decider"), ("client", "other"), ("decider", "zombie"), ("other", "zombie"),
    ("decider", "other", "zombie"), ("client", "decider", "other"),
)  # fmt: skip
BROKER_VICTIMS: Final = (("home",), ("home", "peer"), ("home", "client"), ("home", "peer", "client"))
_VISITS_MAX = 8
_RUN_S_MAX = 0.5


@dataclass(frozen=True, slots=True)
class HomesDeath(Death):
    """One cell; without a point, deaths at a random moment.

    Attributes:
        decider: the number of the broker that decides, or of those that die at a random moment.
        victims: see ``CLIENT_VICTIMS`` and ``BROKER_VICTIMS``.
    """

    decider: int = 0
    victims: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.point is None:
            return Death.__str__(self) + f" of {self.decider}"
        return f"{' + '.join(self.victims)} at {self.point}:{self.nth}, decided at {self.decider}"

    @property
    def first(self) -> str:
        """The point whose visits count."""
        return (self.point or "").partition(">")[0]

    @property
    def is_clients(self) -> bool:
        """Whether a client is stopped or dies there first."""
        return self.first in CLIENT_POINTS

    @property
    def home(self) -> int:
        """The broker that reaches the point."""
        return self.decider if self.first.startswith("broker.decision.") else 1 - self.decider


Cell = tuple[str, tuple[str, ...]]
CELLS: Final[tuple[Cell, ...]] = (
    *((point, victims) for point in CLIENT_POINTS for victims in CLIENT_VICTIMS),
    *((path, victims) for path in BROKER_PATHS for victims in BROKER_VICTIMS),
)


def cells(rng: random.Random, chosen: tuple[Cell, ...] = CELLS) -> Iterator[HomesDeath]:
    """Endless: every cell once in a random order, with a death at a random moment after every fourth."""
    while True:
        for number, (path, victims) in enumerate(rng.sample(chosen, len(chosen))):
            yield cell(rng, path, victims)
            if number % 4 == 3:
                workers = rng.choice(((), (0, 1), tuple(range(WORKERS))))
                yield HomesDeath(True, workers, rng.random() < 0.3, None, 0, rng.uniform(0, _RUN_S_MAX))


def cell(rng: random.Random, path: str, victims: tuple[str, ...]) -> HomesDeath:
    """One of them."""
    point = path.partition(">")[0]
    nth = 1 if point in LEFT or point.startswith("client.homes.roll") else rng.randint(1, _VISITS_MAX)
    return HomesDeath(False, (rng.randrange(WORKERS),), False, path, nth, 0.0, rng.randrange(2), victims)
