"""Orders with an outbox: four services and their drainers, two databases, a broker that is away, slow or restored.

Theory of operation. The cells of ``cells`` are played in turn, under load. After each of them everybody is brought up,
and it is waited for that nothing is in doubt and no row of that moment waits any more; before the next one every
thread of every worker has been told something, so none hangs. The rest is as in ``tools/crash/campaign.py``: the
history is held to messages and rows (each once, in order per key, what callers were told is true), and beside it to
``promises``.

The last worker reaches the broker through a relay, which can be cut.
"""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import MySQLdb

import txmq
from tools.crash.campaign import POINT_S, Campaign, await_death, is_stopped
from tools.crash.cluster.clues import Clues
from tools.crash.directory import RESOURCE, read_history
from tools.crash.doors import user_of
from tools.crash.outbox import operators
from tools.crash.outbox.cells import (
    BROKER_PATHS,
    CELLS,
    OUTBOX_POINTS,
    PARKED,
    SERVICE_POINTS,
    Cell,
    OutboxDeath,
    cells,
)
from tools.crash.outbox.directory import LEDGER_DB, PARCELS, THREADS, OutboxCampaignDirectory
from tools.crash.outbox.promises import broken
from tools.crash.plan import WORKERS, Death
from tools.crash.processes import CampaignError, Child, pause
from txmq.testing.checkers.history import Coverage, check
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess
from txmq.testing.processes.relay import Relay

ASLEEP_S = 2.5  # longer than a turn to drain
WAITING = 12  # rows that an outage makes wait, at least
FLAPS = 4
SLOW_S, QUICK_S = 0.15, 0.03
OUTAGES_MAX = 6  # at most: by then one of five drainers has come to its second visit, of two in each outage
_LOOK_S = 0.2


