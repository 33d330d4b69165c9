"""Three brokers, three ZooKeeper servers, and load over all homes: each process is killed, paused and restarted.

Theory of operation. Everything that the other campaigns run works here at once: transactions with SQLite, with two
MariaDB servers, and without a database, over partitions of several homes; a consumer group; an ordered producer with
its spool; readers that look for rows; a resolver; a Spark stream. A *pulse* sends to each partition of its own topic
without rest; the stream reads that. One fault of the plan after the other befalls brokers, ZooKeeper servers,
databases and clients. After each it is measured

* how long the longest pause of a partition was whose home lived on;
* how long after the victims were up, or went on, everything worked again (``recovery``).

At the end the checkers look at the whole history: for messages, rows, money and outcomes, for the group, and for what
the stream wrote.

Invariants:
* every wait has a deadline; one that passes ends the campaign with what did not happen;
* a fault lasts, in the history, until everything works and is settled;
* no process outlives ``ClusterCampaign.run``.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import txmq
from tools.checkers.groups import GroupRules, check_group
from tools.checkers.history import Coverage, check
from tools.crash import final_reads, offline
from tools.crash.cluster.clues import Clues
from tools.crash.cluster.directory import PARTITIONS, PULSE, STREAMED, STREAMED_PARTITIONS, ClusterCampaignDirectory
from tools.crash.cluster.plan import BROKERS, SERVERS, faults
from tools.crash.cluster.processes import RESOLVER, Processes
from tools.crash.cluster.recovery import GIVEN_UP_S, SETTLED, Recovery
from tools.crash.cluster.report import Bounds, ClusterReport, Played
from tools.crash.directory import BROKER_SETTINGS, SCRAP, SCRAP_SETTINGS, HistoryFile
from tools.crash.doors import OPEN, Doors
from tools.crash.faults import Fault
from tools.crash.groups.directory import GROUP, GroupCampaignDirectory
from tools.crash.groups.directory import PARTITIONS as GROUP_PARTITIONS
from tools.crash.ordered.directory import options
from tools.crash.processes import CampaignError, pause
from tools.crash.spark.stream import compare, newest_batch
from tools.crash.xa.final_reads import write_bank
from txmq.client.spooling.spool import Spool
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

PAUSE_S_MAX = 2.0  # of a partition whose home lives
SETTLE_S_MAX = 5.0
BETWEEN_S = 0.5
TIMEOUT_S = 30.0


class ClusterCampaign:
    """One campaign in an empty ``directory``; ``say`` gets a line a fault.

    Args:
        pause_s_max: a partition whose home lives may take no message for so long.
        settle_s_max: nothing may stay in doubt for longer, everything being up.
        doors: who may connect.
        streamed: the partitions of the topic that a Spark stream writes, over all homes; 0: there is no stream.
    """

    def __init__(
        self, directory: Path, seed: int, say: Callable[[str], None] = print, *, pause_s_max: float = PAUSE_S_MAX,
        settle_s_max: float = SETTLE_S_MAX, streamed: int = STREAMED_PARTITIONS, doors: Doors = OPEN,
    ) -> None:  # fmt: skip
        self._doors = doors
        self.world, self._say, self._streamed = ClusterCampaignDirectory(directory), say, streamed
        self._plan, self._seeds = faults(random.Random(seed), has_stream=streamed > 0), random.Random(-seed - 1)
        self.report = ClusterReport(Bounds(pause_s_max, settle_s_max))

    def run(self, count: int) -> ClusterReport:
        """Play so many faults of the plan.

        Raises:
            CampaignError: something that is waited for did not happen.
        """
        return self.play(list(islice(self._plan, count)))

    def play(self, chosen: Iterable[Fault]) -> ClusterReport:
        """Play these; see ``run``."""
        with ExitStack() as stack:
            doors, directory = self._doors, self.world.directory
            ensemble = stack.enter_context(Ensemble(directory / "zookeepers", SERVERS, doors.tls))
            cluster = Cluster(
                directory / "brokers", ensemble, size=BROKERS, settings=BROKER_SETTINGS, tls=doors.tls,
                credentials=doors.credentials,
            )  # fmt: skip
            self._processes = Processes(self.world, cluster, self._seeds, doors)
            stack.callback(self._processes.kill)
            self._set_up()
            stack.callback(self._history.close)
            with txmq.connect(self._processes.address(), timeout=TIMEOUT_S) as client:
                self._recovery = Recovery(self.world, self._processes, client, self._placed(client))
                self._recovery.await_begin()
                for number, fault in enumerate(chosen, 1):
                    self._play(number, fault)
                self._come_to_rest(client)
                self._read(client)
            self._look_at_files()
        return self.report

    def _set_up(self) -> None:
        processes = self._processes
        self._doors.close(processes.cluster.start().brokers)
        self.world.create(processes.address(RESOLVER))
        self._history = HistoryFile(self.world.histories, "campaign")
        with txmq.connect(processes.address()) as client:
            for topic, partitions in PARTITIONS.items():
                settings = SCRAP_SETTINGS if topic == SCRAP else {}
                client.topics.create(topic, partitions=partitions, **settings)
            if self._streamed:
                client.topics.create(STREAMED, partitions=self._streamed)
            databases = self.world.install(client)
        self._doors.admit(processes.cluster.brokers, processes.grants(databases))
        processes.start_clients(has_stream=self._streamed > 0)

    def _placed(self, client: txmq.Client) -> dict[tuple[str, int], int]:
        """The broker of each partition.

        Raises:
            CampaignError: not every broker has some of the pulse's and, as far as they suffice, of the stream's.
        """
        described = json.loads(client.control.call("meta", "*", timeout=10.0))
        ports = [broker.port for broker in self._processes.cluster.brokers]
        brokers = {
            home: ports.index(int(leader.rpartition(":")[2])) for home, leader in described["leaders"].items() if leader
        }
        placed = {
            (topic["name"], number): brokers[home]
            for topic in described["topics"]
            for number, home in enumerate(topic["homes"])
        }
        for spread, partitions in ((PULSE, PARTITIONS[PULSE]), (STREAMED, self._streamed)):
            brokers_of = {broker for (topic, _), broker in placed.items() if topic == spread}
            if len(brokers_of) < min(partitions, BROKERS):
                raise CampaignError(f"the partitions of {spread} are not spread over all brokers: {placed}")
        self._broker_of = placed
        return placed

    # --- a fault -----------------------------------------------------------------------------------------------------

    def _play(self, number: int, fault: Fault) -> None:
        pause(BETWEEN_S)
        name = f"fault-{number}"
        self._history.write("nemesis", "invoke", name, [], death=str(fault))
        begun = time.monotonic()
        self._processes.befall(fault)
        recovered_s = self._recovery.await_all(fault, time.monotonic())
        self._processes.refuse_dead()
        self._history.write("settled", "ok", name, [recovered_s[SETTLED], self.report.bounds.settled_s])
        self._history.write("nemesis", "ok", name, [])
        played = Played(
            number, fault.what, str(fault), self._recovery.longest_pause(fault, begun),
            self._recovery.machine_pause(begun), recovered_s,
        )  # fmt: skip
        self.report.add(played)
        self._say(str(played))

    # --- the end -----------------------------------------------------------------------------------------------------

    def _come_to_rest(self, client: txmq.Client) -> None:
        """Writers end, then the group and the stream, when nothing is left for them."""
        processes = self._processes
        for child in processes.writers:
            child.signal(signal.SIGTERM)
        for child in processes.writers:
            child.wait_stopped()
        if processes.driver is not None:
            processes.driver.finish(GIVEN_UP_S)
        self._recovery.await_rest()
        self._drain_spool()
        for member in processes.members:
            member.stop()

    def _drain_spool(self) -> None:
        spool = str(self.world.directory / "spool")
        with (
            txmq.connect(self._processes.address(self._processes.ordered.name), timeout=TIMEOUT_S) as client,
            client.ordered_producer(txmq.KeyHashSelector(), spool, options=options({})) as producer,
        ):
            producer.flush(GIVEN_UP_S)
            self.report.others += [f"parked: {entry.reason}" for entry in producer.parked()]
        with Spool(Path(spool), read_only=True) as left:
            if any(left.waiting.values()):
                self.report.others.append(f"left in the spool: {left.waiting}")

    def _read(self, client: txmq.Client) -> None:
        """Everything that is there, and what the checkers say of it."""
        address, report = self._processes.address(), self.report
        rows = client.groups.describe(GROUP)["partitions"]
        if len(rows) != GROUP_PARTITIONS:
            report.others.append(f"the group has {len(rows)} partitions, not {GROUP_PARTITIONS}")
        lag = [[row["topic"], row["partition"], row["start"], row["offset"], row["end"]] for row in rows]
        self._history.write("lag", "ok", "lag", lag)
        final_reads.write(self.world, address, self._history, final_reads.listed(client) | self.world.prepared())
        write_bank(self.world, address, self._history)
        files = GroupCampaignDirectory(self.world.directory)
        final_reads.ask_for_outcomes(client, files.read()[0], self._history)
        messages, group = files.read()
        least = Coverage(ok=len(report.faults), faults=len(report.faults))
        report.messages, report.group = (
            check(messages, least, is_cluster=True),
            check_group(group, GroupRules(stopped_s_max=GIVEN_UP_S)),
        )
        report.count(messages, self._broker_of)
        texts = [fault.text for fault in report.faults]
        report.clues = Clues(self.world.histories, messages, self._broker_of, texts).of
        if self._streamed:
            report.batches = newest_batch(client) + 1
            report.streamed, _, complaints = compare(client, PULSE, STREAMED)
            report.others += complaints

    def _look_at_files(self) -> None:
        """Hold the files of the stopped brokers to what a client reads."""
        brokers = self._processes.cluster.brokers
        streamed = {STREAMED: self._streamed} if self._streamed else {}
        drained = final_reads.drain(self._processes.address(), PARTITIONS | streamed)
        for child in self._processes.children:
            child.kill()
        for broker in brokers:
            if status := broker.stop():
                self.report.others.append(f"{broker.data_dir.name} stopped with status {status}")
        self.report.others += offline.complaints([broker.data_dir for broker in brokers], drained)
        self.report.others += self._doors.refused(brokers)
