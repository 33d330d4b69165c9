"""Snapshots of a real MariaDB: forms of values, order of keys, kills at each step, statements and XA beside them."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.binlog.reading import Reading
from tools.crash.binlog.columns import COLUMNS, SESSION
from txmq.binlog.changes import TableName
from txmq.binlog.config import SnapshotSettings
from txmq.binlog.errors import SourceAwayError, SourceError
from txmq.binlog.publish.unread import TableProgress
from txmq.binlog.snapshot.snapshot import Snapshot
from txmq.binlog.snapshot.tables import describe
from txmq.binlog.snapshot.view import View
from txmq.errors import UnknownTopicError
from txmq.runtime.crashpoints import VARIABLE
from txmq.runtime.os_clock import OSClock
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import ForkServer, Process
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa.database.mysql_driver import mysql_driver

WAIT_S = 60.0
POINTS = (
    "binlog.snapshot.begun:1", "binlog.snapshot.viewed:1", "binlog.snapshot.viewed:2", "binlog.snapshot.read:1",
    "binlog.snapshot.read:3", "binlog.tx.filled:2", "binlog.tx.committed:3", "binlog.position.read:4",
    "binlog.snapshot.left:1", "binlog.snapshot.left:2",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[ForkServer]:
    """Commands are forked."""
    with ForkServer(("txmq.cli.main", "txmq.binlog.run")) as made:
        yield made


def view(reading: Reading, *tables: str) -> View:
    """A view of some tables of the test's database."""
    server = reading.source._server
    server.check()
    return View(reading.source._options, [TableName(reading.database, table) for table in tables], server)


# --- forms -----------------------------------------------------------------------------------------------------------


def test_every_type_has_form_and_schema_tag_of_the_stream(reading: Reading) -> None:
    columns = ", ".join(f"c{place} {declared}" for place, (declared, _, _) in enumerate(COLUMNS))
    length = max(len(values) for _, _, values in COLUMNS)
    rows = [
        ", ".join(values[row] if row < len(values) else "NULL" for _, _, values in COLUMNS) for row in range(length)
    ]
    inserts = [f"INSERT INTO t VALUES ({row}, {values})" for row, values in enumerate(rows)]
    reading.run(f"CREATE TABLE t (id INT PRIMARY KEY, {columns}) ROW_FORMAT=DYNAMIC", *SESSION, *inserts)
    streamed = reading.changes()
    with closing(view(reading, "t")) as taken:
        table = taken.table(TableName(reading.database, "t"))
        assert table is not None
        read = taken.chunk(table, 1000, ())
    assert [column.type for column in table.schema.columns] == [one.type for one in streamed[0].schema.columns]
    assert [column.kind for column in table.schema.columns] == [one.kind for one in streamed[0].schema.columns]
    assert table.schema == streamed[0].schema
    assert table.schema.tag == streamed[0].schema.tag
    for row, change in zip(read, streamed, strict=True):
        assert change.after is not None
        wrong = [
            (declared, value, wanted)
            for (declared, _, _), value, wanted in zip(COLUMNS, row[1:], change.after[1:], strict=True)
            if (value, type(value)) != (wanted, type(wanted))
        ]
        assert wrong == []


ORDERED = (
    ("int", ("-5", "0", "7", "2147483647")),
    ("bigint unsigned", ("0", "9223372036854775808", "18446744073709551615")),
    ("decimal(30,10)", ("-1.5", "0", "12345678901234567890.1234567890")),
    ("varchar(20) character set latin1 collate latin1_swedish_ci", ("'a'", "'B'", "'c'", "'%'", "'D%s'")),
    ("varchar(20) character set utf8mb4 collate utf8mb4_bin", ("'a'", "'B'", "'ü'", "'\U0001f600'")),
    ("char(5) collate utf8mb4_general_ci", ("'Äb'", "'ac'", "'AD'", "''")),
    ("binary(3)", ("'a'", "x'00ff00'", "x'000000'")),
    ("varbinary(9)", ("x'00'", "''", "x'ff00'")),
    ("date", ("'2026-11-23'", "'0000-00-00'", "'2026-02-31'")),
    ("datetime(3)", ("'2026-11-23 01:02:03.25'", "'0001-01-01'", "'0000-00-00'")),
    ("timestamp(6)", ("'2026-11-23 01:02:03.25'", "'1970-01-01 00:00:01'", "'2030-01-01'")),
    ("time(1)", ("'-01:00:00.5'", "'00:00:00'", "'800:00:00'", "'9:00:00'")),
    ("year", ("1901", "2155", "2000")),
    ("bit(9)", ("1", "0", "b'111111111'")),
    ("uuid", ("uuid()", "'f47ac10b-58cc-4372-a567-0e02b2c3d479'", "'123e4567-e89b-12d3-a456-426655440000'")),
    ("inet6", ("'::1'", "'2001:db8::1'", "'::ffff:192.0.2.1'")),
)


