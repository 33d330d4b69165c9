"""Every type of column: what the reader of the binlog gives is what a SELECT gives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.binlog.reading import Reading
from txmq.binlog.changes import ColumnKind
from txmq.binlog.errors import ColumnError

NUMBER, EXACT, TEXT, MOMENT, STAMP, BYTES = "{0} + 0", "CAST({0} AS DOUBLE)", "CAST({0} AS CHAR)", "m", "s", "HEX({0})"
INTEGERS = ("0", "1", "-1")
DATETIMES = (
    "'2026-11-23 09:08:07.123456'", "'0000-00-00 00:00:00'", "'2026-02-31 23:59:59.999999'", "'2026-00-10 00:00:00'",
    "'0001-01-01 00:00:00'", "'9999-12-31 23:59:59.999999'",
)  # fmt: skip
TIMES = ("'10:11:12.123456'", "'-00:00:00.5'", "'-838:59:59.999999'", "'838:59:59.999999'", "'-01:02:03.25'", "0")
STAMPS = (
    "'2026-11-23 09:08:07.123456'", "'0000-00-00 00:00:00'", "'1970-01-01 00:00:01'", "'2038-01-19 03:14:07.999999'",
)  # fmt: skip
STRINGS = ("'a'", "''", "'  two '", "'grün'", "repeat('x', 200)")
COLUMNS: list[tuple[str, str, tuple[str, ...]]] = [
    ("tinyint", NUMBER, (*INTEGERS, "-128", "127")),
    ("tinyint unsigned", NUMBER, ("0", "255")),
    ("boolean", NUMBER, ("true", "false")),
    ("smallint", NUMBER, (*INTEGERS, "-32768", "32767")),
    ("smallint unsigned", NUMBER, ("65535",)),
    ("mediumint", NUMBER, (*INTEGERS, "-8388608", "8388607")),
    ("mediumint unsigned", NUMBER, ("16777215",)),
    ("int", NUMBER, (*INTEGERS, "-2147483648", "2147483647")),
    ("int unsigned zerofill", NUMBER, ("7", "4294967295")),
    ("bigint", NUMBER, (*INTEGERS, "-9223372036854775808", "9223372036854775807")),
    ("bigint unsigned", NUMBER, ("0", "18446744073709551615", "9223372036854775808")),
    ("bit(1)", NUMBER, ("b'1'", "b'0'")),
    ("bit(11)", NUMBER, ("b'11100000001'", "1")),
    ("bit(64)", NUMBER, ("18446744073709551615", "0")),
    ("year", NUMBER, ("1901", "2155", "0")),
    ("float", EXACT, ("0.1", "-3.4e38", "1e-40", "0")),
    ("float unsigned", EXACT, ("0.1",)),
    ("double", EXACT, ("0.1", "-1.7976931348623157e308", "5e-324", "-0.0")),
    ("double(12,3)", EXACT, ("-123456789.125",)),
    ("decimal(65,30)", TEXT, ("12345678901234567890123456789012345.123456789012345678901234567891", "-0.1", "0")),
    ("decimal(5,5)", TEXT, ("0.00001", "-0.99999", "0")),
    ("decimal(10,0)", TEXT, ("1234567890", "-1234567890", "-1", "0")),
    ("decimal(10,2) unsigned", TEXT, ("99999999.99", "0.01")),
    ("decimal(19,9)", TEXT, ("1234567890.123456789", "-1234567890.000000001", "-9.9")),
    ("decimal(18,3)", TEXT, ("-123456789012345.678", "100000000000000.001")),
    ("char(250)", TEXT, STRINGS),
    ("char(3) character set latin1", TEXT, ("'ü€'", "''")),
    ("varchar(250)", TEXT, STRINGS),
    ("varchar(250) character set latin1", TEXT, STRINGS),
    ("varchar(2500) character set utf16", TEXT, (*STRINGS, "'\U0001f600'")),
    ("varchar(9) character set utf16le", TEXT, ("'añ\U0001f600'",)),
    ("varchar(9) character set utf32", TEXT, ("'añ\U0001f600'",)),
    ("varchar(9) character set ucs2", TEXT, ("'añ€'",)),
    ("varchar(9) character set utf8mb3", TEXT, ("'añ€'",)),
    ("varchar(9) character set cp1251", TEXT, ("'Привет'",)),
    ("varchar(9) character set koi8r", TEXT, ("'Привет'",)),
    ("varchar(9) character set latin2", TEXT, ("'ąęś'",)),
    ("varchar(9) character set greek", TEXT, ("'αβγ'",)),
    ("varchar(9) character set gbk", TEXT, ("'汉字'",)),
    ("varchar(9) character set big5", TEXT, ("'漢字'",)),
    ("varchar(9) character set sjis", TEXT, ("'日本'",)),
    ("varchar(9) character set ujis", TEXT, ("'日本'",)),
    ("varchar(9) character set euckr", TEXT, ("'한국'",)),
    ("varchar(9) character set utf16 collate uca1400_ai_ci", TEXT, ("'añ\U0001f600'",)),
    ("varchar(9) collate utf8mb4_bin", TEXT, ("'añ\U0001f600'",)),
    ("varchar(100) compressed", TEXT, ("'short'", "repeat('z', 100)", "''")),
    ("varbinary(300) compressed", BYTES, ("repeat(x'00ff', 150)", "''")),
    ("text compressed", TEXT, ("'short'", "repeat('zü', 3000)", "''")),
    ("blob compressed", BYTES, ("repeat(x'00', 3000)",)),
    ("tinytext", TEXT, ("'añ\U0001f600'", "''")),
    ("text character set latin1", TEXT, ("'ü€'", "''")),
    ("mediumtext", TEXT, ("repeat('ab', 5000)",)),
    ("longtext", TEXT, ("repeat('ab', 40000)",)),
    ("json", TEXT, ("""'{"b": [1, 2.50, null], "a": "ü"}'""", "'[]'", "'18446744073709551615'")),
    ("binary(5)", BYTES, ("'a'", "''", "x'0000000000'", "x'6100006200'")),
    ("binary(255)", BYTES, ("x'ff00'",)),
    ("varbinary(5)", BYTES, ("'a'", "''", "x'610000'")),
    ("varbinary(500)", BYTES, ("repeat(x'00', 400)",)),
    ("tinyblob", BYTES, ("x'00ff00'", "''")),
    ("blob", BYTES, ("x'00ff00'",)),
    ("longblob", BYTES, ("repeat(x'ff', 70000)",)),
    ("geometry", BYTES, ("ST_GeomFromText('POINT(1 2)', 4326)",)),
    ("point", BYTES, ("POINT(1, 2)",)),
    ("uuid", TEXT, ("'123e4567-e89b-12d3-a456-426655440000'", "'f47ac10b-58cc-4372-a567-0e02b2c3d479'", "uuid()")),
    (
        "inet6",
        TEXT,
        (
            "'::1'",
            "'2001:db8::ff00:42:8329'",
            "'::ffff:192.0.2.1'",
            "'::'",
            "'fe80::1:0:0:0'",
            "'::192.0.2.1'",
            "'::1:2'",
            "'::1:0'",
            "'1:0:2:3:4:5:6:7'",
            "'0:1:2:0:4:5:6:7'",
            "'1:2:3:4:5:6:7:0'",
        ),
    ),
    ("inet4", TEXT, ("'192.0.2.0'", "'0.0.0.0'")),
    ("enum('a','ü','c''d')", TEXT, ("'ü'", "''", "3")),
    ("enum('a','ü') character set latin1", TEXT, ("'ü'",)),
    ("set('x','y','ü')", TEXT, ("'x,ü'", "''", "'y'")),
    ("set('ü','z') character set latin1", TEXT, ("'z,ü'",)),
    ("date", TEXT, ("'2026-11-23'", "'0000-00-00'", "'2026-02-31'", "'2026-11-00'", "'9999-12-31'", "'0001-01-01'")),
    ("time", TEXT, TIMES),
    *[(f"time({digits})", TEXT, TIMES) for digits in range(1, 7)],
    ("datetime", MOMENT, DATETIMES),
    *[(f"datetime({digits})", MOMENT, DATETIMES) for digits in range(1, 7)],
    ("timestamp null", STAMP, STAMPS),
    *[(f"timestamp({digits}) null", STAMP, STAMPS) for digits in range(1, 7)],
]
# Invalid dates are kept, not refused; times are UTC; a value that does not fit is cut.
SESSION = ("SET time_zone = '+00:00'", "SET sql_mode = 'ALLOW_INVALID_DATES'")


def _selected(place: int, form: str) -> str:
    name = f"c{place}"
    if form in (MOMENT, STAMP):
        text = f"REPLACE(CAST({name} AS CHAR), ' ', 'T')"
        return f"CONCAT({text}, 'Z')" if form == STAMP else text
    return form.format(name)


def test_every_type_arrives_as_it_is_selected(reading: Reading) -> None:
    columns = ", ".join(f"c{place} {declared}" for place, (declared, _, _) in enumerate(COLUMNS))
    length = max(len(values) for _, _, values in COLUMNS)
    rows = [
        ", ".join(values[row] if row < len(values) else "NULL" for _, _, values in COLUMNS) for row in range(length)
    ]
    inserts = [f"INSERT INTO t VALUES ({row}, {values})" for row, values in enumerate(rows)]
    wanted = ", ".join(_selected(place, form) for place, (_, form, _) in enumerate(COLUMNS))
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
        for (declared, form, _), value, wants in zip(COLUMNS, change.after[1:], expected[1:], strict=True):
            told = value.hex().upper() if isinstance(value, bytes) else value
            if told != wants or (form == NUMBER and type(told) not in (int, type(None))):
                wrong.append((declared, told, wants))
    assert wrong == []
    kinds = {change.schema.columns[1 + place].kind for change in changes for place in range(len(COLUMNS))}
    assert kinds == set(ColumnKind) - {ColumnKind.JSON}  # MariaDB's JSON is text


def test_types_are_told_as_they_were_declared(reading: Reading) -> None:
    reading.run(
        "CREATE TABLE t (a BIGINT UNSIGNED PRIMARY KEY, b DECIMAL(7,2), c VARCHAR(20), d CHAR(5), e VARBINARY(9), "
        "f ENUM('x','y'), g SET('p'), h DATETIME(3), i TIMESTAMP NULL, j BIT(9), k MEDIUMTEXT, l UUID, m BINARY(4))",
        "INSERT INTO t (a) VALUES (1)",
    )
    (change,) = reading.changes()
    assert [column.type for column in change.schema.columns] == [
        "bigint unsigned", "decimal(7,2)", "varchar(20)", "char(5)", "varbinary(9)", "enum('x','y')", "set('p')",
        "datetime(3)", "timestamp", "bit(9)", "mediumtext", "uuid", "binary(4)",
    ]  # fmt: skip


def test_generated_and_invisible_columns_arrive(reading: Reading) -> None:
    reading.run(
        "CREATE TABLE t (id INT PRIMARY KEY, v INT AS (id * 2) VIRTUAL, s INT AS (id * 3) STORED, "
        "i INT INVISIBLE DEFAULT 9)",
        "INSERT INTO t (id) VALUES (1)",
    )
    (change,) = reading.changes()
    assert change.after == (1, 2, 3, 9)
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


def test_temporal_types_of_old_are_refused_by_name(reading: Reading) -> None:
    reading.server.execute("SET GLOBAL mysql56_temporal_format = OFF")
    try:
        reading.run("CREATE TABLE t (id INT PRIMARY KEY, moment DATETIME(3))", "INSERT INTO t VALUES (1, now(3))")
    finally:
        reading.server.execute("SET GLOBAL mysql56_temporal_format = ON")
    with pytest.raises(ColumnError, match=r"column moment: .*mysql56_temporal_format"):
        reading.parts()
