"""Tables of MariaDB and SQLite as the audit reads them: every type, in ranges, and what is refused. Without Spark."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from tests.spark.audit_proof import url_of
from txmq.addresses import without_password
from txmq.errors import ConfigError
from txmq.spark.audit import rows as audit_tables
from txmq.spark.audit.rows import Reading, Rows, Table, TableReader, columns_of, open_rows, ranges
from txmq.spark.audit.spec import AuditSpec, RowTime, parse_terms
from txmq.testing.processes.mariadb import MariaDB


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    with MariaDB(tmp_path_factory.mktemp("mariadb")) as server:
        yield server


def table_of(server: MariaDB, name: str) -> Table:
    found = open_rows(None, url_of(server), name).table
    assert found is not None
    return found


def read(table: Table, *names: str, where: str = "", at_least: int = 1) -> list[pa.RecordBatch]:
    there = {column.name: column for column in columns_of(table)}
    reading = Reading(table, tuple(there[name] for name in names), where, at_least)
    assert Reading.from_json(reading.to_json()) == reading
    reader = TableReader(reading)
    return [batch for piece in reader.partitions() for batch in reader.read(piece)]


def test_every_type_of_mariadb_is_read_as_what_it_is(mariadb: MariaDB) -> None:
    mariadb.execute(
        "CREATE TABLE kinds (id INT UNSIGNED PRIMARY KEY, small TINYINT, big BIGINT UNSIGNED, price DECIMAL(12,3), "
        "text VARCHAR(20), raw VARBINARY(9), moment DATETIME(6), stamp TIMESTAMP(3) NULL, day DATE, real_ DOUBLE, "
        "word ENUM('a','b'), doc JSON, zero DATETIME)"
    )
    mariadb.execute("SET GLOBAL sql_mode = ''")
    mariadb.execute("SET GLOBAL time_zone = '+03:00'")
    with closing(mariadb.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
        cursor.execute(
            "INSERT INTO kinds VALUES (1, -5, 18446744073709551615, 12.345, 'ä€', 0x00ff, "
            "'2026-01-01 12:00:00.000001', '2026-01-01 12:00:00.5', '2026-02-03', 1.5, 'b', "
            "'{\"a\": 1}', '0000-00-00'), "
            "(2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
        )
    table = table_of(mariadb, "kinds")
    names = [column.name for column in columns_of(table)]
    (batch,) = read(table, *names)
    types = {column.name: audit_tables.arrow_type(column.spark) for column in columns_of(table)}
    assert {field.name: field.type for field in batch.schema} == types
    first, second = batch.to_pylist()
    assert first == {
        "id": 1, "small": -5, "big": Decimal(18446744073709551615), "price": Decimal("12.345"), "text": "ä€",
        "raw": b"\x00\xff", "moment": datetime(2026, 1, 1, 12, 0, 0, 1, tzinfo=UTC),
        "stamp": datetime(2026, 1, 1, 9, 0, 0, 500_000, tzinfo=UTC), "day": date(2026, 2, 3), "real_": 1.5, "word": "b",
        "doc": '{"a": 1}', "zero": None,
    }  # fmt: skip
    assert [value for name, value in second.items() if name != "id"] == [None] * (len(names) - 1)


def test_a_table_is_read_in_ranges_that_miss_nothing(mariadb: MariaDB) -> None:
    mariadb.execute("CREATE TABLE wide (n BIGINT PRIMARY KEY, even BOOLEAN)")
    mariadb.execute("INSERT INTO wide SELECT 7 * CAST(seq AS SIGNED) - 100, seq % 2 = 0 FROM seq_1_to_25000")
    table = table_of(mariadb, "wide")
    batches = read(table, "n", at_least=3)
    assert len(batches) == 3
    assert [n for batch in batches for n in batch["n"].to_pylist()] == [7 * seq - 100 for seq in range(1, 25_001)]
    halves = read(table, "n", where="`even` = 1", at_least=3)
    assert sum(batch.num_rows for batch in halves) == 12_500
    assert read(table, "n", where="`n` > 10000000") == []
    mariadb.execute("INSERT INTO wide VALUES (4000000000000, 0)")  # keys may be sparse: no range for each of their gaps
    pieces = TableReader(Reading(table, tuple(columns_of(table)), "", 300)).partitions()
    assert len(pieces) <= 5, "ranges follow the rows, however many cores there are"


def test_a_row_is_there_only_under_its_very_name(mariadb: MariaDB) -> None:
    mariadb.execute("CREATE TABLE names (name VARCHAR(20) CHARACTER SET latin1 PRIMARY KEY)")
    mariadb.execute("INSERT INTO names VALUES ('Ada'), ('Zoë')")
    table = table_of(mariadb, "names")
    (column,) = columns_of(table)
    asked = ("Ada", "Zoë", "ada", "ADA", "Zoe", "Ada ", "日")
    assert [name for name in asked if Rows._is_there(table, column, name)] == ["Ada", "Zoë"]


@pytest.mark.parametrize(("low", "high", "at_least"), [(0, 0, 4), (-5, 5, 4), (1, 10**7, 2), (0, 2**62, 2)])
def test_ranges_cover_everything_once(low: int, high: int, at_least: int) -> None:
    found = ranges(low, high, at_least, rows=10**7)
    assert found[0][0] == low
    assert found[-1][1] == high + 1
    assert all(before[1] == after[0] and before[0] < before[1] for before, after in itertools.pairwise(found))
    assert min(at_least, high - low + 1) <= len(found) <= audit_tables.RANGES_MAX


@pytest.mark.parametrize(("rows", "pieces"), [(0, 200), (2_000, 1), (25_000, 3), (10**6, 101), (10**8, 400)])
def test_number_of_ranges_follows_rows_up_to_cores(rows: int, pieces: int) -> None:
    assert len(ranges(1, 10**9, 200, rows)) == pieces


def test_an_absolute_path_of_sqlite_has_one_slash_or_four(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    for url in (f"sqlite:{path}", f"sqlite:///{path}"):
        assert open_rows(None, url, "t").primary_key() == ["id"]


def test_sqlite_is_read_by_affinity_and_never_written(tmp_path: Path) -> None:
    path = tmp_path / "with space?.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, size REAL, raw BLOB, any_)")
        connection.execute("INSERT INTO t VALUES (1, 'a', 1.5, x'00ff', 7), (2, 5, NULL, NULL, x'41')")
    rows = open_rows(None, f"sqlite:///{path.as_posix().replace(' ', '%20').replace('?', '%3F')}", "t")
    assert rows.primary_key() == ["id"]
    assert rows.table is not None
    batches = read(rows.table, "id", "name", "size", "raw", "any_", at_least=2)
    assert [line for batch in batches for line in batch.to_pylist()] == [
        {"id": 1, "name": "a", "size": 1.5, "raw": b"\x00\xff", "any_": "7"},
        {"id": 2, "name": "5", "size": None, "raw": None, "any_": "A"},
    ]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE odd (id INTEGER, n INTEGER)")
        connection.execute("INSERT INTO odd VALUES (1, 'seven')")
    with pytest.raises(ConfigError, match=r"column n \(bigint\)"):
        read(Table("sqlite", {"database": str(path)}, "odd"), "n")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        rows.table.query("DELETE FROM t")


def test_what_cannot_be_audited_is_refused_before_anything_is_read(tmp_path: Path, mariadb: MariaDB) -> None:
    mariadb.execute("CREATE TABLE plain (id INT PRIMARY KEY, at BIGINT)")
    plain = open_rows(None, url_of(mariadb), "plain")
    with pytest.raises(ConfigError, match="no column 'nr'; it has id, at"):
        plain.require(AuditSpec("t", parse_terms(["nr = key"])))
    with pytest.raises(ConfigError, match="at holds numbers: say of what, such as at:ms"):
        plain.require(AuditSpec("t", parse_terms(["id = key"]), row_time=RowTime("at")))
    with pytest.raises(ConfigError, match="the database has no table 'nothing'"):
        open_rows(None, url_of(mariadb), "nothing")
    with pytest.raises(ConfigError, match="cannot open the SQLite file"):
        open_rows(None, f"sqlite:///{tmp_path}/none.db", "t")
    for url in ("postgres://x/y", "orders.db", "sqlite://orders.db", "mysql://root@localhost"):
        with pytest.raises(ConfigError, match=r"expected sqlite:///FILE"):
            open_rows(None, url, "t")
    with pytest.raises(ConfigError, match="no name of a column"):
        open_rows(None, url_of(mariadb), "t; DROP TABLE t")
    assert "secret" not in without_password("mysql://app:secret@db/shop")
