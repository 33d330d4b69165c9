"""The marker table on a real MariaDB: which connection locks what."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import MySQLdb
import pytest

from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource, MySQLResource
from txmq.xa.database.dialects import MYSQL, server_began_ms
from txmq.xa.database.marker_table import MarkerTable
from txmq.xa.resolver_ports import DELETE_SIZE

CLUSTER = "00000000000000c1"
_numbers = itertools.count(1)


class Database:
    """One of its own, with the tables of a resource of either kind."""

    def __init__(self, server: MariaDB) -> None:
        self.server, self.name = server, f"marked{next(_numbers)}"
        server.execute(f"CREATE DATABASE {self.name}")
        self.opened: list[Any] = []
        LastResource("shop", connect=self.connect).install()

    def connect(self, **arguments: Any) -> Any:
        """A connection that waits for locks a second only."""
        connection = self.server.connect(**({"db": self.name} | arguments))
        connection.cursor().execute("SET SESSION innodb_lock_wait_timeout = 1")
        connection.commit()
        self.opened.append(connection)
        return connection

    def execute(self, sql: str, *rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Somebody else's statement, committed at once."""
        with closing(self.connect(autocommit=True)) as connection:
            cursor = connection.cursor()
            cursor.executemany(sql, rows) if rows else cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description is not None else []

    def resolving(self, kind: str) -> Any:
        """A resolver's connection."""
        if kind == "last-resource":
            resource = LastResource("shop", connect=self.connect)
            return resource.open_for_resolver(CLUSTER)
        return MySQLResource("shop", connect=self.connect).open_recovery(CLUSTER)

    def open_marker(self, txid: str) -> Any:
        """A writer's connection, its marker not committed yet."""
        connection = self.connect()
        connection.cursor().execute("INSERT INTO txmq_marker VALUES (%s, 'committed', 0, 0, 0, NULL)", (txid,))
        return connection


def _owned_marker(database: Database, txid: str, written_ms: str) -> Any:
    """A writer's connection; its marker, not committed yet, names its session."""
    connection = database.connect()
    row = f"(%s, 'committed', 0, {written_ms}, CONNECTION_ID(), NULL)"
    connection.cursor().execute(f"INSERT INTO txmq_marker VALUES {row}", (txid,))
    return connection


@pytest.fixture
def database(mariadb: MariaDB) -> Iterator[Database]:
    found = Database(mariadb)
    yield found
    for connection in found.opened:
        with suppress(MySQLdb.Error):  # closed before
            connection.close()


@pytest.mark.parametrize("kind", ["last-resource", "xa"])
@pytest.mark.parametrize("count", [5, 200, DELETE_SIZE])
def test_finished_markers_leave_past_writer_whose_marker_is_not_committed(
    database: Database, kind: str, count: int
) -> None:
    """Many of few: a full scan, which waited for every open transaction (and MariaDB scans at READ COMMITTED too)."""
    txids = [f"t{number:05}" for number in range(count)]
    database.execute("INSERT INTO txmq_marker VALUES (%s, 'committed', 0, 0, 0, NULL)", *((txid,) for txid in txids))
    writers = [database.open_marker(txid) for txid in ("a", "t00002x", "z")]
    resolving = database.resolving(kind)
    resolving.delete_committed(txids[::2])
    for writer in writers:
        writer.commit()
    left = [txid for (txid,) in database.execute("SELECT txid FROM txmq_marker WHERE txid <> '-' ORDER BY txid")]
    assert left == sorted([*txids[1::2], "a", "t00002x", "z"])


def test_writers_come_in_between_while_housekeeping_holds_its_locks(database: Database) -> None:
    """At REPEATABLE READ, which is the server's default, each gap between two markers was locked as well."""
    assert database.execute(f"SELECT @@global.{database.server.program.isolation}") == [("REPEATABLE-READ",)]
    txids = [f"t{number:05}" for number in range(200)]
    database.execute("INSERT INTO txmq_marker VALUES (%s, 'committed', 0, 0, 0, NULL)", *((txid,) for txid in txids))
    resolving, commit = database.resolving("last-resource"), []
    real = resolving.connection.commit

    def commit_late() -> None:
        for txid in ("a", "t00002x", "z"):
            database.open_marker(txid).commit()
        other = database.resolving("last-resource")
        assert other.table.read_durably(other.connection, "t00151") == "committed"
        assert other.table.insert_rolled_back(other.connection, "t00003x", other.uuid, 0)
        commit.append(True)
        real()

    resolving.connection.commit = commit_late
    resolving.delete_committed([*txids[:100:2], "not there"])
    assert commit == [True]


