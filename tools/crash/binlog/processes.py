"""The processes of the binlog campaign, by the names that its plan uses."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.crash.binlog.decoded import binlog_files
from tools.crash.binlog.directory import BinlogCampaignDirectory
from tools.crash.binlog.lost import put_back
from tools.crash.binlog.plan import APPLIER, BROKER, LOAD, READER, SOURCE, TARGET
from tools.crash.binlog.replay import Replay
from tools.crash.doors import OPERATOR, Doors, Grant
from tools.crash.faults import KILLED, POINT_S, Fault, Victim, Victims
from tools.crash.processes import CampaignError, Child, pause
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB

BROKER_SETTINGS = {"default_segment_size_bytes": 1 << 20, "checkpoint_interval_ms": 2000}
REPLAY_OPTIONS = ("--innodb-flush-log-at-trx-commit=0",)  # it is never killed
LOG_SHOWN = 1500


class Processes(Victims):
    """All of them.

    Args:
        is_snapshot_over: of the sync of now.
        doors: who may connect to the broker.

    Attributes:
        name: the sync of now: reader and applier are started with its configuration.
        points_hit: how often each crash point was the place of a death.
        lost: transactions of the source's binlog that its engine had lost when it was started again.
    """

    def __init__(
        self, world: BinlogCampaignDirectory, seeds: random.Random, is_snapshot_over: Callable[[], bool], doors: Doors
    ) -> None:
        self._world, self._seeds, self._is_snapshot_over, self._doors = world, seeds, is_snapshot_over, doors
        self.name, self.points_hit = "", Counter[str]()
        self.lost: list[str] = []
        self.source = MariaDB(world.source, binary_log=True)
        self.target = MariaDB(world.target)
        self.replay = Replay(MariaDB(world.replay, options=REPLAY_OPTIONS))
        self.broker = BrokerProcess(world.broker, settings=BROKER_SETTINGS, tls=doors.tls)
        self.load = Child(LOAD, world.directory, self._load_command)
        self.reader = Child(READER, world.directory, lambda _: self.command("run"))
        self.applier = Child(APPLIER, world.directory, lambda _: self.command("apply"))

    def _load_command(self, run_name: str) -> list[str]:
        return ["tools.crash.binlog.load", str(self._world.directory), run_name, str(self._seeds.getrandbits(32))]

    def command(self, name: str) -> list[str]:
        """A module and its arguments: ``txmq binlog`` for the sync of now."""
        return ["txmq.cli.main", "binlog", name, "--config", str(self._world.config(self.name, name))]

    def address(self, user: str = OPERATOR) -> str:
        """Of the broker, for a user."""
        return self._doors.address([self.broker], user)

    def begin_sync(self, name: str, mode: str, start: str) -> None:
        """From here on reader and applier are started for this one, each as a user of its own.

        Args:
            start: see ``BinlogCampaignDirectory.write_config``.
        """
        self.name, reader, applier = name, f"{READER}-{name}", f"{APPLIER}-{name}"
        topics = f"{name}.*"
        grants = {
            reader: [Grant("create,write,read", "topic", topics), Grant("read", "group", f"binlog-{name}")],
            applier: [Grant("read", "topic", topics), Grant("read", "group", f"apply-{name}")],
        }
        self._doors.admit([self.broker], grants)
        for user, command in ((reader, "run"), (applier, "apply")):
            self._world.write_config(
                name, mode, self.address(user), self.source.port, self.target.port, command, start=start
            )

    @property
    def _all(self) -> dict[str, Child | MariaDB | BrokerProcess]:
        return {
            SOURCE: self.source, TARGET: self.target, BROKER: self.broker, LOAD: self.load, READER: self.reader,
            APPLIER: self.applier,
        }  # fmt: skip

    def named(self, name: str) -> Victim:
        return self._all[name]

    def kill(self) -> None:
        """All."""
        for victim in reversed(self._all.values()):
            victim.kill()
        self.replay.server.kill()

    def refuse_dead(self) -> None:
        """Raises: CampaignError: a client has ended by itself."""
        for child in (self.load, self.reader, self.applier):
            if not child.is_running:
                log = self._world.directory / f"{child.name}.log"
                text = log.read_text("utf-8", "replace")[-LOG_SHOWN:]
                raise CampaignError(f"{child.name} ended by itself, with {child.status}\n{text}")

    def _kill(self, victims: Sequence[Victim], fault: Fault) -> None:
        """Nobody writes to a killed source, or reads its rows, before it has all that its binlog has."""
        for victim in victims:
            victim.kill()
        pause(fault.away_s)
        clients = (self.load, self.reader) if self.source in victims else ()
        for client in clients:
            client.pause()
        for victim in victims:
            victim.start()
            if victim is self.source and Ability.LOSES_ONE_PHASE in self.source.program.abilities:
                self.lost += put_back(self.source, self.binlog_files()[:-1])
        for client in clients:
            client.resume()

    def binlog_files(self) -> list[Path]:
        """Of the source; the last one is being written."""
        return binlog_files(self._world.source / "data")

    def snapshot_ended_at(self) -> str:
        """Where the newest snapshot was complete, by its reader's last word on it; empty: it has said none."""
        lines = (self._world.directory / f"{READER}.log").read_text("utf-8", "replace").splitlines()
        told = [json.loads(line)["gtids"] for line in lines if '"the snapshot is complete"' in line]
        return str(told[-1]) if told else ""

    def _crash(self, victims: Sequence[Victim], fault: Fault) -> None:
        super()._crash(victims, fault)
        self.points_hit[fault.point.partition(":")[0]] += 1

    def _snapshot(self, victims: Sequence[Victim], fault: Fault) -> None:
        """A crash at a point that may not come any more."""
        client = self.child(fault.victims[0])
        client.kill()
        client.start(fault.point)
        eventually(
            lambda: not client.is_running or self._is_snapshot_over(), f"{client.name} reaches {fault.point}", POINT_S,
            CampaignError,
        )  # fmt: skip
        if client.status not in (None, KILLED):
            raise CampaignError(f"{client.name} ended with {client.status}, not by {fault.point}")
        self.points_hit[fault.point.partition(":")[0]] += client.status == KILLED
        self._kill(victims, fault)
