"""An ordered producer through outages, kills and full spools: per key the order of sending, and the exact count.

Theory of operation. One producer process sends without end; a cycle lets something happen to it or to the broker:

* the broker is killed and stays away for a while, long enough to fill the spool now and then;
* the broker is paused (SIGSTOP), so that answers stay out and fates are unknown;
* the producer is killed, at a random moment or at a named point, while the broker is there or away, and its next life
  begins while the broker is there or away.

Every ``check_every`` cycles and at the end the producer ends in order, the spool is drained by another one, and
``tools.checkers.history`` looks at everything: what was acknowledged or spooled is there once (L5, L7), in the
order of each thread (L11), of all lives (L12), each key in one partition (A6); nothing that was refused is there (L2).

Invariants:
    * every wait has a deadline;
    * a message of a killed producer, about which nothing was told, is there once or not at all, at its place.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import txmq
from tools.checkers.events import parse_history
from tools.checkers.history import Verdict, check
from tools.crash import final_reads, offline
from tools.crash.directory import BROKER_SETTINGS, HistoryFile
from tools.crash.doors import OPEN, OPERATOR, Doors, may
from tools.crash.ordered.directory import PARTITIONS, TOPIC, OrderedCampaignDirectory, options
from tools.crash.processes import CampaignError, Child, pause
from txmq.client.spooling.spool import Spool
from txmq.runtime.crashpoints import POINTS
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

ORDERED_POINTS = tuple(sorted(point for point in POINTS if point.startswith("client.ordered.")))
PRODUCER = "p"
KINDS = ("outage", "paused", "killed", "killed-away", "both")
POINT_S = 60.0
DRAIN_S = 120.0
_VISITS_MAX = 12
_RUN_S_MAX, _AWAY_S_MAX, _PAUSED_S_MAX = 0.4, 1.5, 1.2
KILLED = -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Cycle:
    """What happens. With ``point`` the producer dies there; else at a moment."""

    kind: str
    point: str | None
    nth: int
    run_s: float
    away_s: float

    def __str__(self) -> str:
        where = f" at {self.point}:{self.nth}" if self.point else ""
        return f"{self.kind}{where}, away {self.away_s:.2f} s"


def cycles(rng: random.Random) -> Iterator[Cycle]:
    """Endless: every point once a round, every kind between them."""
    while True:
        for point in rng.sample(ORDERED_POINTS, len(ORDERED_POINTS)):
            for kind in (rng.choice(KINDS), rng.choice(KINDS)):
                yield Cycle(kind, None, 0, rng.uniform(0, _RUN_S_MAX), rng.uniform(0, _AWAY_S_MAX))
            yield Cycle("point", point, rng.randint(1, _VISITS_MAX), 0.0, rng.uniform(0, _AWAY_S_MAX))


@dataclass(slots=True)
class OrderedReport:
    """What a campaign proved."""

    verdict: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    kinds: Counter[str] = field(default_factory=Counter)
    points_hit: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)  # acknowledged, spooled, refused, nothing
    spooled_max: int = 0  # what was found in the spool, at most
    others: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """What is wrong; none where every promise was kept."""
        return [*(str(finding) for finding in self.verdict.findings), *self.verdict.missing, *self.others]


class OrderedCampaign:
    """One campaign in an empty ``directory``; ``say`` gets a line a cycle, ``doors`` say who may connect."""

    def __init__(self, directory: Path, seed: int, say: Callable[[str], None] = print, doors: Doors = OPEN) -> None:
        self.world, self._say, self._doors = OrderedCampaignDirectory(directory), say, doors
        self._cycles = cycles(random.Random(seed))
        self.broker = BrokerProcess(self.world.broker, settings=BROKER_SETTINGS, tls=doors.tls)
        self._producer = Child(PRODUCER, directory, self._command)
        self.report = OrderedReport()

    def _command(self, name: str) -> list[str]:
        return ["tools.crash.ordered.worker", str(self.world.directory), self._address(PRODUCER), name]

    def _address(self, user: str = OPERATOR) -> str:
        return self._doors.address([self.broker], user)

    # --- the whole ---------------------------------------------------------------------------------------------------

    def run(self, count: int, check_every: int = 50) -> OrderedReport:
        """Play ``count`` cycles.

        Raises:
            CampaignError: something that is waited for did not happen.
        """
        with ExitStack() as stack:
            stack.callback(self._producer.kill)
            stack.callback(self.broker.kill)
            self.world.histories.mkdir()
            self._history = HistoryFile(self.world.histories, "campaign")
            stack.callback(self._history.close)
            self.broker.start()
            self._doors.close([self.broker])
            with txmq.connect(self._address()) as client:
                client.topics.create(TOPIC, partitions=PARTITIONS[TOPIC])
            self._doors.admit([self.broker], {PRODUCER: may("write,read", "topic", [TOPIC])})
            self._start()
            for number, cycle in zip(range(1, count + 1), self._cycles, strict=False):
                self._play(number, count, cycle)
                if (number == count or number % check_every == 0) and not self._check(number):
                    break
            self._look_at_files()
        return self.report

    def _start(self, crash: str | None = None) -> None:
        if not self._producer.is_running:
            self._producer.start(crash)

    # --- a cycle -----------------------------------------------------------------------------------------------------

    def _play(self, number: int, count: int, cycle: Cycle) -> None:
        self._history.write("nemesis", "invoke", f"cycle-{number}", [])
        if cycle.point is not None:
            self._die_at(cycle, f"{cycle.point}:{cycle.nth}")
        else:
            self._start()
            self._wait_for_sends(10)
            pause(cycle.run_s)
            getattr(self, f"_{cycle.kind.replace('-', '_')}")(cycle)
        self._history.write("nemesis", "ok", f"cycle-{number}", [])
        self.report.kinds[cycle.kind] += 1
        waiting = self._waiting()
        self.report.spooled_max = max(self.report.spooled_max, waiting)
        self._say(f"{number}/{count}  {cycle}  {waiting} in the spool")

    def _outage(self, cycle: Cycle) -> None:
        """The broker is away; the producer spools on."""
        self.broker.kill()
        pause(cycle.away_s)
        self.broker.start()

    def _paused(self, cycle: Cycle) -> None:
        """No answer comes for a while."""
        self.broker.pause()
        pause(min(cycle.away_s, _PAUSED_S_MAX))
        self.broker.resume()

    def _killed(self, _cycle: Cycle) -> None:
        self._producer.kill()

    def _killed_away(self, cycle: Cycle) -> None:
        """The producer dies and begins anew while the broker is away."""
        self.broker.kill()
        pause(cycle.away_s / 2)
        self._producer.kill()
        self._start()
        self._wait_for_sends(10)
        self.broker.start()

    def _both(self, cycle: Cycle) -> None:
        self._producer.signal(signal.SIGKILL)
        self.broker.kill()
        self._producer.kill()
        pause(cycle.away_s / 4)
        self.broker.start()

    def _die_at(self, cycle: Cycle, crash: str) -> None:
        """The next life dies at a point; the broker comes and goes meanwhile, so that spooling and draining happen."""
        self._producer.kill()
        self._start(crash)
        while self._producer.is_running:
            self.broker.kill()
            pause(cycle.away_s / 2)
            self.broker.start()
            self._wait_for(lambda: not self._producer.is_running or self._waiting() == 0, f"{crash} is reached")
        if self._producer.status != KILLED:
            raise CampaignError(f"the producer ended with {self._producer.status}, not by {crash}; see p.log")
        self.report.points_hit[crash.partition(":")[0]] += 1

    def _wait_for_sends(self, lines: int) -> None:
        """Until the life that runs now has been told something of so many messages, if only that the spool is full."""
        self._wait_for(lambda: self._told_lines() >= lines, f"the producer is told of {lines} messages")

    def _told_lines(self) -> int:
        if not self._producer.is_running:
            raise CampaignError(f"the producer ended by itself, with {self._producer.status}; see p.log")
        files = self.world.histories.glob(f"{self._producer.run_name}.t*.jsonl")
        return sum(file.read_bytes().count(b"\n") // 2 for file in files)

    @staticmethod
    def _wait_for(condition: Callable[[], bool], what: str) -> None:
        eventually(condition, what, POINT_S, CampaignError)

    def _waiting(self) -> int:
        try:
            with Spool(self.world.spool, read_only=True) as spool:
                return sum(spool.waiting.values())
        except txmq.errors.StorageError:  # not there yet
            return 0

    # --- a check -----------------------------------------------------------------------------------------------------

    def _check(self, number: int) -> bool:
        """Whether the campaign may go on."""
        if self._producer.is_running:
            self._producer.signal(signal.SIGTERM)
            self._producer.wait_stopped()
        self._drain()
        drained = final_reads.drain(self._address(), PARTITIONS)
        for name, found in (("drain", drained), ("rows", []), ("in-doubt", [])):
            self._history.write(name, "ok", name, found)
        lines = self.world.lines()
        self.report.verdict = verdict = check(parse_history(lines))
        sends = [line for line in lines if line["f"] == "send"]
        self.report.told = Counter(line.get("status", line["ty"]) for line in sends)
        self._drained = drained
        counts = ", ".join(f"{count} {name}" for name, count in verdict.counts.items())
        self._say(f"check after {number} cycles: {verdict.result} ({counts})")
        return verdict.result == "valid" and not self.report.others

    def _drain(self) -> None:
        """By a process of its own, as an operator would, with the producer's user; nothing may be parked."""
        with (
            txmq.connect(self._address(PRODUCER)) as client,
            client.ordered_producer(txmq.KeyHashSelector(), str(self.world.spool), options=options({})) as producer,
        ):
            producer.flush(DRAIN_S)
            self.report.others += [f"parked: {entry.reason}" for entry in producer.parked()]

    def _look_at_files(self) -> None:
        status = self.broker.stop()
        self.report.others += offline.complaints(self.world.broker, self._drained)
        if status != 0:
            self.report.others.append(f"the broker stopped with status {status}")
        self.report.others += self._doors.refused([self.broker])
