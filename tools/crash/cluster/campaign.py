"""Three brokers, three ZooKeeper servers, and load over all homes: each process is killed, paused and restarted.

Theory of operation. Everything that the other campaigns run works here at once: transactions with and without a
database over partitions of several homes, a consumer group, an ordered producer with its spool, a reader that looks for
rows, a resolver; and a *pulse*, which sends to each partition of its own topic without rest. One fault after the other
befalls one broker, one ZooKeeper server, or the majority of those. Behind each it is measured

* how long the longest pause of a partition was whose home lived on (all of them if ZooKeeper was the victim);
* how long after its process was up, or went on, the victim's partitions took messages again;
* how long what was in doubt took to be settled.

At the end the checkers look at the whole history: for messages, rows and outcomes, and for the group.

Invariants:
* every wait has a deadline; one that passes ends the campaign with what did not happen;
* a fault lasts, in the history, until everything is up and settled;
* no process outlives ``ClusterCampaign.run``.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import txmq
from tools.crash import final_reads, offline
from tools.crash.cluster.directory import BROKERS, PARTITIONS, PULSE, ClusterCampaignDirectory
from tools.crash.cluster.pulse import file_of, newest_ok
from tools.crash.directory import BROKER_SETTINGS, SCRAP, SCRAP_SETTINGS, HistoryFile
from tools.crash.groups.directory import GROUP, GroupCampaignDirectory
from tools.crash.groups.directory import PARTITIONS as GROUP_PARTITIONS
from tools.crash.ordered.directory import options
from tools.crash.processes import CampaignError, Child, pause
from txmq.client.spooling.spool import Spool
from txmq.testing.checkers.groups import GroupRules, check_group
from txmq.testing.checkers.history import Coverage, Verdict, check
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble, ZooKeeper

WORKERS, MEMBERS = 2, 3
PAUSE_S_MAX = 2.0  # of a partition whose home lives
SETTLE_S_MAX = 5.0
GIVEN_UP_S = 90.0
BETWEEN_S = 0.5
AWAY_S = (0.2, 2.0)  # a victim is dead, or stopped, for so long; now and then
LONG_S = 6.0  # which is longer than its session with ZooKeeper
KINDS = ("kill", "pause", "restart")


class Fault(NamedTuple):
    """What befalls whom."""

    victim: str  # ``broker`` or ``zookeeper``; ``quorum``: most servers
    number: int
    kind: str
    away_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.victim} {self.number}, away {self.away_s:.1f} s"


def faults(rng: random.Random) -> Iterator[Fault]:
    """Endless: in each round every process suffers everything once."""
    while True:
        one_round = [
            (victim, number, kind) for victim in ("broker", "zookeeper") for number in range(3) for kind in KINDS
        ]
        one_round.append(("quorum", 0, "kill"))
        for victim, number, kind in rng.sample(one_round, len(one_round)):
            is_long = kind == "pause" and rng.random() < 0.3
            yield Fault(victim, number, kind, LONG_S if is_long else rng.uniform(*AWAY_S))


@dataclass(slots=True)
class ClusterReport:
    """What a campaign proved."""

    messages: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    group: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    faults: Counter[str] = field(default_factory=Counter)
    pauses_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by victim; of living homes
    recovered_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by kind; of victims
    settled_s: list[float] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """What is wrong; none if every promise was kept."""
        found = [str(finding) for finding in (*self.messages.findings, *self.group.findings)]
        return [*found, *self.messages.missing, *self.group.missing, *self.others]


class ClusterCampaign:
    """One campaign in an empty ``directory``; ``say`` gets a line a fault.

    Args:
        pause_s_max: a partition whose home lives may take no message for so long.
        settle_s_max: nothing may stay in doubt for longer, everything being up.
    """

    def __init__(
        self, directory: Path, seed: int, say: Callable[[str], None] = print, *, pause_s_max: float = PAUSE_S_MAX,
        settle_s_max: float = SETTLE_S_MAX, servers: int = 3,
    ) -> None:  # fmt: skip
        self.world, self._say = ClusterCampaignDirectory(directory), say
        self._plan, self._seeds = faults(random.Random(seed)), random.Random(-seed - 1)
        self._pause_s_max, self._settle_s_max = pause_s_max, settle_s_max
        self.ensemble = Ensemble(directory / "zookeepers", servers)
        self._cluster: Cluster | None = None
        self._workers = [self._child(f"w{n}", "tools.crash.worker", is_seeded=True) for n in range(WORKERS)]
        self._members = [self._child(f"m{n}", "tools.crash.groups.member") for n in range(MEMBERS)]
        self._pulse = self._child("u", "tools.crash.cluster.pulse")
        self._rounds = self._child("g", "tools.crash.groups.producer")
        self._ordered = self._child("o", "tools.crash.ordered.worker")
        self._reader = self._child("r", "tools.crash.reader")
        self._resolver = Child("resolver", directory, self._resolver_command)
        self._homes: dict[int, int] = {}  # the pulse's partition: its broker
        self.report = ClusterReport()

    @property
    def cluster(self) -> Cluster:
        """The brokers."""
        assert self._cluster is not None, "the ensemble has started"
        return self._cluster

    def _child(self, name: str, module: str, *, is_seeded: bool = False) -> Child:
        def command(run_name: str) -> list[str]:
            seed = [str(self._seeds.getrandbits(32))] if is_seeded else []
            return [module, str(self.world.directory), self.cluster.address, run_name, *seed]

        return Child(name, self.world.directory, command)

    def _resolver_command(self, _name: str) -> list[str]:
        return ["txmq.cli.main", "resolver", "--config", str(self.world.resolver_config)]

    @property
    def _children(self) -> list[Child]:
        return [
            *self._workers, *self._members, self._pulse, self._rounds, self._ordered, self._reader, self._resolver
        ]  # fmt: skip

    # --- the whole ---------------------------------------------------------------------------------------------------

    def run(self, count: int) -> ClusterReport:
        """Play so many faults.

        Raises:
            CampaignError: something that is waited for did not happen.
        """
        with ExitStack() as stack:
            stack.enter_context(self.ensemble)
            self._cluster = Cluster(
                self.world.directory / "brokers", self.ensemble, size=BROKERS, settings=BROKER_SETTINGS
            )
            for child in self._children:
                stack.callback(child.kill)
            stack.callback(self.cluster.kill)
            self._set_up()
            stack.callback(self._history.close)
            for number, fault in zip(range(1, count + 1), self._plan, strict=False):
                self._play(number, count, fault)
            self._come_to_rest()
            self._check(count)
        return self.report

    def _set_up(self) -> None:
        self.cluster.start()
        self.world.create(self.cluster.address)
        self._history = HistoryFile(self.world.histories, "campaign")
        with txmq.connect(self.cluster.address) as client:
            for topic, partitions in PARTITIONS.items():
                settings = SCRAP_SETTINGS if topic == SCRAP else {}
                client.topics.create(topic, partitions=partitions, **settings)
            self.world.install(client)
        for child in self._children:
            child.start()
        self._homes = self._placed()
        if len(set(self._homes.values())) < BROKERS:
            raise CampaignError(f"the pulse's partitions are not spread over all brokers: {self._homes}")
        self._wait_for_pulse(range(PARTITIONS[PULSE]), since=time.monotonic())

    def _placed(self) -> dict[int, int]:
        """The broker of each of the pulse's partitions."""
        with txmq.connect(self.cluster.address) as client:
            described = json.loads(client.control.call("meta", PULSE, timeout=10.0))
        ports = [str(broker.port) for broker in self.cluster.brokers]
        [topic] = described["topics"]
        leaders = [described["leaders"][home] for home in topic["homes"]]
        return {number: ports.index(leader.rpartition(":")[2]) for number, leader in enumerate(leaders)}

    # --- a fault -----------------------------------------------------------------------------------------------------

    def _play(self, number: int, count: int, fault: Fault) -> None:
        pause(BETWEEN_S)
        self._history.write("nemesis", "invoke", f"fault-{number}", [], death=str(fault))
        begun = time.monotonic()
        up_at = self._befall(fault)
        broken = [p for p, home in self._homes.items() if fault.victim == "broker" and home == fault.number]
        living = self._homes.keys() - set(broken)
        recovered_s = self._wait_for_pulse(broken, since=up_at)
        in_doubt = self._in_doubt()
        settled_s = self._await_settled(number, in_doubt)
        self._wait_for_pulse(living, since=time.monotonic())
        self._refuse_dead()
        self._history.write("nemesis", "ok", f"fault-{number}", [])
        self._note(fault, number, recovered_s, self._longest_pause(living, begun))
        self._say(
            f"{number}/{count}  {fault}  living homes paused {self.report.pauses_s[fault.victim][-1]:.2f} s, "
            f"recovered in {recovered_s:.2f} s, in doubt {len(in_doubt)}, settled in {settled_s:.2f} s"
        )

    def _note(self, fault: Fault, number: int, recovered_s: float, paused_s: float) -> None:
        report = self.report
        report.faults[f"{fault.kind} {fault.victim}"] += 1
        report.pauses_s[fault.victim].append(paused_s)
        if fault.victim == "broker":
            report.recovered_s[fault.kind].append(recovered_s)
        if paused_s > self._pause_s_max:
            report.others.append(f"fault {number} ({fault}): a partition of a living home paused {paused_s:.2f} s")

    def _befall(self, fault: Fault) -> float:
        """Let it happen; when the victim was up again."""
        if fault.victim == "quorum":
            victims = self.ensemble.servers[: len(self.ensemble.servers) // 2 + 1]
            for server in victims:
                server.kill()
            pause(fault.away_s)
            self.ensemble.start()
            return time.monotonic()
        servers = self.ensemble.servers
        victim = (
            self.cluster.brokers[fault.number] if fault.victim == "broker" else servers[fault.number % len(servers)]
        )
        getattr(self, f"_{fault.kind}")(victim, fault.away_s)
        return time.monotonic()

    @staticmethod
    def _kill(victim: BrokerProcess | ZooKeeper, away_s: float) -> None:
        victim.kill()
        pause(away_s)
        victim.start()

    @staticmethod
    def _pause(victim: BrokerProcess | ZooKeeper, away_s: float) -> None:
        victim.pause()
        pause(away_s)
        victim.resume()

    @staticmethod
    def _restart(victim: BrokerProcess | ZooKeeper, _away_s: float) -> None:
        victim.stop()
        victim.start()

    def _wait_for_pulse(self, partitions: Any, since: float) -> float:
        """Until each of the partitions has taken a message that was sent since then; how long that took."""
        begun_ns, last = int(since * 1e9), since
        for partition in partitions:
            file = file_of(self.world, self._pulse.run_name, partition)

            def has_beaten(file: Path = file) -> bool:
                newest = newest_ok(file)
                return newest is not None and newest["t"] > begun_ns

            eventually(has_beaten, f"partition {partition} of {PULSE} takes messages", GIVEN_UP_S, CampaignError)
            last = time.monotonic()
        return last - since

    def _longest_pause(self, partitions: Any, since: float) -> float:
        """The longest time between two acknowledgements of one of the partitions."""
        longest = 0.0
        for partition in partitions:
            lines = file_of(self.world, self._pulse.run_name, partition).read_text("utf-8").splitlines()
            times = [json.loads(line)["t"] / 1e9 for line in lines if '"ty":"ok"' in line]
            gaps = [later - earlier for earlier, later in pairwise(times) if later > since]
            longest = max(longest, *gaps)
        return longest

    def _in_doubt(self) -> set[str]:
        with txmq.connect(self.cluster.address) as client:
            return final_reads.listed(client)

    def _await_settled(self, number: int, in_doubt: set[str]) -> float:
        begun = time.monotonic()
        with txmq.connect(self.cluster.address) as client:
            eventually(
                lambda: not in_doubt & final_reads.listed(client), "what was in doubt is settled", GIVEN_UP_S,
                CampaignError,
            )  # fmt: skip
        elapsed = time.monotonic() - begun
        if in_doubt:
            self.report.settled_s.append(elapsed)
            self._history.write("settled", "ok", f"fault-{number}", [elapsed, self._settle_s_max])
        return elapsed

    def _refuse_dead(self) -> None:
        for child in self._children:
            if not child.is_running:
                raise CampaignError(f"{child.name} ended by itself, with {child.status}; see {child.name}.log")

    # --- the end -----------------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        """Writers end, then the group, when nothing is left to consume."""
        writers = [*self._workers, self._pulse, self._rounds, self._ordered, self._reader]
        for child in writers:
            child.signal(signal.SIGTERM)
        for child in writers:
            child.wait_stopped()
        with txmq.connect(self.cluster.address) as client:
            eventually(lambda: _lag(client) == 0, "the group catches up", GIVEN_UP_S, CampaignError)
            eventually(lambda: not final_reads.listed(client), "nothing is in doubt", GIVEN_UP_S, CampaignError)
            self._drain_spool(client)
        for member in self._members:
            member.signal(signal.SIGTERM)
        for member in self._members:
            member.wait_stopped()

    def _drain_spool(self, client: txmq.Client) -> None:
        spool = str(self.world.directory / "spool")
        with client.ordered_producer(txmq.KeyHashSelector(), spool, options=options({})) as producer:
            producer.flush(GIVEN_UP_S)
            self.report.others += [f"parked: {entry.reason}" for entry in producer.parked()]
        with Spool(Path(spool), read_only=True) as left:
            if any(left.waiting.values()):
                self.report.others.append(f"left in the spool: {left.waiting}")

    def _check(self, count: int) -> None:
        drained = final_reads.drain(self.cluster.address, PARTITIONS)
        with txmq.connect(self.cluster.address) as client:
            rows = client.groups.describe(GROUP)["partitions"]
            left = final_reads.listed(client)
        if len(rows) != GROUP_PARTITIONS:
            self.report.others.append(f"the group has {len(rows)} partitions, not {GROUP_PARTITIONS}")
        lag = [[row["topic"], row["partition"], row["start"], row["offset"], row["end"]] for row in rows]
        in_databases = [["rows", resource, found] for resource, found in self.world.rows().items()]
        for name, found in (("drain", drained), ("rows", in_databases), ("in-doubt", sorted(left)), ("lag", lag)):
            self._history.write(name, "ok", name, found)
        messages, group = GroupCampaignDirectory(self.world.directory).read()
        self.report.messages = check(messages, Coverage(ok=count, faults=count))
        self.report.group = check_group(group, GroupRules(stopped_s_max=GIVEN_UP_S))
        self._look_at_files(drained)

    def _look_at_files(self, drained: list[list[Any]]) -> None:
        for child in self._children:
            child.kill()
        directories = []
        for broker in self.cluster.brokers:
            status = broker.stop()
            directories.append(broker.data_dir)
            if status != 0:
                self.report.others.append(f"{broker.data_dir.name} stopped with status {status}")
        self.report.others += offline.complaints(directories, drained)


def _lag(client: txmq.Client) -> int:
    try:
        return sum(row["lag"] for row in client.groups.describe(GROUP)["partitions"])
    except txmq.errors.UnknownGroupError:  # no member has joined yet
        return 0
