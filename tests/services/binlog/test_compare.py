"""The comparison finds every row that differs, and none that does not, whatever the key and the columns are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tools.simulated.clock import SimClock
from txmq.binlog.apply.compare import Comparer, RowDifference, TableComparison
from txmq.binlog.config import ApplySettings, BinlogSettings, SourceSettings
from txmq.binlog.decoded_changes import TableName
from txmq.testing.processes import fork_server
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.fork_server import ForkServer
from txmq.testing.processes.mariadb import MariaDB

WAIT_S = 60.0
SIDES = ("shop", "copy_shop")


@pytest.fixture(autouse=True)
def databases(server: MariaDB) -> None:
    """Both are empty."""
    for database in SIDES:
        server.make_database_anew(database)


def create(server: MariaDB, columns: str, rows: Iterable[str]) -> None:
    """Table ``t`` on both sides, with the same rows."""
    for database in SIDES:
        server.execute(f"CREATE TABLE {database}.t ({columns})")
    server.execute(f"INSERT INTO shop.t VALUES {', '.join(rows)}", sql_mode="ALLOW_INVALID_DATES")
    mode = "ALLOW_INVALID_DATES,NO_AUTO_VALUE_ON_ZERO"
    server.execute("INSERT INTO copy_shop.t SELECT * FROM shop.t", sql_mode=mode)


def compared(server: MariaDB, table: str = "t", clock: Any = None) -> TableComparison:
    """What the comparison says, with chunks of two rows."""
    place: dict[str, Any] = {"port": server.port, "user": "root"}
    settings = BinlogSettings(
        name="s", source=SourceSettings(**place), apply=ApplySettings(**place, database="copy_{database}")
    )
    clock = clock or SimClock()
    with Comparer(settings, lambda name: name.database == "shop", clock, settle_s=1.0, chunk_rows=2) as comparer:
        assert TableName("shop", table) in dict(comparer.tables())
        return comparer.compare(TableName("shop", table))


KEYS = {
    "BIGINT UNSIGNED": ("18446744073709551615", "1", "7", "8", "9"),
    "CHAR(4)": ("''", "'b'", "'B2'", "'ä'", "'é'"),
    "VARCHAR(9) CHARACTER SET latin1": ("'x'", "'ü'", "'%s'", "'z'", "'w'"),
    "VARBINARY(9)": ("''", "'a'", "X'FF00'", "X'00'", "'%'"),
    "DATE": ("0", "'2026-02-31'", "'2026-01-01'", "'2025-01-01'", "'2024-01-01'"),
    "DATETIME(6)": ("0", "'2026-01-01 00:00:00.000001'", "'2026-01-01'", "'2025-01-01'", "'2024-01-01'"),
    "TIMESTAMP(3)": ("0", "'2026-01-01 00:00:00.001'", "'2026-01-01'", "'2025-01-01'", "'2024-01-01'"),
    "TIME": ("'-01:00:00'", "0", "1", "2", "'838:59:59'"),
    "YEAR": ("0", "1901", "2155", "2000", "1999"),
    "BIT(40)": ("0", "1", "2", "3", "1099511627775"),
    "ENUM('z','y','x','w','v')": ("1", "2", "3", "4", "5"),
    "SET('z','y','x')": ("0", "1", "2", "4", "5"),
    "DECIMAL(30,10)": ("0", "-1.5", "1.0000000001", "2", "3"),
    "FLOAT": ("1.1", "-2.25", "3e30", "4", "5"),
    "DOUBLE": ("1e-300", "1.1", "-0.5", "3e300", "4"),
    "INET6": ("'::1'", "'::2'", "'ffff::'", "'1::'", "'2::'"),
    "UUID": tuple(f"'{number}23e4567-e89b-12d3-a456-42665544000{9 - number}'" for number in range(5)),
}


_NETWORK = pytest.mark.needs(Ability.NETWORK_TYPES)


@pytest.mark.parametrize("key", [pytest.param(key, marks=_NETWORK if key in ("UUID", "INET6") else ()) for key in KEYS])
def test_rows_are_found_by_every_kind_of_key(server: MariaDB, key: str) -> None:
    create(server, f"k {key} PRIMARY KEY, a INT NOT NULL, v INT", (f"({k}, {a}, 0)" for a, k in enumerate(KEYS[key])))
    found = compared(server)
    assert (found.rows, found.differing, found.problem) == (5, 0, None)
    server.execute("UPDATE copy_shop.t SET v = NULL WHERE a = 1")
    server.execute("DELETE FROM copy_shop.t WHERE a = 2")
    server.execute("DELETE FROM shop.t WHERE a = 4")
    assert sorted((one.kind, one.columns) for one in compared(server).differences) == [
        ("different", ("v",)), ("missing", ()), ("surplus", ()),
    ]  # fmt: skip


def test_a_key_of_two_columns_is_cut_into_chunks(server: MariaDB) -> None:
    rows = [f"({a}, '{b}', 0)" for a in range(3) for b in "xyz"]
    create(server, "a INT, b CHAR(1), v INT, PRIMARY KEY (b, a)", rows)
    assert (compared(server).rows, compared(server).differing) == (9, 0)
    server.execute("DELETE FROM copy_shop.t WHERE a = 1 AND b = 'y'")
    assert compared(server).differences == [RowDifference(("y", "1"), "missing")]


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("FLOAT", "1.1", "1.1000001"), ("DOUBLE", "0.1", "0.1e0 + 1e-17 * 2"), ("DECIMAL(60,30)", "1e-30", "2e-30"),
        ("VARCHAR(9)", "'a'", "'A'"), ("VARCHAR(9)", "'a'", "'a '"), ("VARCHAR(9)", "''", "NULL"),
        ("ENUM('a','')", "''", "0"), ("BINARY(2)", "X'00FF'", "X'00FE'"), ("BIT(64)", "X'FFFFFFFFFFFFFFFF'", "1"),
        ("DATETIME(6)", "'2026-01-01'", "'2026-01-01 00:00:00.000001'"), ("TEXT", "'😀'", "'?'"),
        ("GEOMETRY", "ST_GeomFromText('POINT(1 2)')", "ST_GeomFromText('POINT(1 2)', 4326)"),
    ],
)  # fmt: skip
def test_values_that_look_alike_are_told_apart(server: MariaDB, kind: str, one: str, other: str) -> None:
    create(server, f"id INT PRIMARY KEY, v {kind}", [f"(1, {one})", f"(2, {one})", f"(3, {one})"])
    assert compared(server).is_equal
    server.execute(f"UPDATE copy_shop.t SET v = {other} WHERE id = 2", sql_mode="")
    assert compared(server).differences == [RowDifference(("2",), "different", ("v",))]


def test_rows_without_a_key_are_counted(server: MariaDB) -> None:
    create(server, "a INT, b INT", ["(1, 1)", "(1, 1)", "(2, NULL)"])
    assert (compared(server).rows, compared(server).differing) == (3, 0)
    server.execute("DELETE FROM copy_shop.t WHERE a = 1 LIMIT 1")
    server.execute("UPDATE copy_shop.t SET b = 2 WHERE a = 2")
    assert sorted(one.kind for one in compared(server).differences) == ["missing", "missing", "surplus"]


def test_tables_that_cannot_be_compared_are_said_to_be_so(server: MariaDB) -> None:
    server.execute("CREATE TABLE shop.t (id INT PRIMARY KEY)")
    assert "the target has no such table" in (compared(server).problem or "")
    server.execute("CREATE TABLE copy_shop.t (id INT PRIMARY KEY, v INT)")
    assert compared(server).problem == "columns differ: id at the source, id, v in the target"
    server.execute("DROP TABLE IF EXISTS copy_shop.t")
    server.execute("CREATE TABLE copy_shop.t (id INT)")
    found = compared(server)
    assert found.problem == "keys differ: id at the source, none there"
    assert not found.is_equal


class CatchingUp(SimClock):
    """Time in which changes arrive."""

    def __init__(self, arrive: Callable[[], object]) -> None:
        super().__init__()
        self._arrive = arrive

    def sleep(self, seconds: float) -> None:
        """Let a change arrive."""
        super().sleep(seconds)
        self._arrive()


def test_changes_on_their_way_are_waited_for(server: MariaDB) -> None:
    create(server, "id INT PRIMARY KEY, v INT", ["(1, 1)", "(2, 2)"])
    server.execute("UPDATE shop.t SET v = v + 10")
    clock = CatchingUp(lambda: server.execute("UPDATE copy_shop.t SET v = 11 WHERE id = 1"))
    assert compared(server, clock=clock).differences == [RowDifference(("2",), "different", ("v",))]
    assert clock.monotonic() >= 1.0


def test_command_ends_with_a_status_that_says_it(server: MariaDB, tmp_path: Path) -> None:
    create(server, "id INT PRIMARY KEY, v INT", ["(1, 1)", "(2, 2)"])
    config = tmp_path / "binlog.toml"
    place = f'port = {server.port}\nuser = "root"\n'
    config.write_text(
        f'name = "s"\n[source]\n{place}tables = ["shop.*"]\n[apply]\n{place}database = "copy_{{database}}"\n'
    )
    command = [sys.executable, "-m", "txmq.cli.main", "binlog", "compare", "--config", str(config), "--settle", "0"]
    with ForkServer(("txmq.cli.main", "txmq.binlog.apply.compare")):
        assert fork_server.run(command, timeout=WAIT_S).returncode == 0
        server.execute("DELETE FROM copy_shop.t WHERE id = 2")
        done = fork_server.run([*command, "--json"], timeout=WAIT_S)
        assert done.returncode == 1, done.stderr
        found = json.loads(done.stdout)
        shown = fork_server.run(command, timeout=WAIT_S).stdout.decode()
        unknown = fork_server.run([*command, "--table", "shop.none"], timeout=WAIT_S)
    assert found["is_equal"] is False
    assert found["tables"][0]["differences"] == [{"key": ["2"], "kind": "missing", "columns": []}]
    assert "missing" in shown
    assert (unknown.returncode, b"shop.none" in unknown.stderr) == (2, True)
