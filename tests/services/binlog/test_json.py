"""JSON that the server stores in its own form: documents arrive as it shows them, and are written so by an applier."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.services.binlog.reading import Reading
from txmq.testing.processes.database_programs import Ability

pytestmark = pytest.mark.needs(Ability.BINARY_JSON)

DOCUMENTS = 600
TEXTS = ("''", "'a'", "'grün 😀'", "'\"\\\\\\b\\f\\n\\r\\t/'", "CHAR(1,31,127 USING utf8mb4)", "REPEAT('ü', 200)")
SCALARS = (
    "NULL", "TRUE", "FALSE", "0", "-1", "32767", "-32768", "32768", "65535", "65536", "-2147483648", "4294967295",
    "4294967296", "9223372036854775807", "-9223372036854775808", "18446744073709551615", "1.50", "-0.001",
    "CAST(7 AS DECIMAL(10,3))", "CAST('-12345678901234567890.0123456789' AS DECIMAL(65,30))", "CAST(0 AS DECIMAL(5,5))",
    "DATE'2026-11-29'", "TIMESTAMP'2026-11-29 23:59:59.125'", "TIME'-838:59:59'", "TIME'10:11:12.5'",
    "CAST('0000-00-00' AS DATE)", "X'00FF27'", "CAST('' AS BINARY)", "b'101'", "CAST('b' AS BINARY(3))",
    "JSON_ARRAY()", "JSON_OBJECT()", "CAST('[1.50, -0.0, 1e400]' AS CHAR)", "ST_GeomFromText('POINT(1 2)')",
    *TEXTS,
)  # fmt: skip


def drawn_double(drawn: random.Random) -> str:
    """A number of any size, and with any number of digits."""
    if drawn.random() < 0.5:
        return f"{drawn.choice((-1, 1)) * drawn.randrange(10 ** drawn.randrange(1, 18))}e{drawn.randrange(-40, 40)}"
    while True:
        (number,) = struct.unpack("<d", drawn.randbytes(8))
        if number == number and abs(number) < 1e308:
            return f"{number!r}e0" if "e" not in repr(number) else repr(number)


def drawn_document(drawn: random.Random, depth: int = 0) -> str:
    """SQL that makes a document."""
    kind = drawn.random()
    if depth < 4 and kind < 0.25:
        return f"JSON_ARRAY({', '.join(drawn_document(drawn, depth + 1) for _ in range(drawn.randrange(6)))})"
    if depth < 4 and kind < 0.55:
        pairs = [
            f"{drawn.choice(TEXTS[1:])}, {drawn_document(drawn, depth + 1)}"
            if drawn.random() < 0.3
            else f"'k{drawn.randrange(200)}', {drawn_document(drawn, depth + 1)}"
            for _ in range(drawn.randrange(6))
        ]
        return f"JSON_OBJECT({', '.join(pairs)})"
    return drawn_double(drawn) if kind < 0.7 else drawn.choice(SCALARS)


def large_documents() -> Iterator[str]:
    """Documents whose offsets need four bytes."""
    yield "JSON_ARRAY(REPEAT('x', 70000), 1, 70000, -70000, 4294967295, NULL, 1.50, JSON_OBJECT('a', 1))"
    yield f"JSON_OBJECT('long', REPEAT('ü', 40000), {', '.join(f'{chr(39)}k{n}{chr(39)}, {n}' for n in range(90))})"


def test_documents_arrive_as_the_server_shows_them(reading: Reading) -> None:
    drawn = random.Random(29)
    documents = [*SCALARS, *(drawn_document(drawn) for _ in range(DOCUMENTS)), *large_documents()]
    with closing(reading.server.connect(db=reading.database, autocommit=True)) as connection:
        cursor = connection.cursor()
        cursor.execute("SET SESSION sql_mode = 'ALLOW_INVALID_DATES'")
        cursor.execute("CREATE TABLE t (id INT PRIMARY KEY, doc JSON)")
        for number, document in enumerate(documents):
            cursor.execute(f"INSERT INTO t SELECT {number}, JSON_EXTRACT(JSON_ARRAY({document}), '$[0]')")
        cursor.execute("SELECT id, CAST(doc AS CHAR) FROM t ORDER BY id")
        shown = dict(cursor.fetchall())
    assert len(shown) == len(documents)
    told = {change.after[0]: change.after[1] for change in reading.changes() if change.after is not None}
    assert [(documents[n], told[n], shown[n]) for n in shown if told[n] != shown[n]] == []


def drawn_change(drawn: random.Random) -> str:
    """SQL that changes a document in a way that the server may write as a diff."""
    path = drawn.choice(
        ("$.k1", "$.k2", "$.k3", "$.list[0]", "$.list[2]", "$.in.k1", "$.in.list[1].a", r'$."a \\"b.[1]"')
    )
    value = drawn_document(drawn, 3)
    return drawn.choice(
        (
            f"JSON_SET(doc, '{path}', {value})", f"JSON_REPLACE(doc, '{path}', {value}, '$.k1', {value})",
            f"JSON_REMOVE(doc, '{path}')", f"JSON_SET(doc, '$.new{drawn.randrange(30)}', {value})",
        )
    )  # fmt: skip


def test_partial_updates_arrive_as_whole_documents(reading: Reading) -> None:
    drawn = random.Random(30)
    first = (
        "JSON_OBJECT('k1', 1.50, 'k2', REPEAT('ü', 300), 'k3', 1e0, "
        "'list', JSON_ARRAY(1, DATE'2026-11-29', 'three', 4), "
        "'in', JSON_OBJECT('k1', NULL, 'list', JSON_ARRAY(0, JSON_OBJECT('a', X'00FF'))), "
        """'a "b.[1]', 18446744073709551615)"""
    )
    shown = []
    with closing(reading.server.connect(db=reading.database, autocommit=True)) as connection:
        cursor = connection.cursor()
        cursor.execute("SET SESSION binlog_row_value_options = PARTIAL_JSON, sql_mode = 'ALLOW_INVALID_DATES'")
        cursor.execute("CREATE TABLE t (id INT PRIMARY KEY, plain JSON, doc JSON, v INT)")
        cursor.execute(f"INSERT INTO t VALUES (1, '[1]', {first}, 0), (2, NULL, {first}, 0)")
        for number in range(200):
            cursor.execute(f"UPDATE t SET doc = {drawn_change(drawn)}, v = {number + 1}")
            if number % 20 == 19:  # back to a document in which the paths are
                cursor.execute(f"UPDATE t SET doc = {first}, v = -v")
            shown.append(_shown(cursor))
    file, _ = reading.server.binlog_end()
    kinds = [str(event[2]) for event in reading.server.execute(f"SHOW BINLOG EVENTS IN '{file}'")]
    assert kinds.count("Update_rows_partial") > 200
    changes = [change for change in reading.changes() if change.op == "u"]
    told = {(change.after[3], change.after[0]): change.after[2] for change in changes if change.after is not None}
    wanted = {(v, id_): text for rows in shown for id_, text, v in rows}
    assert {at: (told.get(at), text) for at, text in wanted.items() if told.get(at) != text} == {}
    assert {change.after[1] for change in changes if change.after is not None} == {"[1]", None}


def _shown(cursor: Any) -> list[tuple[Any, ...]]:
    cursor.execute("SELECT id, CAST(doc AS CHAR), v FROM t")
    return list(cursor.fetchall())