def test_each_key_is_cut_in_the_order_that_compares_it(
    reading: Reading,
) -> None:
    statements: list[str] = [*SESSION]
    for place, (kind, values) in enumerate(ORDERED):
        statements.append(f"CREATE TABLE t{place} (b INT, a {kind} NOT NULL, `%s` INT, PRIMARY KEY (a, b))")
        statements += [f"INSERT INTO t{place} VALUES ({number}, {one}, 1)" for one in values for number in (1, 2)]
    reading.run(*statements)
    snapshot = Snapshot(*_arguments(reading))
    with closing(view(reading, *[f"t{place}" for place in range(len(ORDERED))])) as taken:
        snapshot._view = taken
        for place, (kind, values) in enumerate(ORDERED):
            table = taken.table(TableName(reading.database, f"t{place}"))
            assert table is not None
            assert [name for name, _ in table.key] == ["a", "b"], kind
            keys: list[Any] = []
            while rows := taken.chunk(table, 1, keys[-1] if keys else ()):
                keys.append((rows[0][1], rows[0][0]))
                assert len(keys) <= 2 * len(values), (kind, keys)
            assert len(set(keys)) == 2 * len(values), (kind, keys)
            for border, key in enumerate(keys):
                progress = TableProgress(table.schema.table, table.key, key)
                told = snapshot.compare(progress, keys)
                assert told == [number <= border for number in range(len(keys))], (kind, key)


def test_a_view_without_connection_is_given_up(reading: Reading) -> None:
    reading.run("CREATE TABLE t (id INT PRIMARY KEY)")
    snapshot, taken = Snapshot(*_arguments(reading)), view(reading, "t")
    snapshot._view = taken
    table = taken.table(TableName(reading.database, "t"))
    assert table is not None
    reading.run(f"KILL {taken.ask('SELECT CONNECTION_ID()')[0][0]}")
    with pytest.raises(SourceAwayError):
        snapshot.compare(TableProgress(table.schema.table, table.key, (1,)), [(1,)])
    assert snapshot._view is None


def _arguments(reading: Reading) -> Any:
    return reading.source._options, SnapshotSettings(), lambda _: True, OSClock(), lambda: False


def test_tables_that_cannot_be_cut_are_read_in_one_go(reading: Reading) -> None:
    reading.run(
        "CREATE TABLE a (x INT)", "CREATE TABLE b (x DOUBLE PRIMARY KEY)",
        "CREATE TABLE c (x TEXT, PRIMARY KEY (x(9)))", "CREATE TABLE d (x ENUM('a','b') PRIMARY KEY)",
        *[f"INSERT INTO {table} VALUES (1)" for table in "abcd"],
    )  # fmt: skip
    with closing(view(reading, *"abcd")) as taken:
        for name in "abcd":
            table = taken.table(TableName(reading.database, name))
            assert table is not None
            assert table.key == ()
            assert [len(rows) for rows in taken.whole(table, 10)] == [1]


def test_an_engine_without_transactions_is_refused_by_name(reading: Reading) -> None:
    reading.run("CREATE TABLE t (id INT PRIMARY KEY) ENGINE=MyISAM")
    with pytest.raises(SourceError, match=r"d\d+\.t cannot be read consistently, its engine is MyISAM"):
        describe(lambda sql, *values: reading.server.execute(sql, values), TableName(reading.database, "t"))


# --- the command -----------------------------------------------------------------------------------------------------