def test_expired_rolled_back_markers_leave_without_waiting_for_open_transactions(database: Database) -> None:
    old = [(f"old{number}", "rolled-back") for number in range(300)]
    database.execute("INSERT INTO txmq_marker VALUES (%s, %s, 0, 0, 0, NULL)", *old, ("c", "committed"))
    database.execute(f"INSERT INTO txmq_marker VALUES ('young', 'rolled-back', 0, {MYSQL.now_ms}, 0, NULL)")
    writer = database.open_marker("open")
    resolving = database.resolving("last-resource")
    assert resolving.table.delete_expired_rolled_back(resolving.connection) == len(old)
    assert resolving.table.delete_expired_rolled_back(resolving.connection) == 0
    writer.rollback()
    assert database.execute("SELECT txid FROM txmq_marker ORDER BY txid") == [("c",), ("young",)]


@pytest.mark.parametrize("kind", ["last-resource", "xa"])
def test_who_settles_reads_committed_rows(database: Database, kind: str) -> None:
    database.resolving(kind)
    cursor = database.opened[-1].cursor()
    cursor.execute(f"SELECT @@{database.server.program.isolation}, @@innodb_lock_wait_timeout")
    assert cursor.fetchone() == ("READ-COMMITTED", 1)


def test_statement_binary_log_forbids_read_committed_and_all_is_settled(tmp_path: Any) -> None:
    options = ("--binlog-format=STATEMENT",)
    with MariaDB(tmp_path / "m", binary_log=True, options=options) as server:
        database = Database(server)
        for kind in ("last-resource", "xa"):
            resolving = database.resolving(kind)
            database.execute("INSERT INTO txmq_marker VALUES ('c', 'committed', 0, 0, 0, NULL)")
            resolving.delete_committed(["c"])
            assert database.execute("SELECT txid FROM txmq_marker WHERE txid = 'c'") == []


def test_a_table_of_a_named_schema_is_cleaned_as_well(database: Database) -> None:
    other = Database(database.server)
    resource = LastResource("shop", connect=other.connect, table=f"{database.name}.own_marker")
    resource.install()
    rows = "('c', 'committed', 0, 0, 0, NULL), ('r', 'rolled-back', 0, 0, 0, NULL)"
    database.execute(f"INSERT INTO own_marker VALUES {rows}")
    with closing(resource.open_for_resolver(CLUSTER)) as resolving:
        resolving.delete_committed(["c"])
        resolving.delete_expired()
    assert database.execute("SELECT txid FROM own_marker") == []


def test_databases_clock_is_told_in_utc_whatever_sessions_zone(database: Database) -> None:
    table = MarkerTable("txmq_marker", MYSQL, "%s")
    connection = database.connect()
    now_ms = table.now_ms(connection)
    connection.cursor().execute("SET time_zone = '+11:00'")
    assert abs(table.now_ms(connection) - now_ms) < 5_000
    assert abs(now_ms - 1000 * database.execute("SELECT UNIX_TIMESTAMP()")[0][0]) < 5_000


def test_session_is_not_ended_for_marker_older_than_server(database: Database) -> None:
    """After a crash the server rolls it back in the background, and its number is another session's."""
    resolving = database.resolving("last-resource")
    older = _owned_marker(database, "t1", f"{server_began_ms(resolving.connection) - 1}")
    assert resolving.table.end_holder(resolving.connection, "t1") is None
    older.cursor().execute("SELECT 1")
    resolving.close()


def test_session_of_an_uncommitted_marker_is_ended(database: Database) -> None:
    """A frozen owner's, which wrote it as soon as the server had begun for certain."""
    resolving = database.resolving("last-resource")
    holder = _owned_marker(database, "t1", f"{server_began_ms(resolving.connection)}")
    assert resolving.table.end_holder(resolving.connection, "t1") == holder.thread_id()
    with pytest.raises(MySQLdb.Error):
        holder.cursor().execute("SELECT 1")
    resolving.close()
