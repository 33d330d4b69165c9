"""A target is held to what the source's binlog says: to a replay of it in a third server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path

import MySQLdb
import pytest

from tools.crash.binlog.checker import Checker
from tools.crash.binlog.decoded import binlog_files, read_binlog
from tools.crash.binlog.directory import BinlogCampaignDirectory
from tools.crash.binlog.lost import put_back
from tools.crash.binlog.plan import READER, SOURCE
from tools.crash.binlog.processes import REPLAY_OPTIONS, Processes
from tools.crash.binlog.replay import Replay
from tools.crash.binlog.table_check import TableCheck, TableDifference, lost_rows
from tools.crash.binlog.tables import BY_NAME, DATABASE
from tools.crash.doors import OPEN
from tools.crash.faults import Fault
from tools.crash.processes import Child
from txmq.testing.eventually import eventually
from txmq.testing.processes.mariadb import MariaDB

TABLE, OTHER = "tab_text", "tab_bytes"
FILL = (f"INSERT INTO {TABLE} (id, stamp) VALUES ('k1', 1), ('k2', 1), ('k3', 1)",
        f"INSERT INTO {OTHER} (id, stamp) VALUES ('a001', 1), ('a002', 1)")  # fmt: skip
LAST = (f"UPDATE {TABLE} SET stamp = 2 WHERE id = 'K2'", f"DELETE FROM {OTHER} WHERE id = 'a002'")

LAST_LOST = f"INSERT INTO {OTHER} (id, stamp) VALUES ('a002', 1)"


class Sides:
    """A source with a binlog, its replay, and a target with the same rows."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._world = directory, BinlogCampaignDirectory(directory)
        self.source = stack.enter_context(MariaDB(self._world.source, binary_log=True))
        self.target = stack.enter_context(MariaDB(self._world.target))
        self.replay = Replay(MariaDB(self._world.replay, options=REPLAY_OPTIONS))
        stack.callback(self.replay.server.kill)
        self.replay.start()
        for server in (self.source, self.target):
            for statement in (*(BY_NAME[name].create() for name in (TABLE, OTHER)), *FILL, *LAST):
                server.execute(statement)
        ((last,),) = self.source.execute("SELECT @@gtid_binlog_pos")
        self.gtids = [f"0-1-{int(str(last).rpartition('-')[2]) - behind}" for behind in (1, 0)]
        self.catch_up()

    def processes(self) -> Processes:
        """Those of a campaign, with this source, and a reader that looks for a row as soon as it can."""
        made = Processes(self._world, random.Random(0), lambda: True, OPEN)
        made.source = self.source
        arguments = json.dumps(self.source.connect_arguments(tcp=True))
        query = f"SELECT COUNT(*) FROM {OTHER} WHERE id = 'a003'"
        made.reader = Child(READER, self.directory, lambda _: ["tests.crash.looking_reader", arguments, query])
        return made

    @property
    def _files(self) -> list[Path]:
        return binlog_files(self._world.source / "data")

    @property
    def first_files(self) -> list[Path]:
        """Of the binlog: with all that the source had before anything was tested."""
        return self._files[:1]

    def catch_up(self) -> None:
        """Replay what is new."""
        self.source.execute("FLUSH BINARY LOGS")
        self.replay.catch_up(self._files[:-1])

    def differences(self, other: MariaDB) -> list[TableDifference]:
        """Of a server to the replay."""
        server = self.replay.server
        self._world.write_config("compared", "ordered", "txmq://127.0.0.1:1", server.port, other.port)
        return TableCheck(self._world.config("compared"), server, other).differences()

    def notes(self) -> list[str]:
        """What the source has lost of its own binlog."""
        checker = Checker(read_binlog(self._files, DATABASE), "", {}, "")
        return lost_rows(self.differences(self.source), checker.changed_last)


@contextmanager
def lost(server: MariaDB) -> Iterator[None]:
    """Within: its engine does not have the last transactions, as after a kill that it has not survived whole."""
    _run_unlogged(server, f"UPDATE {TABLE} SET stamp = 1 WHERE id = 'k2'", LAST_LOST)
    yield
    _run_unlogged(server, *LAST)


def _run_unlogged(server: MariaDB, *statements: str) -> None:
    _run(server, "SET sql_log_bin = 0", *statements)