class OutboxCampaign(Campaign):
    """See the module's docstring.

    Args:
        chosen: the cells that are played, each once before any comes again.
    """

    points = (*OUTBOX_POINTS, *SERVICE_POINTS, *BROKER_PATHS)
    cycles_for_all = len(CELLS)
    worker_module, reader_module = "tools.crash.outbox.worker", "tools.crash.outbox.reader"
    world: OutboxCampaignDirectory

    def __init__(
        self, directory: Path, seed: int, sync: str = "always", say: Callable[[str], None] = print,
        chosen: tuple[Cell, ...] = CELLS,
    ) -> None:  # fmt: skip
        self._chosen = chosen
        super().__init__(directory, seed, sync, say)
        self.cells: Counter[Cell] = Counter()
        self.waited_max = 0  # rows, behind a cell
        self.enclosed_max = Counter[str]()  # blocks of each resource that used the outbox always, behind a cell
        self.refused: Counter[str] = Counter()  # why blocks were rolled back
        self._played: list[OutboxDeath] = []
        self._told: dict[str, int] = {}

    def make_world(self, directory: Path) -> OutboxCampaignDirectory:
        return OutboxCampaignDirectory(directory)

    def deaths(self, rng: random.Random) -> Iterator[Death]:
        return cells(rng, self._chosen)

    def start_brokers(self, stack: ExitStack) -> list[BrokerProcess]:
        started = super().start_brokers(stack)
        self._relay = stack.enter_context(Relay(started[0].port))
        return started

    def worker_command(self, name: str) -> list[str]:
        module, directory, address, *rest = super().worker_command(name)
        is_far = name.startswith(f"w{WORKERS - 1}.")
        return [module, directory, self.doors.relayed(self._relay, user_of(name)) if is_far else address, *rest]

    @property
    def _broker(self) -> BrokerProcess:
        return self.brokers[0]

    def all_work(self) -> bool:
        """Whether every thread of every worker was told something since this was last true."""
        names = [worker.run_name + thread for worker in self.workers for thread in THREADS]
        told = {name: self._size_of(name) for name in names}
        if all(size > self._told.get(name, 0) for name, size in told.items()):
            self._told = told
            return True
        return False

    def _size_of(self, name: str) -> int:
        file = self.world.histories / f"{name}.jsonl"
        return file.stat().st_size if file.exists() else 0

    # --- cells -------------------------------------------------------------------------------------------------------

    def let_die(self, death: Death) -> None:
        assert isinstance(death, OutboxDeath)
        self._played.append(death)
        self.cells[death.what, death.victims] += 1
        if death.point is None:
            getattr(self, f"_{death.what}")(death)
        else:
            (self._play_broker if death.what in BROKER_PATHS else self._play_client)(death)
            self.report.points_hit[death.what] += 1
        self._relay.mend()

    def _play_client(self, death: OutboxDeath) -> None:
        victim = self._race(death) if death.what in OUTBOX_POINTS else self._stop_one(death)
        if "broker" in death.victims:
            self._broker.kill()
        self._strike_others(death, victim)
        if "zombie" in death.victims:
            self.bring_up_brokers()
            if death.nth % 2:  # half of the zombies sleep until another one drains, and the resolver has acted
                pause(ASLEEP_S)
            victim.resume()
        if death.what == PARKED:
            self.bring_up_brokers()
            self._open()

    def _stop_one(self, death: OutboxDeath) -> Child:
        worker, crash = self.workers[death.worker], f"{death.what}:{death.nth}:stop"
        worker.kill()
        worker.start(crash)
        eventually(lambda: worker.is_stopped, f"{worker.name} reaches {crash}", POINT_S, CampaignError)
        return worker

    def _race(self, death: OutboxDeath) -> Child:
        """Arm everybody who drains; whoever comes to the point first stops there."""
        first, racers = self.world.directory / f"first-{death.what}", [*self.workers, self._resolver]
        first.unlink(missing_ok=True)
        for racer in racers:
            racer.signal(signal.SIGKILL)
        for racer in racers:
            racer.kill()
            racer.start(f"{death.what}:{death.nth}:race:{first}")
        have_begun = super().all_work  # unless who is there already keeps them from it
        eventually(lambda: first.exists() or have_begun(), "every worker begins", POINT_S, CampaignError)
        if death.what == PARKED:
            self._close_until(first.exists)
        else:
            self._drain_until(first.exists)

        def stopped() -> list[Child]:
            return [racer for racer in racers if racer.is_running and racer.is_stopped]

        eventually(stopped, f"somebody stops at {death.what}", POINT_S, CampaignError)
        return stopped()[0]

    def _play_broker(self, death: OutboxDeath) -> None:
        broker, alone = self._broker, death.victims == ("broker",)
        crash = f"{death.what}:{death.nth}" + ("" if alone else ":stop")
        broker.kill()
        self._await_rows(lambda: False)
        broker.launch(env={"TXMQ_CRASH": crash})
        if alone:
            await_death(broker, crash)
            return
        with suppress(BrokerFailedError):  # it may come to the point while it starts
            broker.wait_until_ready()
        eventually(lambda: is_stopped(broker), f"the broker reaches {crash}", POINT_S, CampaignError)
        self._strike_others(death)
        broker.kill()

    def _drain_until(self, is_there: Callable[[], bool]) -> None:
        """Outages, until somebody has come to the point; all drain."""
        for _ in range(OUTAGES_MAX):
            self._broker.kill()
            self._await_rows(is_there)
            self.bring_up_brokers()
            self._await_drained(is_there)
            if is_there():
                return
        raise CampaignError(f"nobody comes to the point in {OUTAGES_MAX} outages")

    def _await_rows(self, is_enough: Callable[[], bool]) -> None:
        eventually(
            lambda: is_enough() or all(len(rows) >= WAITING for rows in self.world.waiting().values()),
            "rows wait in both outboxes", POINT_S, CampaignError,
        )  # fmt: skip

    def _await_drained(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Until all that waits now has left."""
        waited = self.world.prepared()
        eventually(
            lambda: is_enough() or not waited & self.world.prepared(), "what waits is drained", POINT_S, CampaignError
        )

    def _strike_others(self, death: OutboxDeath, victim: Child | None = None) -> None:
        """Whoever suffers beside the broker: a victim, or the cell's worker; databases are back when this returns."""
        if "everybody" in death.victims:
            for worker in self.workers:
                worker.signal(signal.SIGKILL)
        if "client" in death.victims:
            (victim or self.workers[death.worker]).kill()
        if "database" in death.victims:
            self.world.servers[0].kill()
            self.world.bring_up()

    # --- kinds -------------------------------------------------------------------------------------------------------

    def _away(self, death: OutboxDeath) -> None:
        self._broker.kill()
        if "relay" in death.victims:
            self._relay.cut()
        pause(death.away_s / 2)
        self._strike_others(death)
        pause(death.away_s / 2)
        if "relay" in death.victims:
            self.bring_up_brokers()
            pause(death.away_s)

    def _flapping(self, death: OutboxDeath) -> None:
        for number in range(FLAPS):
            self._broker.kill()
            pause(death.away_s / FLAPS)
            if number == FLAPS // 2:
                self._strike_others(death)
            self.bring_up_brokers()
            pause(death.away_s / FLAPS)

    def _paused(self, death: OutboxDeath) -> None:
        self._broker.pause()
        pause(death.away_s / 2)
        self._strike_others(death)
        pause(death.away_s / 2)
        self._broker.resume()

    def _slow(self, death: OutboxDeath) -> None:
        for number in range(times := int(death.away_s / SLOW_S) + 1):
            self._broker.pause()
            pause(SLOW_S)
            if number == times // 2:
                self._strike_others(death)
            self._broker.resume()
            pause(QUICK_S)

    def _unreachable(self, death: OutboxDeath) -> None:
        self._relay.cut()
        pause(death.away_s)
        if "broker" in death.victims:
            self._broker.kill()
            pause(death.away_s / 2)
            self.bring_up_brokers()
        self._strike_others(death)
        pause(death.away_s)

    def _asleep(self, death: OutboxDeath) -> None:
        sleeper = self.workers[death.worker]
        self._broker.kill()
        self._await_rows(lambda: False)
        self.bring_up_brokers()
        pause(death.away_s / 10)
        sleeper.pause()
        if "broker" in death.victims:
            self._broker.kill()
            pause(death.away_s)
            self.bring_up_brokers()
        self._strike_others(death)
        pause(ASLEEP_S)
        sleeper.resume()

    # --- a closed topic ----------------------------------------------------------------------------------------------

    def _closed(self, death: OutboxDeath) -> None:
        self._close_until(lambda: operators.parked(self.world) > 0)
        if "broker" in death.victims:
            self._broker.kill()
        self._strike_others(death)
        self.bring_up_brokers()
        pause(death.away_s)
        self._open()

    def _close_until(self, is_enough: Callable[[], bool]) -> None:
        """Let rows be parked, until it is enough."""
        self._set_open(is_open=False)
        self._broker.kill()
        self._await_rows(is_enough)
        self.bring_up_brokers()
        eventually(is_enough, "rows are parked", POINT_S, CampaignError)

    def _open(self) -> None:
        """Open the topic, and release what was parked; who stops meanwhile may keep others from their rows."""
        self._set_open(is_open=True)

        waited = self.world.prepared()  # what is refused yet was sent before, and is among it

        def is_drained() -> bool:
            with suppress(sqlite3.OperationalError, MySQLdb.OperationalError):  # locked by who has stopped
                operators.release(self.world)
            pause(_LOOK_S)
            return not waited & self.world.prepared()

        eventually(is_drained, "what was parked is released and drained", POINT_S, CampaignError)

    def _set_open(self, *, is_open: bool) -> None:
        with txmq.connect(self.address) as client:
            client.topics.alter(PARCELS, accept_publish=is_open)

    # --- a backup ----------------------------------------------------------------------------------------------------

    def _restored(self, death: OutboxDeath) -> None:
        """What was drained behind the backup is lost with the broker; until it is renumbered nothing may be drained."""
        broker, backup = self._broker, self.world.directory / "backup"
        self._come_to_rest()
        broker.stop()
        shutil.copytree(broker.data_dir, backup)
        self.bring_up_brokers()
        self._go_on()
        if "client" in death.victims:  # the next ones have sessions that the backup does not know
            self.workers[death.worker].kill()
            self.workers[death.worker].start()
            eventually(self.all_work, "every worker comes to its work", POINT_S, CampaignError)
        broker.kill()
        self._await_rows(lambda: False)
        self.bring_up_brokers()
        self._await_drained()
        self._come_to_rest()
        self._end_round()
        broker.kill()
        shutil.rmtree(broker.data_dir)
        backup.rename(broker.data_dir)
        self.bring_up_brokers()
        self.world.begin_round(self._ends())
        broker.kill()
        self._go_on()
        self._await_rows(lambda: False)
        self.bring_up_brokers()
        self._renumber()

    def _renumber(self) -> None:
        waited = self.world.waiting()
        found = operators.problems(self.world)
        for name in (RESOURCE, LEDGER_DB):
            if not any(name in problem and "was it restored?" in problem for problem in found):
                raise CampaignError(f"the outbox of {name} does not say that the broker was restored: {found}")
        now = self.world.waiting()
        gone = {name: {*rows} - {*now[name]} for name, rows in waited.items() if {*rows} - {*now[name]}}
        if gone:
            raise CampaignError(f"a restored broker was given rows before they were renumbered: {gone}")
        for name in (RESOURCE, LEDGER_DB):
            operators.renumber(self.world, name)
        operators.adopt(self.world)

    def _come_to_rest(self) -> None:
        """Nobody writes, nobody reads, and nothing is left to do."""
        self._reader.stop()
        self.world.rest.touch()
        names = [worker.run_name + thread for worker in self.workers for thread in THREADS]
        at_rest = [self.world.resting / name for name in names]
        eventually(lambda: all(file.exists() for file in at_rest), "the workers rest", POINT_S, CampaignError)
        eventually(lambda: not self.in_doubt(), "nothing is left to do", POINT_S, CampaignError)

    def _go_on(self) -> None:
        self.world.rest.unlink()

    def _end_round(self) -> None:
        """Hold everything up to here to what is there, before it is lost."""
        self.write_final_reads(self.in_doubt())
        history = read_history(self.world)
        self.report.offline += [str(finding) for finding in check(history).findings]
        self.report.offline += broken(history, self._played)

    def _ends(self) -> dict[tuple[str, int], int]:
        with txmq.connect(self.address) as client:
            return {
                (topic, partition): client.offsets(topic, partition).end
                for topic, partitions in self.world.partitions.items()
                for partition in range(partitions)
            }

    # --- a check -----------------------------------------------------------------------------------------------------

    def await_settled(self, in_doubt: set[str]) -> float:
        self.waited_max = max(self.waited_max, len(in_doubt))
        self.enclosed_max |= Counter(self.world.enclosed())
        return super().await_settled(in_doubt)

    def coverage(self, number: int) -> Coverage:
        return Coverage(ok=1, faults=number)  # a round may have begun a moment ago

    def check(self, number: int) -> bool:
        is_valid = super().check(number)
        history = read_history(self.world)
        for operation in history.operations.values():
            if operation.status == "fail":
                self.refused[_reason(operation.error)] += 1
        self.report.offline += broken(history, self._played)
        if self.report.offline or not is_valid:
            return False
        self.world.begin_round(self._ends())  # what was checked is not read again
        return True

    def clues(self, finding: str) -> list[str]:
        """What to look at."""
        return Clues(self.world.histories, read_history(self.world), {}, list(map(str, self._played))).of(finding)

    def as_json(self) -> dict[str, Any]:
        """The report."""
        report = self.report
        return {
            "cells": {f"{' + '.join(victims)} {what}": count for (what, victims), count in sorted(self.cells.items())},
            "settle_s": report.settle_s, "restart_s": report.restart_s, "counts": report.verdict.counts,
            "refused": dict(self.refused), "waited_max": self.waited_max, "enclosed_max": dict(self.enclosed_max),
            "findings": [*map(str, report.verdict.findings), *report.offline],
        }  # fmt: skip


def _reason(error: str | None) -> str:
    return (error or "").partition("(")[0] + ": " + (error or "").partition("(")[2][:60]
