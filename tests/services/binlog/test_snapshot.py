"""Snapshots of a real MariaDB by the command: kills at each step, concurrent statements and XA."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.binlog.snapshot_run import WAIT_S, Run, Writer, caught_up, fill, read_rows, table_rows
from tests.stopped import until_stopped
from txmq.runtime.crashpoints import VARIABLE
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.fork_server import ForkServer
from txmq.testing.processes.mariadb import MariaDB

pytestmark = pytest.mark.needs(Ability.SNAPSHOTS)
POINTS = (
    "binlog.snapshot.begun:1", "binlog.snapshot.viewed:1", "binlog.snapshot.viewed:2", "binlog.snapshot.read:1",
    "binlog.snapshot.read:3", "binlog.tx.filled:2", "binlog.tx.committed:3", "binlog.position.read:4",
    "binlog.snapshot.left:1", "binlog.snapshot.left:2",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[ForkServer]:
    """Commands are forked."""
    with ForkServer(("txmq.cli.main", "txmq.binlog.reader")) as made:
        yield made


@pytest.fixture
def database(server: MariaDB) -> MariaDB:
    """The server, without the tables of former tests."""
    for (table,) in server.execute("SHOW TABLES"):
        server.execute(f"DROP TABLE {table}")
    return server


@pytest.mark.parametrize(("kind", "points"), [("INT", POINTS), ("VARCHAR(20)", ("binlog.snapshot.read:4",))])
def test_kills_leave_each_row_once_and_its_changes_behind_it(
    database: MariaDB, shared_broker: BrokerProcess, tmp_path: Path, kind: str, points: tuple[str, ...]
) -> None:
    fill(database, kind=kind, rows=200)
    run = Run(tmp_path, database, shared_broker, f"k{kind[0].lower()}", chunk_rows=18)
    with Writer(database):
        for point in points:
            died = run.start("--snapshot", "only", crash=point).wait(WAIT_S)
            assert died == -signal.SIGKILL, (point, run.log.read_text())
        run.finish()
    with txmq.connect(shared_broker.address) as client:
        caught_up(run, client)
        assert {event["op"] for event in run.events(client, "items")} == set("rcud")


def test_statements_between_two_views_are_followed(
    database: MariaDB, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    for table in ("altered", "begun", "emptied", "gone", "old", "older", "unread", "untouched"):
        fill(database, table, rows=20)
    run = Run(tmp_path, database, shared_broker, "ddl")
    # ``altered`` is read in chunks of 7 and ``begun`` comes next: the third chunk of it is not saved
    assert run.start(crash="binlog.snapshot.read:5").wait(WAIT_S) == -signal.SIGKILL
    for statement in (
        "ALTER TABLE begun ADD COLUMN w INT DEFAULT 7 FIRST",
        "RENAME TABLE old TO young",
        "ALTER TABLE older RENAME TO younger",
        "CREATE TABLE alike LIKE unread",
        "CREATE TABLE IF NOT EXISTS untouched (id INT PRIMARY KEY)",
        "TRUNCATE TABLE emptied",
        "INSERT INTO emptied VALUES (1, 1)",
        "DROP TABLE gone",
        "CREATE TABLE made (id INT PRIMARY KEY, v INT)",
        "INSERT INTO made VALUES (1, 1)",
        "UPDATE young SET v = 3 WHERE id = 3",
        "UPDATE younger SET v = 3 WHERE id = 3",
        "UPDATE unread SET v = 3 WHERE id = 3",
        "UPDATE begun SET v = 3 WHERE id IN (0, 57)",
    ):
        database.execute(statement)
    run.finish()
    with txmq.connect(shared_broker.address) as client:
        caught_up(run, client, "made")
        for table in ("altered", "emptied", "young", "younger", "unread", "untouched", "made"):
            assert run.rebuilt(client, table) == table_rows(database, table), table
        assert {event["op"] for event in run.events(client, "made")} == {"c"}
        assert {event["op"] for event in run.events(client, "emptied")} == {"c"}
        begun = {event["after"]["id"]: event["after"]["v"] for event in run.events(client, "begun")}
        assert begun == dict(database.execute("SELECT id, v FROM begun"))
        ops = [event["op"] for event in run.events(client, "begun") if event["after"]["id"] == 0]
        assert ops in (["r"], ["r", "u"])  # the chunk that was killed had it, or the one before
        assert [event["op"] for event in run.events(client, "begun") if event["after"]["id"] == 57] == ["r"]


def test_prepared_transactions_are_waited_for_and_later_ones_come_once(
    database: MariaDB, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    fill(database)
    run = Run(tmp_path, database, shared_broker, "xa")

    def prepare(name: str, *statements: str) -> None:
        with closing(database.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
            for statement in (f"XA START '{name}'", *statements, f"XA END '{name}'", f"XA PREPARE '{name}'"):
                cursor.execute(statement)

    prepare("early", "INSERT INTO items VALUES (1, 1)")
    reader = run.start(crash="binlog.snapshot.read:5")
    eventually(lambda: "waiting for prepared XA transactions" in run.log.read_text(), run.log.read_text, WAIT_S)
    assert f"X'{b'early'.hex()}',X'',1" in run.log.read_text()
    prepare("meanwhile", "INSERT INTO items VALUES (2, 1)")  # the stream has its rows: it is not waited for
    database.execute("XA COMMIT 'early'")
    assert reader.wait(WAIT_S) == -signal.SIGKILL
    # rows that are read, rows that are not, and one that moves from one side to the other
    prepare("late", "UPDATE items SET v = 5 WHERE id IN (3, 357)", "UPDATE items SET id = 355 WHERE id = 6")
    assert run.start(crash="binlog.snapshot.read:2").wait(WAIT_S) == -signal.SIGKILL
    database.execute("XA COMMIT 'late'")
    database.execute("XA COMMIT 'meanwhile'")
    run.finish()
    with txmq.connect(shared_broker.address) as client:
        caught_up(run, client)
        moved = [event for event in run.events(client, "items") if 6 in _ids(event) or 355 in _ids(event)]
        ops = sorted((event["op"], *_ids(event)) for event in moved)
        assert ops in ([("d", 6), ("r", 6), ("r", 355)], [("r", 355)])  # the first chunk was saved, or killed


def _ids(event: dict[str, Any]) -> list[int]:
    return [row["id"] for row in (event["before"], event["after"]) if row is not None]


def test_named_tables_are_read_again_and_their_changes_go_on(
    database: MariaDB, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    fill(database)
    fill(database, "others", rows=20)
    run = Run(tmp_path, database, shared_broker, "named")
    run.finish()
    assert run.start("--snapshot", "shop.it*", crash="binlog.position.read:1").wait(WAIT_S) == -signal.SIGKILL
    refused = run.start("--snapshot", "never")
    assert refused.wait(WAIT_S) == 1
    assert "a snapshot is unfinished" in run.log.read_text().splitlines()[-1]
    command = [sys.executable, "-m", "txmq.cli.main", "binlog", "status", "--config", str(run.config), "--json"]
    shown = json.loads(fork_server.run(command, timeout=WAIT_S).stdout)["snapshot"]
    assert shown == {"rows": shown["rows"], "table": "shop.items", "tables_left": 0, "tables": 1}
    assert 0 < shown["rows"] < 120
    database.execute("DELETE FROM items WHERE id = 357")  # a row that is not read again yet
    run.finish()
    refused = run.start("--snapshot", "shop.none")
    assert refused.wait(WAIT_S) == 2
    assert "no captured table has such a name" in run.log.read_text().splitlines()[-1]
    with txmq.connect(shared_broker.address) as client:
        events = run.events(client, "items")
        assert sorted(event["after"]["id"] for event in events if event["op"] == "r") == sorted(
            [3 * number for number in range(120)] + [3 * number for number in range(119)]
        )
        assert [event["before"]["id"] for event in events if event["op"] == "d"] == [357]
        assert len(run.events(client, "others")) == 20


def test_table_without_key_is_read_again_if_cut_off(
    database: MariaDB, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE plain (id INT, v INT)")
    database.execute(f"INSERT INTO plain VALUES {', '.join(f'({number}, 0)' for number in range(50))}")
    run = Run(tmp_path, database, shared_broker, "plain")
    assert run.start(crash="binlog.tx.filled:4").wait(WAIT_S) == -signal.SIGKILL
    database.execute("DELETE FROM plain WHERE id = 0")
    database.execute("UPDATE plain SET v = 1 WHERE id = 49")
    run.finish()
    with txmq.connect(shared_broker.address) as client:
        rows: set[tuple[int, int]] = set()  # each is its own key, and an update a delete and an insert
        for event in run.events(client, "plain"):
            if event["before"] is not None:
                rows.discard((event["before"]["id"], event["before"]["v"]))
            if event["after"] is not None:
                rows.add((event["after"]["id"], event["after"]["v"]))
        assert rows == set(database.execute("SELECT id, v FROM plain"))


def test_stopped_reader_and_killed_database_are_gone_on_with(
    database: MariaDB, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    fill(database, rows=150)
    run = Run(tmp_path, database, shared_broker, "stops", chunk_rows=5)
    reader = run.start(crash="binlog.snapshot.read:2:stop")  # so that it is not done with it before
    until_stopped(reader.pid, run.log.read_text)
    reader.send_signal(signal.SIGTERM)
    reader.send_signal(signal.SIGCONT)
    assert reader.wait(WAIT_S) == 0
    other = run.start("--snapshot", "only", crash="binlog.snapshot.read:3:stop")
    until_stopped(other.pid, run.log.read_text)
    assert "going on with the snapshot" in run.log.read_text()
    database.kill()
    other.send_signal(signal.SIGCONT)
    eventually(lambda: "waiting for the database" in run.log.read_text(), run.log.read_text, WAIT_S)
    database.start()
    assert other.wait(WAIT_S) == 0, run.log.read_text()
    database.execute("UPDATE items SET v = 1")
    with txmq.connect(shared_broker.address) as client:
        caught_up(run, client)
        assert Counter(event["op"] for event in run.events(client, "items")) == {"r": 150, "u": 150}


@pytest.mark.parametrize("mode", ["transactional", "ordered"])
def test_killed_broker_and_database_are_waited_for_in_a_snapshot(
    database: MariaDB, broker: BrokerProcess, tmp_path: Path, mode: str
) -> None:
    fill(database, rows=200)
    run = Run(tmp_path, database, broker, "outages", chunk_rows=18)
    run.config.write_text(f'{run.config.read_text()}mode = "{mode}"\nspool = "{tmp_path / "spool"}"\n')
    with Writer(database), txmq.connect(broker.address) as client:
        reader = run.start("--snapshot", "only", crash="binlog.snapshot.read:5:stop")  # so that it is not done before
        until_stopped(reader.pid, run.log.read_text)
        assert read_rows(run, client) < 200
        for victim in (broker, database):
            victim.kill()
        reader.send_signal(signal.SIGCONT)
        for victim, name in ((broker, "broker"), (database, "database")):
            said = f"waiting for the {name}"
            eventually(lambda said=said: said in run.log.read_text(), run.log.read_text, WAIT_S)  # type: ignore[misc]
            victim.start()
        assert reader.wait(WAIT_S) == 0, run.log.read_text()
    with txmq.connect(broker.address) as client:
        caught_up(run, client)


def test_terminal_shows_a_bar_and_interrupt_ends_in_order(
    database: MariaDB, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    rows = 12_000
    database.execute("CREATE TABLE items (id INT PRIMARY KEY, v INT)")
    database.execute(f"INSERT INTO items SELECT seq, 0 FROM seq_1_to_{rows}")
    database.execute("ANALYZE TABLE items")
    run = Run(tmp_path, database, shared_broker, "bar", chunk_rows=500, view_ms_max=1000)
    terminal, end = pty.openpty()
    slow = {"TERM": "xterm", VARIABLE: "binlog.snapshot.read:15:sleep:2"}  # by then there is a bar
    started = subprocess.Popen(
        run.command("--snapshot", "only"), env={**os.environ, **slow}, stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    shown, is_asked = "", False
    with suppress(OSError):  # the end of the command
        while some := os.read(terminal, 1 << 16):
            shown += some.decode(errors="replace")
            if not is_asked and re.search(r"[1-9]\d*00/1\d{4}", shown):
                started.send_signal(signal.SIGINT)
                is_asked = True
    os.close(terminal)
    assert (started.wait(WAIT_S), is_asked) == (0, True), shown
    assert "stopped; published up to" in shown
    assert "the snapshot is complete" not in shown
    run.finish()
    assert "going on with the snapshot" in run.log.read_text()
    with txmq.connect(shared_broker.address) as client:
        assert sorted(event["after"]["id"] for event in run.events(client, "items")) == list(range(1, rows + 1))
