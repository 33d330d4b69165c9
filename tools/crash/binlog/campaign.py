"""A database replayed in order into a second one, while everything is killed: no change twice, missing or out of order.

Theory of operation. A load (``load``) writes to a source. ``txmq binlog run`` publishes its changes, and ``txmq binlog
apply`` writes them into a target. A sync begins with rows that are there already, so with a snapshot, in which the
first faults fall. Then rounds of faults follow: reader, applier, broker, load and both databases are killed, at named
points and at any moment, alone and in pairs, and paused. After each fault a row is written to the source, and must
reach the target. Every ``check_every`` cycles the load comes to rest, and three things are checked:

* the target has the tables that the source's binlog makes (``replay``), by ``txmq binlog compare`` and by the
  databases' own CHECKSUM TABLE;
* the topics have each change of the binlog once, in order, as ``mariadb-binlog`` shows it (``checker``);
* nothing ended by itself.

What the source itself does not have of its binlog is noted, and is no finding: a killed server's engine has lost it.
When the source is started again that is put back (``lost``), before load and reader go on.

Then a new sync begins, with topics of its own and an empty target: transactional and ordered in turn, of which the
first is the seed's.

Invariants:
    * every wait has a deadline;
    * no process outlives ``BinlogCampaign.run``.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import txmq
from tools.crash.binlog.checker import Checker
from tools.crash.binlog.decoded import read_binlog
from tools.crash.binlog.directory import BinlogCampaignDirectory
from tools.crash.binlog.plan import MODES, faults, opening
from tools.crash.binlog.processes import Processes
from tools.crash.binlog.report import BinlogReport, Played
from tools.crash.binlog.statements import Changes
from tools.crash.binlog.table_check import TableCheck, TableDifference, lost_rows
from tools.crash.binlog.tables import ALL_KEYS, BY_NAME, DATABASE, LIKE, PULSE, ROWS, TABLES, Table
from tools.crash.doors import OPEN, Doors
from tools.crash.faults import Fault
from tools.crash.processes import CampaignError, pause
from txmq.binlog.config import read_settings
from txmq.binlog.errors import BinlogError
from txmq.binlog.event_json import read_event
from txmq.binlog.position import parse_gtids
from txmq.binlog.publish.published import Published
from txmq.binlog.status import newest_published
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.fork_server import ForkServer
from txmq.testing.processes.mariadb import MariaDB

LEVEL_S = 60.0
END_S = 300.0
RUN_S_MAX = 0.6
KEYLESS_ROWS = 30  # fewer than a chunk has: such a table is read whole, or not at all
_FORKED = ("txmq.cli.main", "txmq.binlog.run", "txmq.binlog.apply.applier", "tools.crash.binlog.load")


class BinlogCampaign:
    """One campaign in an empty ``directory``; ``say`` gets a line a fault.

    Args:
        rows: of each table when it begins.
        doors: who may connect to the broker.
    """

    def __init__(
        self, directory: Path, seed: int, say: Callable[[str], None] = print, *, rows: int = ALL_KEYS,
        doors: Doors = OPEN,
    ) -> None:  # fmt: skip
        self._world, self._say, self._rows, self._doors = BinlogCampaignDirectory(directory), say, rows, doors
        self._random, self._first_mode = random.Random(seed), seed
        self._processes = Processes(self._world, random.Random(-seed - 1), self._is_snapshot_over, doors)
        self._pulses = 0
        self._lost = set[str]()  # tables of which the source has not what its binlog has
        self.report = BinlogReport(self._processes.points_hit)

    def run(self, count: int, check_every: int) -> BinlogReport:
        """Play so many faults.

        Raises:
            CampaignError: something that is waited for did not happen.
        """
        with ExitStack() as stack:
            stack.enter_context(ForkServer(_FORKED))
            stack.callback(self._processes.kill)
            for server in (self._processes.source, self._processes.target, self._processes.broker):
                server.start()
            self._doors.close([self._processes.broker])
            self._processes.replay.start()
            self._world.write_address(self._processes.source.connect_arguments())
            self._make_tables(BY_NAME.values())
            while len(self.report.played) < count and not self.report.complaints:
                self._play_sync(min(check_every, count - len(self.report.played)))
            self.report.complaints += self._doors.refused([self._processes.broker])
        return self.report

    @property
    def _mode(self) -> str:
        return list(MODES)[(self._first_mode + self.report.syncs) % len(MODES)]

    # --- a sync ------------------------------------------------------------------------------------------------------

    def _play_sync(self, count: int) -> None:
        self._begin()
        first = opening(self._random)[:count]
        for fault in first:
            self._play_opening(fault)
        if not self._processes.reader.is_running:
            self._processes.reader.start()
        self._world.calm.unlink(missing_ok=True)
        eventually(self._is_snapshot_over, "the snapshot is complete", LEVEL_S, CampaignError)
        self._pulse()
        self._world.snapshot.unlink()
        rounds = faults(self._random, self._mode)
        for _ in range(count - len(first)):
            self._play(next(rounds))
        self._check()
        self.report.syncs += 1

    def _make_tables(self, tables: Iterable[Table]) -> None:
        connection = self._world.connect()
        try:
            with connection.cursor() as cursor:
                for table in tables:
                    cursor.execute(f"CREATE OR REPLACE {table.create().removeprefix('CREATE ')}")
                    if table.columns:
                        for statement in Changes(self._random, 0, keyless_grow=True).rows(table, self._rows):
                            cursor.execute(statement)
        finally:
            connection.close()

    def _begin(self) -> None:
        """Set up a new sync: a target with the source's tables, no row. Load and applier begin, the reader does not."""
        processes, world = self._processes, self._world
        source, target = processes.source, processes.target
        self._make_tables(BY_NAME[name] for name in sorted(self._lost & BY_NAME.keys()))
        for table in TABLES:
            source.execute(f"DROP TABLE IF EXISTS {table.name}{LIKE}, {table.name}{ROWS}")
            if not table.has_key:
                ((rows,),) = source.execute(f"SELECT COUNT(*) FROM {table.name}")
                source.execute(f"DELETE FROM {table.name} LIMIT {max(rows - KEYLESS_ROWS, 0)}")
        target.execute(f"CREATE OR REPLACE DATABASE {DATABASE}")
        for (name,) in source.execute("SHOW TABLES"):
            ((_, created),) = source.execute(f"SHOW CREATE TABLE {name}")
            target.execute(str(created))
        ((self._begun_at,),) = source.execute("SELECT @@gtid_binlog_pos")
        processes.begin_sync(f"b{self.report.syncs + 1}", self._mode)
        self._settings = read_settings(world.config(processes.name).read_text("utf-8"), {})
        world.calm.touch()
        world.snapshot.touch()
        for child in (processes.load, processes.applier):
            child.start()

    # --- faults ------------------------------------------------------------------------------------------------------

    def _play_opening(self, fault: Fault) -> None:
        """One before or during the snapshot; the reader goes on at once."""
        self._processes.befall(fault)
        self._note(fault, 0.0)
        if fault.point.startswith("binlog.snapshot.begun"):
            self._world.calm.unlink(missing_ok=True)
        pause(self._random.uniform(0, 0.2))

    def _play(self, fault: Fault) -> None:
        pause(self._random.uniform(0, RUN_S_MAX))
        self._processes.befall(fault)
        self._note(fault, self._pulse())

    def _note(self, fault: Fault, level_s: float) -> None:
        self.report.played.append(Played(fault, level_s))
        self._say(f"{len(self.report.played)}  {fault}: level again in {level_s:.2f} s")
        for gtid in self._processes.lost:
            self._add_note(f"the source's engine had lost {gtid} of its own binlog: put back")
        self._processes.lost.clear()
        self._processes.refuse_dead()

    def _pulse(self) -> float:
        """Write a row to the source, and wait until the target has it; how long that took."""
        self._pulses += 1
        number, begun = self._pulses, time.monotonic()
        self._processes.source.execute(
            f"INSERT INTO {PULSE} (id, stamp) VALUES (%s, %s) ON DUPLICATE KEY UPDATE stamp = VALUES(stamp)",
            (number % 5, number),
        )

        def has_come() -> bool:
            self._processes.refuse_dead()
            found = self._processes.target.execute(f"SELECT COUNT(*) FROM {PULSE} WHERE stamp = %s", (number,))
            pause(0.02)
            return bool(found[0][0])

        eventually(has_come, f"pulse {number} comes to the target", LEVEL_S, CampaignError)
        return time.monotonic() - begun

    def _published(self) -> Published | None:
        address = self._processes.address()
        with suppress(txmq.errors.TxmqError, BinlogError), txmq.connect(address, timeout=2.0) as client:
            return newest_published(client, self._settings)
        return None

    def _is_snapshot_over(self) -> bool:
        published = self._published()
        return published is not None and published.snapshot is None

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """The load has come to rest: compare everything."""
        processes = self._processes
        processes.load.stop()
        ((end,),) = processes.source.execute("SELECT @@gtid_binlog_pos")
        flavor_end = parse_gtids("mariadb", str(end))

        def is_level() -> bool:
            pause(0.05)
            published = self._published()
            return published is not None and published.is_sent and published.position.gtid_set.covers(flavor_end)

        eventually(is_level, f"the reader is level with {end}", END_S, CampaignError)
        for child in (processes.reader, processes.applier):
            child.stop()
        command = [sys.executable, "-m", *processes.command("apply"), "--until-end"]
        found = fork_server.run(command, timeout=END_S)
        if found.returncode:
            raise CampaignError(f"the applier ended with {found.returncode}: {found.stderr.decode()[-3000:]}")
        processes.source.execute("FLUSH BINARY LOGS")
        processes.replay.catch_up(processes.binlog_files()[:-1])
        held, lost = self._differences(processes.target), self._differences(processes.source)
        checker = self._checker()
        complaints = [*(f"{found.rule} {found.text}" for found in held), *checker.findings()]
        self.report.counts += checker.counts
        self.report.complaints += [f"sync {processes.name}: {complaint}" for complaint in complaints]
        for note in lost_rows(lost, checker.changed_last):
            self._add_note(note)
        self._lost = {found.table for found in lost}
        self._say(f"check after {len(self.report.played)} faults: {len(complaints)} findings")

    def _add_note(self, note: str) -> None:
        self.report.notes.append(f"sync {self._processes.name}: {note}")
        self._say(f"note: {note}")

    def _differences(self, other: MariaDB) -> list[TableDifference]:
        """Of a server to the replay."""
        processes, replay = self._processes, self._processes.replay.server
        name = f"{processes.name}_compared"
        self._world.write_config(name, self._mode, processes.address(), replay.port, other.port)
        check = TableCheck(self._world.config(name), replay, other)
        found = check.differences()
        self.report.counts["rows"] += check.rows if other is processes.target else 0
        return found

    def _checker(self) -> Checker:
        """With all that the sync's topics have."""
        prefix = f"{self._processes.name}.{DATABASE}."
        with txmq.connect(self._processes.address()) as client:
            topics = {topic.name: topic.partitions for topic in client.topics.list() if topic.name.startswith(prefix)}
            checker = Checker(
                read_binlog(self._processes.binlog_files(), DATABASE), str(self._begun_at), topics, prefix,
                self._processes.snapshot_ended_at(),
            )  # fmt: skip
            for topic in topics:
                for message in client.browse(topic):
                    event = read_event(message.value or b"")
                    checker.take((topic, message.partition), message.offset, message.key or b"", event)
        return checker
