"""Kill, restart, settle, check: real processes over one data directory and one database, for many cycles.

Theory of operation. A broker, four workers, a reader and a resolver run all the time. A cycle lets one death of the
plan happen, starts what died, and measures how long it takes until what was in doubt at that moment is settled.
Every ``check_every`` cycles, and at the end, the workers stop, everything is read, and the history of the whole
campaign is checked (``tools.checkers.history``).

Invariants:
* every wait has a deadline; one that passes ends the campaign with what did not happen;
* a fault lasts, in the history, from the kill until everything is up and settled;
* no process outlives ``Campaign.run``.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import txmq
from tools.checkers.history import Coverage, Verdict, check
from tools.crash import final_reads, offline
from tools.crash.directory import BROKER_SETTINGS, SCRAP, SCRAP_SETTINGS, CampaignDirectory, HistoryFile, read_history
from tools.crash.doors import OPEN, OPERATOR, Doors, user_of
from tools.crash.plan import LEFT_FOR_RESOLVER, SQLITE_POINTS, WORKERS, Death, deaths
from tools.crash.processes import CampaignError, Child, has_stopped, pause
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess

SETTLE_S_MAX = 5.0  # the promise: nothing in doubt so long after both sides are up
SETTLE_GIVEN_UP_S = 60.0
POINT_S = 60.0  # until a process reaches its point, on a machine that is busy with others
KILLED = -signal.SIGKILL


@dataclass(slots=True)
class Report:
    """What a campaign proved."""

    verdict: Verdict
    deaths: Counter[str] = field(default_factory=Counter)
    points_hit: Counter[str] = field(default_factory=Counter)
    settle_s: list[float] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)
    settle_s_max: float = SETTLE_S_MAX
    offline: list[str] = field(default_factory=list)  # what the reader of the files alone found different

    @property
    def is_late(self) -> bool:
        """Whether something stayed in doubt for too long."""
        return max(self.settle_s, default=0.0) > self.settle_s_max

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return self.verdict.result == "valid" and not self.is_late and not self.offline


class Campaign:
    """One campaign in an empty ``directory``; ``say`` gets a line a cycle.

    Attributes:
        settle_s_max: nothing may stay in doubt for longer, everybody being up.
        settle_every: after so many cycles it is waited for; the faults of a cycle before that last until then.
        brokers: those that run, or must be started again.
        doors: who may connect, and how; the campaign itself as the operator, each process as a user of its own.
    """

    settle_s_max = SETTLE_S_MAX
    settle_every = 1
    doors: Doors = OPEN
    points: Collection[str] = SQLITE_POINTS
    cycles_for_all = 3 * len(SQLITE_POINTS)  # from here on every point must have been hit
    left_for_resolver: Mapping[str, str] = LEFT_FOR_RESOLVER
    worker_module, reader_module = "tools.crash.worker", "tools.crash.reader"

    def __init__(self, directory: Path, seed: int, sync: str = "always", say: Callable[[str], None] = print) -> None:
        self.world, self._say = self.make_world(directory), say
        # Two streams: how often a process is started must not change what dies next.
        self._plan, self._worker_seeds = self.deaths(random.Random(seed)), random.Random(-seed - 1)
        self.settings: dict[str, object] = {**BROKER_SETTINGS, "sync": sync}
        self.brokers: list[BrokerProcess] = []
        self.workers = [self._child(f"w{number}", self.worker_command) for number in range(WORKERS)]
        self._reader = self._child("r", self._reader_command)
        self._resolver = self._child("resolver", self._resolver_command)
        self.report = Report(Verdict("unknown", (), (), {}))
        self._faults = self._settled = 0

    def make_world(self, directory: Path) -> CampaignDirectory:
        """Files and databases."""
        return CampaignDirectory(directory)

    def deaths(self, rng: random.Random) -> Iterator[Death]:
        """What dies when."""
        return deaths(rng)

    def _child(self, name: str, command: Callable[[str], list[str]]) -> Child:
        return Child(name, self.world.directory, command)

    def worker_command(self, name: str) -> list[str]:
        """Module and arguments of a worker's run."""
        seed = str(self._worker_seeds.getrandbits(32))
        return [self.worker_module, str(self.world.directory), self.address_of(self.brokers, user_of(name)), name, seed]

    def _reader_command(self, name: str) -> list[str]:
        return [self.reader_module, str(self.world.directory), self.address_of(self.brokers, user_of(name)), name]

    def _resolver_command(self, _name: str) -> list[str]:
        return ["txmq.cli.main", "resolver", "--config", str(self.world.resolver_config)]

    @property
    def address(self) -> str:
        """Of all brokers, for the campaign itself."""
        return self.address_of(self.brokers)

    def address_of(self, brokers: Sequence[BrokerProcess], user: str = OPERATOR) -> str:
        """Of some brokers, for a user."""
        return self.doors.address(brokers, user)

    def start_brokers(self, stack: ExitStack) -> list[BrokerProcess]:
        """Start what the clients talk to; ``stack`` ends it."""
        broker = BrokerProcess(self.world.broker, settings=self.settings, tls=self.doors.tls)
        stack.callback(broker.kill)
        return [broker.start()]

    # --- the whole ---------------------------------------------------------------------------------------------------

    def run(self, cycles: int, check_every: int = 50) -> Report:
        """Play ``cycles`` deaths.

        Raises:
            CampaignError: something that is waited for did not happen.
        """
        self.report.settle_s_max = self.settle_s_max
        with ExitStack() as stack:
            for child in self._children:
                stack.callback(child.kill)
            stack.callback(self.world.close)
            self.brokers = self.start_brokers(stack)
            self.doors.close(self.brokers)
            self.set_up()
            stack.callback(self.history.close)
            for number, death in zip(range(1, cycles + 1), self._plan, strict=False):
                self._cycle(number, cycles, death)
                if number == cycles or number % check_every == 0:
                    if not self.check(number):
                        return self.report
                    if number < cycles:
                        self._start_children()
            self._check_offline()
        return self.report

    @property
    def _children(self) -> list[Child]:
        return [*self.workers, self._reader, self._resolver]

    def set_up(self) -> None:
        """Topics and tables, and whoever uses them."""
        self.world.create(self.address_of(self.brokers, self._resolver.name))
        self.history = HistoryFile(self.world.histories, "campaign")
        with txmq.connect(self.address) as client:
            for topic, partitions in self.world.partitions.items():
                settings = SCRAP_SETTINGS if topic == SCRAP else {}
                client.topics.create(topic, partitions=partitions, **settings)
            databases = list(self.world.install(client).values())
        service, resolver = self.world.service_grants(databases), self.world.resolver_grants(databases)
        users = {worker.name: service for worker in self.workers}
        own = {self._reader.name: self.world.reader_grants(), self._resolver.name: resolver}
        self.doors.admit(self.brokers, users | own)
        self._start_children()

    def _start_children(self) -> None:
        for child in self._children:
            if child.is_running:
                continue
            # A resolver that finds no broker when it starts says so and ends.
            if child.status not in (None, 0, KILLED, -signal.SIGTERM) and child is not self._resolver:
                raise CampaignError(f"{child.name} ended by itself, with {child.status}; see {child.name}.log")
            child.start()

    # --- a cycle -----------------------------------------------------------------------------------------------------

    def _cycle(self, number: int, cycles: int, death: Death) -> None:
        self._faults += 1
        name = f"fault-{self._faults}"
        eventually(self.all_work, "every worker comes to its work", POINT_S, CampaignError)
        self.history.write("nemesis", "invoke", name, [], death=str(death))
        self.let_die(death)
        self.world.bring_up()
        restarted_s = self.bring_up_brokers()
        in_doubt = self.in_doubt()
        self._start_children()
        settled_s = 0.0
        if number % self.settle_every == 0 or number == cycles:
            settled_s = self.await_settled(in_doubt)
            for before in range(self._settled, self._faults):
                self.history.write("nemesis", "ok", f"fault-{before + 1}", [])
            self._settled = self._faults
        self.report.deaths["broker"] += death.broker
        self.report.deaths["client"] += len(death.workers) + death.resolver
        self._say(
            f"{number}/{cycles}  {death}  restart {restarted_s:.2f} s  in doubt {len(in_doubt)}, "
            f"settled in {settled_s:.2f} s"
        )

    def all_work(self) -> bool:
        """Whether every worker has begun."""
        files = [self.world.histories / f"{worker.run_name}.jsonl" for worker in self.workers]
        return all(file.exists() and file.stat().st_size for file in files)

    def let_die(self, death: Death) -> None:
        """Carry out one death of the plan."""
        if death.point is None:
            pause(death.delay_s)
            self.kill(death)
        elif death.resolver:
            self.die_in_resolver(death, death.point)
        elif death.broker:
            self._die_in_broker(f"{death.point}:{death.nth}")
            self.report.points_hit[death.point] += 1
        else:
            self.die_in_worker(self.workers[death.workers[0]], f"{death.point}:{death.nth}")
            self.report.points_hit[death.point] += 1

    def kill(self, death: Death) -> None:
        """All signals first, so that the victims die at one moment."""
        victims = [self.workers[number] for number in death.workers] + ([self._resolver] if death.resolver else [])
        for victim in victims:
            victim.signal(signal.SIGKILL)
        for broker in self.brokers if death.broker else ():
            broker.kill()
        for victim in victims:
            victim.kill()

    def _die_in_broker(self, crash: str) -> None:
        (broker,) = self.brokers
        broker.kill()
        broker.launch(env={"TXMQ_CRASH": crash})
        await_death(broker, crash)

    def die_in_worker(self, worker: Child, crash: str) -> None:
        """Start a worker that dies there, in the place of the one that runs."""
        worker.kill()
        worker.start(crash)
        eventually(lambda: not worker.is_running, f"{worker.name} reaches {crash}", POINT_S, CampaignError)
        if worker.status != KILLED:
            raise CampaignError(f"{worker.name} ended with {worker.status}, not by {crash}")

    def die_in_resolver(self, death: Death, point: str) -> None:
        """Leave a transaction in doubt, and nobody but the resolver that dies to settle it."""
        self._resolver.kill()
        self.die_in_worker(self.workers[death.workers[0]], f"{self.left_for_resolver[point]}:1")
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
        for worker in self.workers:
            worker.kill()
        self.die_in_worker(self._resolver, f"{point}:{death.nth}")
        self.report.points_hit[point] += 1

    def bring_up_brokers(self) -> float:
        """Start those that are dead, all at once. Returns how long the restart took; 0 if none was dead."""
        dead = [broker for broker in self.brokers if not broker.is_running]
        if not dead:
            return 0.0
        begun = time.monotonic()
        try:
            for broker in dead:
                broker.launch(env={})
            for broker in dead:
                broker.wait_until_ready()
        except BrokerFailedError as error:
            raise CampaignError(f"a broker does not come back: {error}") from error
        elapsed = time.monotonic() - begun
        self.report.restart_s.append(elapsed)
        return elapsed

    def in_doubt(self) -> set[str]:
        """What is prepared now, at brokers and in databases."""
        return final_reads.in_doubt(self.address) | self.world.prepared()

    def await_settled(self, in_doubt: set[str]) -> float:
        """Returns how long it took until nothing of ``in_doubt`` was left, everybody being up."""
        begun = time.monotonic()
        eventually(
            lambda: not in_doubt & self.in_doubt(), "what was in doubt is settled", SETTLE_GIVEN_UP_S, CampaignError
        )
        elapsed = time.monotonic() - begun
        if in_doubt:
            self.report.settle_s.append(elapsed)
            self.history.write("settled", "ok", f"fault-{self._faults}", [elapsed, self.settle_s_max])
        return elapsed

    # --- a check -----------------------------------------------------------------------------------------------------

    def check(self, number: int) -> bool:
        """Whether the campaign may go on: everything was read, and nothing was found."""
        for child in (*self.workers, self._reader):
            child.signal(signal.SIGTERM)
        for child in (*self.workers, self._reader):
            child.wait_stopped()
        begun = time.monotonic()
        left = self._left_in_doubt()
        self.write_final_reads(left)
        with txmq.connect(self.address) as client:
            self.world.introduce(client)
            final_reads.ask_for_outcomes(client, read_history(self.world), self.history)
        history = read_history(self.world)
        self.report.verdict = verdict = check(history, self.coverage(number))
        counts = ", ".join(f"{count} {name}" for name, count in verdict.counts.items())
        self._say(f"check after {number} cycles: {verdict.result} ({counts}; {time.monotonic() - begun:.1f} s)")
        return verdict.result == "valid"

    def coverage(self, number: int) -> Coverage:
        """The least that must have happened after so many cycles."""
        return Coverage(ok=number, faults=number)

    def write_final_reads(self, left: set[str]) -> None:
        """Everything that is there; the writers are at rest."""
        final_reads.write(self.world, self.address, self.history, left)

    def _check_offline(self) -> None:
        """Hold the files of the stopped broker to what the client reads."""
        for child in self._children:
            child.kill()
        drained = final_reads.drain(self.address, self.world.partitions)
        statuses = [broker.stop() for broker in self.brokers]
        self.report.offline += offline.complaints([broker.data_dir for broker in self.brokers], drained)
        if any(statuses):
            self.report.offline.append(f"brokers stopped with {statuses}")
        self.report.offline += self.doors.refused(self.brokers)

    def _left_in_doubt(self) -> set[str]:
        """What is in doubt although everybody had the promised time."""
        deadline = time.monotonic() + self.settle_s_max
        while True:
            left = self.in_doubt()
            if not left or time.monotonic() >= deadline:
                return left
            pause(0.05)


def await_death(broker: BrokerProcess, crash: str) -> None:
    """Wait until a broker dies at a crash point.

    Raises:
        CampaignError: it does not, or ends in another way.
    """
    eventually(lambda: not broker.is_running, f"the broker reaches {crash}", POINT_S, CampaignError)
    if broker.returncode != KILLED:
        raise CampaignError(f"the broker ended with {broker.returncode}, not by {crash}")


def is_stopped(broker: BrokerProcess) -> bool:
    """Whether a broker has stopped itself at a crash point.

    Raises:
        CampaignError: it ended.
    """
    if broker.pid is None or not broker.is_running:
        raise CampaignError(f"a broker ended with status {broker.returncode}; see {broker.data_dir}.log")
    return has_stopped(broker.pid)
