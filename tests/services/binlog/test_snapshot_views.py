"""What a snapshot reads of a real MariaDB: forms of values, and the order of keys."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from tests.services.binlog.reading import Reading
from tools.crash.binlog.columns import COLUMNS, SESSION
from txmq.binlog.config import SnapshotSettings
from txmq.binlog.consistent_read import View
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import SourceAwayError, SourceError
from txmq.binlog.publish.unread import TableProgress
from txmq.binlog.snapshot import Snapshot
from txmq.runtime.clocks import OSClock
from txmq.testing.processes.database_programs import Ability

pytestmark = pytest.mark.needs(Ability.SNAPSHOTS)


def view(reading: Reading, *tables: str) -> View:
    """A view of some tables of the test's database."""
    server = reading.source._server
    server.check()
    return View(reading.source._options, [TableName(reading.database, table) for table in tables], server)


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


@pytest.mark.parametrize("reading", [{"answer_s_max": 1}], indirect=True)
def test_frozen_source_counts_as_away(reading: Reading) -> None:
    """Found: a question to it was waited for without end."""
    with closing(view(reading)) as taken:
        reading.server.pause()
        try:
            with pytest.raises(SourceAwayError, match="Lost connection"):
                taken.ask("SELECT 1")
        finally:
            reading.server.resume()


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


@pytest.mark.needs(Ability.VECTORS)
def test_vectors_have_form_and_tag_of_the_stream(reading: Reading) -> None:
    reading.run("CREATE TABLE t (id INT PRIMARY KEY, e VECTOR(2))", "INSERT INTO t VALUES (1, X'0000803F000020C0')")
    (change,) = reading.changes()
    with closing(view(reading, "t")) as taken:
        table = taken.table(change.schema.table)
        assert table is not None
        assert table.schema.tag == change.schema.tag
        assert taken.chunk(table, 10, ()) == (change.after,)


def test_an_engine_without_transactions_is_refused_by_name(reading: Reading) -> None:
    reading.run("CREATE TABLE t (id INT PRIMARY KEY) ENGINE=MyISAM")
    with pytest.raises(SourceError, match=r"d\d+\.t cannot be read consistently, its engine is MyISAM"):
        view(reading, "t")
