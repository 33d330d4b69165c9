"""A database replayed in order into a second one, while everything is killed: no change twice, missing or out of order.

Theory of operation. A load (``load``) writes to a source. ``txmq binlog run`` publishes its changes, and ``txmq binlog
apply`` writes them into a target. A sync begins with rows that are there already, so with a snapshot, in which the
first faults fall; from a server that has no snapshots (MySQL), at the GTIDs of empty tables, as after a dump, and the
first faults fall in what came since. Then rounds of faults follow: reader, applier, broker, load and both databases are
killed, at named points and at any moment, alone and in pairs, and paused. After each fault a row is written to the
source, and must reach the target. Every ``check_every`` cycles the load comes to rest, and three things are checked:

* the target has the tables that the source's binlog makes (``replay``), by ``txmq binlog compare`` and by the
  databases' own CHECKSUM TABLE;
* the topics have each change of the binlog once, in order, as its makers' program shows it (``checker``);
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import txmq
from tools.crash.binlog.checker import Checker
from tools.crash.binlog.decoded import read_binlog
from tools.crash.binlog.directory import BinlogCampaignDirectory
from tools.crash.binlog.plan import MODES, SNAPSHOT_BEGUN_POINT, faults, opening, points
from tools.crash.binlog.processes import Processes
from tools.crash.binlog.report import BinlogReport, Played
from tools.crash.binlog.statements import Changes
from tools.crash.binlog.table_check import TableCheck, TableDifference, lost_rows
from tools.crash.binlog.tables import ALL_KEYS, BY_NAME, DATABASE, LIKE, MOVED, PULSE, ROWS, TABLES, Table
from tools.crash.doors import OPEN, Doors
from tools.crash.faults import Fault
from tools.crash.processes import CampaignError, pause
from txmq.binlog.config import read_settings
from txmq.binlog.errors import BinlogError
from txmq.binlog.event_json import read_event
from txmq.binlog.position import Position
from txmq.binlog.publish.published import Published
from txmq.binlog.status import newest_published
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.fork_server import ForkServer
from txmq.testing.processes.mariadb import MariaDB

LEVEL_S = 60.0
END_S = 300.0
RUN_S_MAX = 0.6
KEYLESS_ROWS = 30  # fewer than a chunk has: such a table is read whole, or not at all
_FORKED = ("txmq.cli.main", "txmq.binlog.reader", "txmq.binlog.apply.applier", "tools.crash.binlog.load")


class BinlogCampaign:
    """One campaign in an empty ``directory``; ``say`` gets a line a fault.

    Args:
        rows: of each table when it begins.
        doors: who may connect to the broker.

    Attributes:
        points: crash points of which each is the place of a death in a whole campaign.
    """

    def __init__(
        self, directory: Path, seed: int, say: Callable[[str], None] = print, *, rows: int = ALL_KEYS,
        doors: Doors = OPEN,
    ) -> None:  # fmt: skip
        self._world, self._say, self._rows, self._doors = BinlogCampaignDirectory(directory), say, rows, doors
        self._random, self._first_mode = random.Random(seed), seed
        self._processes = Processes(self._world, random.Random(-seed - 1), self._is_snapshot_over, doors)
        self._pulses = 0
        abilities = self._processes.source.program.abilities
        self._has_snapshots = Ability.SNAPSHOTS in abilities
        self.points = points(has_snapshots=self._has_snapshots)
        self._tables = {name: table.of(abilities) for name, table in BY_NAME.items()}
        self._made_anew: set[str] = set(self._tables)  # those that are, when the next sync begins
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
        first = opening(self._random, has_snapshots=self._has_snapshots)[:count]
        for fault in first:
            self._play_opening(fault)
        if not self._processes.reader.is_running:
            self._processes.reader.start()
        self._world.calm.unlink(missing_ok=True)
        eventually(self._is_snapshot_over, "the snapshot is complete", LEVEL_S, CampaignError)
        self._pulse()
        self._world.snapshot.unlink(missing_ok=True)
        rounds = faults(self._random, self._mode)
        for _ in range(count - len(first)):
            self._play(next(rounds))
        self._check()
        self.report.syncs += 1

    def _begin(self) -> None:
        """Set up a new sync: a target with the source's tables, no row. Load and applier begin, the reader does not."""
        processes, world = self._processes, self._world
        source, target = processes.source, processes.target
        anew = [table for name, table in self._tables.items() if name in self._made_anew]
        self._make(anew)
        if self._has_snapshots:
            self._fill(anew)
            self._shorten()
            world.calm.touch()
            world.snapshot.touch()
        target.make_database_anew(DATABASE)
        for (name,) in source.execute("SHOW TABLES"):
            ((_, created),) = source.execute(f"SHOW CREATE TABLE {name}")
            target.execute(str(created))
        self._begun_at = source.binlog_gtids()
        start = "" if self._has_snapshots else self._begun_at
        processes.begin_sync(f"b{self.report.syncs + 1}", self._mode, start)
        self._settings = read_settings(world.config(processes.name).read_text("utf-8"), {})
        if not self._has_snapshots:
            self._fill(anew)
        for child in (processes.load, processes.applier):
            child.start()

    def _make(self, tables: Iterable[Table]) -> None:
        """Without a row."""
        source = self._processes.source
        for table in tables:
            source.execute(f"DROP TABLE IF EXISTS {table.name}, {table.name}{MOVED}")
            source.execute(table.create())
        for table in TABLES:
            source.execute(f"DROP TABLE IF EXISTS {table.name}{LIKE}, {table.name}{ROWS}")

    def _fill(self, tables: Sequence[Table]) -> None:
        changes = Changes(tables, self._random, 0, keyless_grow=True)
        with closing(self._world.connect()) as connection, closing(connection.cursor()) as cursor:
            for table in tables:
                for statement in changes.rows(table, self._rows if table.columns else 0):
                    cursor.execute(statement)

    def _shorten(self) -> None:
        """Let the tables without a key have so few rows that a snapshot reads each at once."""
        source = self._processes.source
        for table in TABLES:
            if not table.has_key:
                ((rows,),) = source.execute(f"SELECT COUNT(*) FROM {table.name}")
                source.execute(f"DELETE FROM {table.name} LIMIT {max(rows - KEYLESS_ROWS, 0)}")

    # --- faults ------------------------------------------------------------------------------------------------------

    def _play_opening(self, fault: Fault) -> None:
        """One before or during the snapshot; the reader goes on at once."""
        self._processes.befall(fault)
        self._note(fault, 0.0)
        if fault.point.startswith(SNAPSHOT_BEGUN_POINT):
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
        end = processes.source.binlog_gtids()

        def is_level() -> bool:
            pause(0.05)
            published = self._published()
            if published is None or not published.is_sent:
                return False
            return published.position.covers(Position(published.position.flavor, end))

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
        if self._has_snapshots:
            self._made_anew = {found.table for found in lost}  # the source has not what its binlog has of them
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
                read_binlog(self._processes.binlog_files(), DATABASE), self._begun_at, topics, prefix,
                self._processes.snapshot_ended_at(),
            )  # fmt: skip
            for topic in topics:
                for message in client.browse(topic):
                    event = read_event(message.value or b"")
                    checker.take((topic, message.partition), message.offset, message.key or b"", event)
        return checker