def _run(server: MariaDB, *statements: str) -> None:
    with closing(server.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
        for statement in statements:
            cursor.execute(statement)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with ExitStack() as stack:
        yield Sides(tmp_path_factory.mktemp("replay"), stack)


def test_what_the_source_lost_of_its_binlog_is_a_note(sides: Sides) -> None:
    with lost(sides.source):
        assert sides.differences(sides.target) == []
        assert sides.notes() == [
            f"the source's engine has lost of its own binlog: {OTHER} a002: transaction {sides.gtids[1]}",
            f"the source's engine has lost of its own binlog: {TABLE} k2: transaction {sides.gtids[0]}",
        ]
    assert sides.notes() == []


@pytest.mark.parametrize("source_too", [False, True])
def test_what_the_target_lost_is_a_finding(sides: Sides, *, source_too: bool) -> None:
    with lost(sides.target), lost(sides.source) if source_too else nullcontext():
        found = [(one.rule, one.table, one.rows) for one in sides.differences(sides.target)]
    assert found == [
        ("C1", OTHER, ((OTHER, "a002"),)), ("C1", TABLE, ((TABLE, "k2"),)), ("C2", OTHER, ()), ("C2", TABLE, ()),
    ]  # fmt: skip


def test_a_table_that_the_target_lost_is_a_finding(sides: Sides) -> None:
    sides.target.execute(f"RENAME TABLE {OTHER} TO {OTHER}_moved")
    found = {(one.rule, one.table) for one in sides.differences(sides.target)}
    sides.target.execute(f"RENAME TABLE {OTHER}_moved TO {OTHER}")
    assert found == {("C1", OTHER), ("C2", OTHER), ("C2", f"{OTHER}_moved")}


def test_what_the_source_lost_is_put_back_unlogged(sides: Sides) -> None:
    with lost(sides.source):
        ((before,),) = sides.source.execute("SELECT @@gtid_binlog_pos")
        assert put_back(sides.source, sides.first_files) == sides.gtids
        assert sides.notes() == []
        assert put_back(sides.source, sides.first_files) == []
        assert sides.source.execute("SELECT @@gtid_binlog_pos") == [(before,)]
        _run_unlogged(sides.source, LAST_LOST)
        assert put_back(sides.source, sides.first_files) == sides.gtids[1:]
        assert sides.notes() == []
        _run_unlogged(sides.source, LAST_LOST)


def test_what_one_phase_left_prepared_is_put_back(sides: Sides) -> None:
    with lost(sides.source):
        _run_unlogged(sides.source, *_prepared("one-phase", LAST[1]))
        assert len(sides.source.execute("XA RECOVER")) == 1
        assert put_back(sides.source, sides.first_files) == sides.gtids
        assert sides.source.execute("XA RECOVER") == []
        assert sides.notes() == []
        _run_unlogged(sides.source, LAST_LOST)


def test_prepared_rows_without_an_end_hold_up_nothing(sides: Sides) -> None:
    row = f"INSERT INTO {TABLE} (id, stamp) VALUES ('k9', %d)"
    change = f"UPDATE {TABLE} SET stamp = stamp + 10 WHERE id = 'k9'"
    _run(sides.source, row % 1)
    _run(sides.source, *_prepared("kept", change), "XA COMMIT 'kept'")
    _run(sides.source, *_prepared("empty"), "XA COMMIT 'empty'")
    _run(sides.source, *_prepared("left", change))
    eventually(lambda: _is_forgotten(sides.source, "left"), "the server lets the transaction go", 10.0)
    _run(sides.source, change)
    sides.catch_up()
    assert sides.notes() == []
    assert [one.rows for one in sides.differences(sides.target) if one.rule == "C1"] == [((TABLE, "k9"),)]
    sides.target.execute(row % 21)
    assert sides.differences(sides.target) == []


def test_nobody_reads_killed_source_before_it_is_whole(sides: Sides) -> None:
    """Found: a snapshot was read in between, and a later change did not fit the target."""
    processes = sides.processes()
    _run(sides.source, f"INSERT INTO {OTHER} (id, stamp) VALUES ('a003', 1)", f"DELETE FROM {OTHER} WHERE id = 'a003'")
    _run_unlogged(sides.source, f"INSERT INTO {OTHER} (id, stamp) VALUES ('a003', 1)")
    told = sides.directory / "reader.log"
    processes.reader.start()
    try:
        eventually(lambda: told.exists() and "connected" in told.read_text(), "the reader is connected")
        processes.befall(Fault("kill", (SOURCE,), 0.0))
        eventually(lambda: len(told.read_text().split()) == 2, "the reader is connected again, and has looked")
    finally:
        processes.reader.kill()
    assert told.read_text().split() == ["connected", "0"]
    assert len(processes.lost) == 1


def _prepared(xid: str, *changes: str) -> list[str]:
    return [f"XA START '{xid}'", *changes, f"XA END '{xid}'", f"XA PREPARE '{xid}'"]


def _is_forgotten(server: MariaDB, xid: str) -> bool:
    """Roll back in the engine alone what is prepared; False while its connection has it."""
    with suppress(MySQLdb.OperationalError):
        _run_unlogged(server, f"XA ROLLBACK '{xid}'")
        return True
    return False