class Run:
    """A reader as a process, and what it published."""

    def __init__(self, directory: Path, server: MariaDB, broker: BrokerProcess, name: str, **settings: object) -> None:
        self.server, self.name, self.address = server, name, broker.address
        self.log, self.config = directory / f"{name}.log", directory / f"{name}.toml"
        snapshot = {"chunk_rows": 7, "view_ms_max": 1} | settings
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in snapshot.items())
        self.config.write_text(
            f'name = "{name}"\nbootstrap = "{broker.address}"\n[source]\nport = {server.port}\nuser = "root"\n'
            f'tables = ["shop.*"]\n[snapshot]\n{lines}\n'
            "[publish]\npartitions = 2\nsession_timeout_ms = 1000\nlinger_ms = 1\ntransaction_rows_max = 20\n"
        )

    def command(self, *words: str) -> list[str]:
        """The reader's command."""
        return [sys.executable, "-m", "txmq.cli.main", "binlog", "run", "--config", str(self.config), *words]

    def start(self, *words: str, crash: str = "") -> Process:
        """Start the reader."""
        environment = {**os.environ, VARIABLE: crash} if crash else dict(os.environ)
        return fork_server.start_logged(self.command(*words), self.log, environment)

    def finish(self, *words: str) -> None:
        """Read the snapshot to its end."""
        assert self.start("--snapshot", "only", *words).wait(WAIT_S) == 0, self.log.read_text()

    def events(self, client: txmq.Client, table: str) -> list[dict[str, Any]]:
        """The row events of a table, partition by partition."""
        found = [json.loads(message.value or b"") for message in client.browse(f"{self.name}.shop.{table}")]
        return [event for event in found if event["op"] in "rcud"]

    def rebuilt(self, client: txmq.Client, table: str, key: str = "id") -> dict[Any, Any]:
        """The table that strict consumers build: a row comes once, and each change is of the row as it was."""
        rows: dict[Any, Any] = {}
        for event in self.events(client, table):
            before, after = event["before"], event["after"]
            if before is None:
                assert after[key] not in rows, f"twice: {event}"
            else:
                assert rows.pop(before[key], None) == before, f"another row was there before: {event}"
            if after is not None:
                rows[after[key]] = after
        return rows


