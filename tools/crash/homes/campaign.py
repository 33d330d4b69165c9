"""Two brokers of one cluster: the deaths of ``cells``, while workers write to both homes in each transaction.

The rest is as in ``tools/crash/campaign.py``. What a dead worker leaves of an external transaction manager's branches
is resolved here, by the manager's decisions. Settled means that no home has anything to ask or to report, either.
"""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import txmq
from tools.crash.campaign import POINT_S, Campaign, await_death, is_stopped
from tools.crash.directory import LOCAL, read_history
from tools.crash.doors import user_of
from tools.crash.homes.cells import ALL_KINDS, BROKER_PATHS, CELLS, CLIENT_POINTS, LEFT, Cell, HomesDeath, cells
from tools.crash.homes.directory import (
    COMMIT,
    DONE,
    GROUP,
    HOMES_PARTITIONS,
    INBOX,
    INPUTS,
    ROLLBACK,
    HomesCampaignDirectory,
)
from tools.crash.plan import Death
from tools.crash.processes import CampaignError, Child, pause
from tools.crash.xa.final_reads import write_heuristics
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

BROKERS = 2
_ASK_S = 10.0
_ZOMBIE_S = 1.5  # beyond the second that a home waits for an owner that has gone


class HomesCampaign(Campaign):
    """See the module's docstring.

    Args:
        chosen: the cells that are played, each once before any comes again.
    """

    points = (*CLIENT_POINTS, *BROKER_PATHS)
    cycles_for_all = len(CELLS) * 5 // 4 + 1
    worker_module, reader_module = "tools.crash.homes.worker", "tools.crash.homes.reader"
    world: HomesCampaignDirectory

    def __init__(
        self, directory: Path, seed: int, sync: str = "always", say: Callable[[str], None] = print,
        chosen: tuple[Cell, ...] = CELLS,
    ) -> None:  # fmt: skip
        self._chosen = chosen
        super().__init__(directory, seed, sync, say)
        self._part: tuple[int, str] | None = None  # of the next worker: the home that decides, the kinds
        self.cells: Counter[Cell] = Counter()

    def make_world(self, directory: Path) -> HomesCampaignDirectory:
        return HomesCampaignDirectory(directory)

    def deaths(self, rng: random.Random) -> Iterator[Death]:
        return cells(rng, self._chosen)

    def start_brokers(self, stack: ExitStack) -> list[BrokerProcess]:
        doors, directory = self.doors, self.world.directory
        ensemble = stack.enter_context(Ensemble(directory / "zookeeper", tls=doors.tls))
        cluster = Cluster(
            directory / "brokers", ensemble, size=BROKERS, settings=self.settings, tls=doors.tls,
            credentials=doors.credentials,
        )  # fmt: skip
        stack.callback(cluster.kill)
        return cluster.start().brokers

    def set_up(self) -> None:
        super().set_up()
        with txmq.connect(self.address) as client:
            values = [f"{self.history.process}-0S.{number}" for number in range(INPUTS)]
            planned = [["send", INBOX, value, value] for value in values]
            self.history.write("send", "invoke", "inputs", planned)
            results = client.producer().send_many(INBOX, [(value.encode(), value.encode()) for value in values])
            sent = [[*send, at.partition, at.offset] for send, at in zip(planned, results, strict=True)]
            self.history.write("send", "ok", "inputs", sent)

    def worker_command(self, name: str) -> list[str]:
        number = int(name[1:].partition(".")[0])
        decider, kinds = self._part or (number % BROKERS, ALL_KINDS)
        module, directory, _address, *rest = super().worker_command(name)
        in_turn = [*self.brokers[decider:], *self.brokers[:decider]]
        return [module, directory, self.address_of(in_turn, user_of(name)), *rest, kinds]

    # --- deaths ------------------------------------------------------------------------------------------------------

    def let_die(self, death: Death) -> None:
        assert isinstance(death, HomesDeath)
        if death.point is None:
            super().let_die(death)
            return
        self.cells[death.point, death.victims] += 1
        self.report.points_hit[death.point] += 1
        if death.is_clients:
            self._play_client(death, self.workers[death.workers[0]])
        else:
            self._play_broker(death, self.brokers[death.home], self.workers[death.workers[0]])

    def _play_client(self, death: HomesDeath, worker: Child) -> None:
        crash = f"{death.point}:{death.nth}:stop"
        self._kill_worker(worker)
        self._start_with_part(worker, death.decider, CLIENT_POINTS[death.first], crash)
        eventually(lambda: worker.is_stopped, f"{worker.name} reaches {crash}", POINT_S, CampaignError)
        self._kill_brokers(death)
        if "client" in death.victims:
            worker.kill()
            return
        self.bring_up_brokers()
        if death.nth % 2:  # half of the zombies sleep until the homes may have settled it
            pause(_ZOMBIE_S)
        worker.signal(signal.SIGCONT)

    def _play_broker(self, death: HomesDeath, broker: BrokerProcess, worker: Child) -> None:
        alone = death.victims == ("home",)
        crash = f"{death.point}:{death.nth}" + ("" if alone else ":stop")
        if death.first in LEFT:
            self._kill_worker(worker)
        broker.kill()
        broker.launch(env={"TXMQ_CRASH": crash})
        with suppress(BrokerFailedError):  # it may reach the point while it recovers
            broker.wait_until_ready()
        if death.first in LEFT and broker.is_running and not is_stopped(broker):
            self._start_with_part(worker, death.decider, LOCAL, f"{LEFT[death.first]}:1")
        if alone:
            await_death(broker, crash)
            return
        eventually(lambda: is_stopped(broker), f"the broker reaches {crash}", POINT_S, CampaignError)
        self._kill_brokers(death)
        if "client" in death.victims:
            self.kill(Death(False, tuple(range(len(self.workers))), False, None, 0, 0.0))
        broker.kill()

    def _kill_worker(self, worker: Child) -> None:
        worker.kill()
        self._manage()  # else what it prepared for its transaction manager holds up its key until the cycle's end

    def _start_with_part(self, worker: Child, decider: int, kinds: str, crash: str) -> None:
        self._part = decider, kinds
        worker.start(crash)
        self._part = None

    def _kill_brokers(self, death: HomesDeath) -> None:
        numbers = {"decider": death.decider, "other": 1 - death.decider, "peer": 1 - death.home}
        for victim in death.victims:
            if victim in numbers:
                self.brokers[numbers[victim]].kill()

    # --- what is in doubt --------------------------------------------------------------------------------------------

    def in_doubt(self) -> set[str]:
        self._manage()
        return super().in_doubt().union(*map(self._waiting, self.brokers))

    def _waiting(self, broker: BrokerProcess) -> set[str]:
        """What a home has to ask or to report, or decided and has not seen reported."""
        with txmq.connect(self.address_of([broker])) as client:
            described = json.loads(client.control.call("cluster", "describe", timeout=_ASK_S))
        return {row["txid"] for row in described["branches"]}

    def _manage(self) -> None:
        """Resolve branches of the external transaction manager whose worker is dead."""
        living = tuple(f"{worker.run_name}{end}" for worker in self.workers if worker.is_running for end in ".-")
        with txmq.connect(self.address) as client, suppress(txmq.errors.XAError):  # a home is away: later
            manager = client.xa_resource(timeout=_ASK_S)
            for xid in manager.recover():
                operation = xid.gtrid.decode()
                if operation.startswith(living):
                    continue
                if self.world.decide(operation, ROLLBACK) == COMMIT:
                    manager.commit(xid)
                else:
                    manager.rollback(xid)

    # --- the end -----------------------------------------------------------------------------------------------------

    def write_final_reads(self, left: set[str]) -> None:
        super().write_final_reads(left)
        write_heuristics(self.address, self.history)
        drained = read_history(self.world).drain or {}
        outputs = Counter(key for (topic, _), part in drained.items() if topic == DONE for *_, key in part.messages)
        with txmq.connect(self.address) as client:
            saved = {row["partition"]: row["offset"] or 0 for row in client.groups.describe(GROUP)["partitions"]}
        for partition in range(HOMES_PARTITIONS[INBOX]):
            for offset, value, _key in drained[INBOX, partition].messages:
                if outputs[value] != (offset < saved.get(partition, 0)):
                    text = f"{outputs[value]} outputs of the input at {INBOX}/{partition}@{offset}"
                    self.report.offline.append(f"{text}, where {saved.get(partition)} is saved")
