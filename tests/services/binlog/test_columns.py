"""Every type of column: what the reader of the binlog gives is what a SELECT gives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.binlog.reading import Reading
from tools.crash.binlog.columns import COLUMNS, MOMENT, NUMBER, SESSION, STAMP, can_declare
from txmq.binlog.decoded_changes import ABSENT, ColumnKind
from txmq.binlog.errors import ColumnError
from txmq.testing.processes.database_programs import Ability


def _selected(place: int, form: str) -> str:
    name = f"c{place}"
    if form in (MOMENT, STAMP):
        text = f"REPLACE(CAST({name} AS CHAR), ' ', 'T')"
        return f"CONCAT({text}, 'Z')" if form == STAMP else text
    return form.format(name)


def test_every_type_arrives_as_it_is_selected(reading: Reading) -> None:
    kinds = [column for column in COLUMNS if can_declare(column[0], reading.server.program.abilities)]
    columns = ", ".join(f"c{place} {declared}" for place, (declared, _, _) in enumerate(kinds))
    length = max(len(values) for _, _, values in kinds)
    rows = [", ".join(values[row] if row < len(values) else "NULL" for _, _, values in kinds) for row in range(length)]
    inserts = [f"INSERT INTO t VALUES ({row}, {values})" for row, values in enumerate(rows)]
    wanted = ", ".join(_selected(place, form) for place, (_, form, _) in enumerate(kinds))
    selected = reading.run(
        f"CREATE TABLE t (id INT PRIMARY KEY, {columns}) ROW_FORMAT=DYNAMIC",
        *SESSION, *inserts,
        f"SELECT id, {wanted} FROM t ORDER BY id",
    )  # fmt: skip
    changes = reading.changes()
    assert len(changes) == len(selected) == length
    wrong = []
    for change, expected in zip(changes, selected, strict=True):
        assert change.after is not None
        for (declared, form, _), value, wants in zip(kinds, change.after[1:], expected[1:], strict=True):
            told = value.hex().upper() if isinstance(value, bytes) else value
            if told != wants or (form == NUMBER and type(told) not in (int, type(None))):
                wrong.append((declared, told, wants))
    assert wrong == []
    told_kinds = {change.schema.columns[1 + place].kind for change in changes for place in range(len(kinds))}
    is_binary = Ability.BINARY_JSON in reading.server.program.abilities
    assert told_kinds == set(ColumnKind) - (set() if is_binary else {ColumnKind.JSON})  # MariaDB's is text


def test_types_are_told_as_they_were_declared(reading: Reading) -> None:
    has_uuid = Ability.NETWORK_TYPES in reading.server.program.abilities
    reading.run(
        "CREATE TABLE t (a BIGINT UNSIGNED PRIMARY KEY, b DECIMAL(7,2), c VARCHAR(20), d CHAR(5), e VARBINARY(9), "
        "f ENUM('x','y'), g SET('p'), h DATETIME(3), i TIMESTAMP NULL, j BIT(9), k MEDIUMTEXT, "
        f"l {'UUID' if has_uuid else 'CHAR(36)'}, m BINARY(4))",
        "INSERT INTO t (a) VALUES (1)",
    )
    (change,) = reading.changes()
    assert [column.type for column in change.schema.columns] == [
        "bigint unsigned", "decimal(7,2)", "varchar(20)", "char(5)", "varbinary(9)", "enum('x','y')", "set('p')",
        "datetime(3)", "timestamp", "bit(9)", "mediumtext", "uuid" if has_uuid else "char(36)", "binary(4)",
    ]  # fmt: skip


def test_generated_and_invisible_columns_arrive(reading: Reading) -> None:
    reading.run(
        "CREATE TABLE t (id INT PRIMARY KEY, v INT AS (id * 2) VIRTUAL, s INT AS (id * 3) STORED, "
        "i INT INVISIBLE DEFAULT 9)",
        "INSERT INTO t (id) VALUES (1)",
    )
    (change,) = reading.changes()
    assert change.after == (1, 2, 3, 9)
    reading.run("UPDATE t SET i = 8", "DELETE FROM t")
    assert reading.told() in [
        [("u", ((1, *computed, 9), (1, *computed, 8))), ("d", (1, *computed, 8))]
        for computed in ((2, 3), (ABSENT, ABSENT))  # as of MariaDB 11.8
    ]
    assert [column.is_generated for column in change.schema.columns] == [False, True, True, False]


def test_key_is_the_primary_key_or_a_unique_one(reading: Reading) -> None:
    reading.run(
        "CREATE TABLE a (x INT, y INT, z INT, PRIMARY KEY (z, x))",
        "CREATE TABLE b (x INT NULL UNIQUE, y VARCHAR(9) NOT NULL, z INT NOT NULL, UNIQUE (y(3)), UNIQUE zy (z, y))",
        "CREATE TABLE c (x INT)",
        "CREATE TABLE d (x INT, y VARCHAR(9), PRIMARY KEY (y(3)))",
        *[f"INSERT INTO {table} VALUES ({values})" for table, values in
          (("a", "1, 2, 3"), ("b", "1, 'y', 3"), ("c", "1"), ("d", "1, 'why'"))],
    )  # fmt: skip
    keys = {change.schema.table.name: change.schema.key for change in reading.changes()}
    assert keys == {"a": (2, 0), "b": (2, 1), "c": (), "d": (1,)}


@pytest.mark.needs(Ability.NETWORK_TYPES)  # of MariaDB, as long unique keys are
def test_hash_of_a_long_unique_key_is_no_column(reading: Reading) -> None:
    reading.run(
        "CREATE TABLE t (id INT, a TEXT NOT NULL, b BLOB, UNIQUE (a), UNIQUE (b))",
        "INSERT INTO t VALUES (1, 'x', 'y')", "UPDATE t SET b = NULL", "DELETE FROM t",
        "CREATE TABLE own (DB_ROW_HASH_1 INT, a TEXT, UNIQUE (a))", "INSERT INTO own VALUES (7, 'x')",
        "RENAME TABLE t TO v, own TO w",
    )  # fmt: skip
    changes = reading.changes()
    assert [(change.before, change.after) for change in changes] == [
        (None, (1, "x", b"y")), ((1, "x", b"y"), (1, "x", None)), ((1, "x", None), None), (None, (7, "x")),
    ]  # fmt: skip
    assert [column.name for column in changes[-1].schema.columns] == ["DB_ROW_HASH_1", "a"]


@pytest.mark.needs(Ability.NETWORK_TYPES)
def test_uuid_and_inet_keep_their_form_behind_a_rename(reading: Reading) -> None:
    uuid, inet6, inet4 = "123e4567-e89b-12d3-a456-426655440000", "2001:db8::1", "192.0.2.7"
    columns = "(u UUID PRIMARY KEY, six INET6, four INET4, b BINARY(16))"
    insert = f"VALUES ('{uuid}', '{inet6}', '{inet4}', 'b')"
    reading.run(f"CREATE TABLE t {columns}", f"INSERT INTO t {insert}")
    later = (
        "ALTER TABLE t CHANGE six six INET6, RENAME COLUMN four TO fore", "RENAME TABLE t TO v", "FLUSH BINARY LOGS",
        "ALTER TABLE v RENAME TO w, RENAME COLUMN u TO uu", "CREATE TABLE t (id INT)",
    )  # fmt: skip
    reading.run(*later)
    wanted = (uuid, inet6, inet4, b"b".ljust(16, b"\0"))
    assert reading.told() == [("c", wanted)]
    reading.run("DELETE FROM w", "DROP TABLE w")  # a table that was described before it was dropped
    assert reading.told() == [("d", wanted)]


def test_nulls_stand_where_they_are(reading: Reading) -> None:
    names = [f"c{place}" for place in range(20)]
    reading.run(
        f"CREATE TABLE t (id INT PRIMARY KEY, {', '.join(f'{name} INT' for name in names)})",
        "INSERT INTO t (id) VALUES (1)",
        "UPDATE t SET c0 = 1, c8 = 8, c19 = 19",
        "UPDATE t SET c8 = NULL",
    )
    first, second, third = reading.changes()
    assert first.after == (1, *[None] * 20)
    wanted: list[Any] = [None] * 20
    wanted[0], wanted[8], wanted[19] = 1, 8, 19
    assert second.after == third.before == (1, *wanted)
    wanted[8] = None
    assert third.after == (1, *wanted)


def test_minimal_row_image_is_refused_with_the_column(reading: Reading) -> None:
    reading.run(
        "CREATE TABLE t (id INT PRIMARY KEY, a INT, b INT)",
        "INSERT INTO t VALUES (1, 2, 3)",
        "SET SESSION binlog_row_image = MINIMAL",
        "UPDATE t SET b = 4",
    )
    with pytest.raises(ColumnError, match=r"d\d+\.t: column a: .* SET GLOBAL binlog_row_image=FULL") as caught:
        reading.parts()
    assert caught.value.column == "a"


@pytest.mark.needs(Ability.OLD_TEMPORAL_TYPES)
def test_temporal_types_of_old_are_refused_by_name(reading: Reading) -> None:
    reading.server.execute("SET GLOBAL mysql56_temporal_format = OFF")
    try:
        reading.run("CREATE TABLE t (id INT PRIMARY KEY, moment DATETIME(3))", "INSERT INTO t VALUES (1, now(3))")
    finally:
        reading.server.execute("SET GLOBAL mysql56_temporal_format = ON")
    with pytest.raises(ColumnError, match=r"column moment: .*mysql56_temporal_format"):
        reading.parts()


@pytest.mark.needs(Ability.VECTORS)
def test_vectors_arrive_as_their_bytes(reading: Reading) -> None:
    reading.run(
        "CREATE TABLE t (id INT PRIMARY KEY, e VECTOR(2), v INT)", "INSERT INTO t VALUES (1, X'0000803F000020C0', 7)"
    )
    assert reading.told() == [("c", (1, bytes.fromhex("0000803F000020C0"), 7))]