class Writer:
    """Changes rows of a table at random until the block ends; keys move as well. Goes on when the database is back."""

    def __init__(self, server: MariaDB, table: str = "items") -> None:
        self._server, self._table = server, table
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _write(self) -> None:
        numbers = count(1)
        while not self._is_ended.is_set():
            with suppress(mysql_driver().OperationalError):
                self._write_to(numbers)

    def _write_to(self, numbers: Iterator[int]) -> None:
        with closing(self._server.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
            while not self._is_ended.is_set():
                number = next(numbers)
                some, other = number * 7919 % 400, number * 104_729 % 400
                for sql in (
                    f"UPDATE IGNORE {self._table} SET v = {number} WHERE id BETWEEN {some} AND {some + 3}",
                    f"UPDATE IGNORE {self._table} SET id = {other} WHERE id = {some}",
                    f"DELETE FROM {self._table} WHERE id = {other + 1}",
                    f"INSERT IGNORE INTO {self._table} VALUES ({some + 1}, {number}), ({other + 2}, {number})",
                ):
                    cursor.execute(sql)


def fill(server: MariaDB, table: str = "items", rows: int = 120, kind: str = "INT") -> None:
    """A table with every third id."""
    server.execute(f"CREATE OR REPLACE TABLE {table} (id {kind} PRIMARY KEY, v INT)")
    values = ", ".join(f"({3 * number}, 0)" for number in range(rows))
    server.execute(f"INSERT INTO {table} VALUES {values}")


def table_rows(server: MariaDB, table: str) -> dict[Any, Any]:
    """What a SELECT gives."""
    return {row[0]: {"id": row[0], "v": row[1]} for row in server.execute(f"SELECT id, v FROM {table}")}


@pytest.fixture
def database(server: MariaDB) -> MariaDB:
    """The server, without the tables of former tests."""
    for (table,) in server.execute("SHOW TABLES"):
        server.execute(f"DROP TABLE {table}")
    return server


def caught_up(run: Run, client: txmq.Client, table: str = "items") -> None:
    """Let a reader publish the rest, and compare the table with what consumers build of it."""
    reader = run.start("--snapshot", "initial")
    wanted = table_rows(run.server, table)
    eventually(lambda: run.rebuilt(client, table) == wanted, lambda: run.log.read_text()[-3000:], WAIT_S)
    reader.kill()
    reader.wait(WAIT_S)


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
    for table in ("altered", "begun", "emptied", "gone", "old", "unread"):
        fill(database, table, rows=20)
    run = Run(tmp_path, database, shared_broker, "ddl")
    # ``altered`` is read in chunks of 7 and ``begun`` comes next: the third chunk of it is not saved
    assert run.start(crash="binlog.snapshot.read:5").wait(WAIT_S) == -signal.SIGKILL
    for statement in (
        "ALTER TABLE begun ADD COLUMN w INT DEFAULT 7 FIRST",
        "RENAME TABLE old TO young",
        "TRUNCATE TABLE emptied",
        "INSERT INTO emptied VALUES (1, 1)",
        "DROP TABLE gone",
        "CREATE TABLE made (id INT PRIMARY KEY, v INT)",
        "INSERT INTO made VALUES (1, 1)",
        "UPDATE young SET v = 3 WHERE id = 3",
        "UPDATE begun SET v = 3 WHERE id IN (0, 57)",
    ):
        database.execute(statement)
    run.finish()
    with txmq.connect(shared_broker.address) as client:
        caught_up(run, client, "made")
        for table in ("altered", "emptied", "young", "unread", "made"):
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
    reader = run.start()
    eventually(lambda: "beginning a snapshot" in run.log.read_text(), run.log.read_text, WAIT_S)
    reader.send_signal(signal.SIGTERM)
    assert reader.wait(WAIT_S) == 0
    reader = run.start("--snapshot", "only")
    eventually(lambda: "going on with the snapshot" in run.log.read_text(), run.log.read_text, WAIT_S)
    database.restart()
    assert reader.wait(WAIT_S) == 0, run.log.read_text()
    assert "waiting for the database" in run.log.read_text()
    database.execute("UPDATE items SET v = 1")
    with txmq.connect(shared_broker.address) as client:
        caught_up(run, client)
        assert Counter(event["op"] for event in run.events(client, "items")) == {"r": 150, "u": 150}


# An ordered reader goes on with the snapshot while the broker is away: it must last for both kills.
@pytest.mark.parametrize(("mode", "rows"), [("transactional", 200), ("ordered", 2000)])
def test_killed_broker_and_database_are_waited_for_in_a_snapshot(
    database: MariaDB, broker: BrokerProcess, tmp_path: Path, mode: str, rows: int
) -> None:
    fill(database, rows=rows)
    run = Run(tmp_path, database, broker, "outages", chunk_rows=18)
    run.config.write_text(f'{run.config.read_text()}mode = "{mode}"\nspool = "{tmp_path / "spool"}"\n')
    with Writer(database), txmq.connect(broker.address) as client:
        reader = run.start("--snapshot", "only")
        for victim, name, read in ((broker, "broker", 1), (database, "database", 70)):
            eventually(lambda read=read: read_rows(run, client) >= read, run.log.read_text, WAIT_S)  # type: ignore[misc]
            victim.kill()
            said = f"waiting for the {name}"
            eventually(lambda said=said: said in run.log.read_text(), run.log.read_text, WAIT_S)  # type: ignore[misc]
            victim.start()
        assert reader.wait(WAIT_S) == 0, run.log.read_text()
    with txmq.connect(broker.address) as client:
        caught_up(run, client)


def read_rows(run: Run, client: txmq.Client) -> int:
    """How many rows of the snapshot are published."""
    with suppress(UnknownTopicError):
        return sum(event["op"] == "r" for event in run.events(client, "items"))
    return 0


def test_terminal_shows_a_bar_and_interrupt_ends_in_order(
    database: MariaDB, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    rows = 12_000
    database.execute("CREATE TABLE items (id INT PRIMARY KEY, v INT)")
    database.execute(f"INSERT INTO items SELECT seq, 0 FROM seq_1_to_{rows}")
    database.execute("ANALYZE TABLE items")
    run = Run(tmp_path, database, shared_broker, "bar", chunk_rows=500, view_ms_max=1000)
    terminal, end = pty.openpty()
    started = subprocess.Popen(
        run.command("--snapshot", "only"), env={**os.environ, "TERM": "xterm"}, stdin=end, stdout=end, stderr=end
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
