"""Values of rows and messages are compared as what they are; what was not judged is told, and nothing is not clean."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from txmq.spark.audit.audit import Surroundings, audit
from txmq.spark.audit.rows import open_rows
from txmq.spark.audit.spec import AuditSpec, Kind, parse_terms

from .test_audit_library import MESSAGES, NOON, found, of_kinds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(1200)
COLUMNS = (
    "id long, price decimal(10,2), long_ decimal(38,18), n long, f float, d double, day date, at timestamp, "
    "local timestamp_ntz, text string"
)
NAMES = ("price", "long_", "n", "f", "d", "day", "at", "local", "text")
ROW = (
    Decimal("1.50"), Decimal("12345678901234567.890000000000000001"), 1000, 0.1, 0.1, date(2026, 1, 2),
    datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 25, 0, 30), "1.50",  # noqa: DTZ001 - without a zone
)  # fmt: skip
SAME: tuple[dict[str, Any], ...] = (
    {"price": "1.5", "n": "1e3", "f": "0.10", "at": "2026-10-25T02:30:00+02:00", "local": "2026-10-25 00:30"},
    {"price": "15e-1", "n": "1000.0", "d": "1e-1", "at": "2026-10-25T01:30:00+01:00", "text": "1.50"},
    {"price": "01.500", "n": 1000, "day": "2026-01-02T00:00:00", "local": "2026-10-25T02:30:00+02:00"},
)
OTHERS: dict[str, list[str | None]] = {
    "price": ["1.504", "1.5000001", "1.5000000000000000000000000000000000001", "x", None, "1504e-3"],
    "long_": ["12345678901234567.890000000000000002", "12345678901234567.89"],
    "n": ["1000.4", "1000.00001", "1001"],
    "f": ["0.1001"],
    "d": ["0.10000000000000002"],
    "day": ["2026-01-02T12:00:00", "2026-01-03"],
    "at": ["2026-10-25T02:30:00+01:00", "2026-10-25T03:30:00+02:00", "2026-10-25 01:30"],  # one o'clock in UTC
    "local": ["2026-10-25T02:30:00+01:00"],
    "text": ["1.5"],
}
PLAIN = {
    "price": "1.50", "long_": "12345678901234567.890000000000000001", "n": "1000", "f": "0.1", "d": "0.1",
    "day": "2026-01-02", "at": "2026-10-25T00:30:00Z", "local": "2026-10-25T00:30:00Z", "text": "1.50",
}  # fmt: skip
BARE = ("price", "long_", "n", "f", "d")  # numbers, when they are ones, stand in JSON without quotes


@pytest.fixture
def berlin(spark: SparkSession) -> Iterator[None]:
    """A session in a zone in which an hour of 25 October 2026 is there twice."""
    before = spark.conf.get("spark.sql.session.timeZone")
    assert before is not None
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    yield
    spark.conf.set("spark.sql.session.timeZone", before)


def said(number: int, fields: dict[str, Any]) -> bytes:
    """A message's JSON; numbers as they are written."""
    bare = {name: text for name, text in fields.items() if name in BARE and text not in ("x", None)}
    parts = [f'"{name}": {str(text).lstrip("0") if str(text)[1:2].isdigit() else text}' for name, text in bare.items()]
    rest = {name: text for name, text in fields.items() if name not in bare}
    return ("{" + ", ".join([f'"id": {number}', *parts, *([json.dumps(rest)[1:-1]] if rest else [])]) + "}").encode()


def messages(spark: SparkSession, *values: bytes | None, keys: bytes | None = b"k") -> DataFrame:
    """One of each, in one partition."""
    return spark.createDataFrame(
        [(keys, value, "t", 0, n, NOON + timedelta(seconds=n), None, "tx") for n, value in enumerate(values)], MESSAGES
    )


@pytest.mark.usefixtures("berlin")
def test_values_are_equal_as_values_and_never_rounded(spark: SparkSession) -> None:
    wanted: list[tuple[dict[str, Any], str | None]] = [({**PLAIN, **fields}, None) for fields in SAME]
    wanted += [({**PLAIN, name: text}, name) for name, texts in OTHERS.items() for text in texts]
    table = spark.createDataFrame([(n, *ROW) for n in range(len(wanted))], COLUMNS)
    spec = AuditSpec("t", parse_terms(["id = json:$.id"]), parse_terms([f"{name} = json:$.{name}" for name in NAMES]))
    sent = messages(spark, *[said(n, fields) for n, (fields, _) in enumerate(wanted)])
    result = audit(sent, table, spec)
    differ = {int(str(line["identity"])): str(line["detail"]) for line in result.sample(Kind.DIFFERS, 100)}
    told = {n: [text.partition(":")[0] for text in detail.split("; ")] for n, detail in differ.items()}
    assert told == {n: [name] for n, (_, name) in enumerate(wanted) if name is not None}, differ
    assert of_kinds(result) == {"differs": len(told)}


def test_sqlite_keys_of_null_and_of_text_are_read(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (id INT PRIMARY KEY, price DECIMAL(10,2), note ANY)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(n, f"{n}.50", str(n)) for n in range(1, 30_000)])
        connection.execute("INSERT INTO t VALUES (NULL, 1, NULL), (NULL, 2, NULL)")
    rows = open_rows(spark, f"sqlite:{path}", "t")
    spec = AuditSpec("t", parse_terms(["id = json:$.id"]), parse_terms(["price = json:$.price"]))
    sent = messages(spark, *[b'{"id": %d, "price": %d.50}' % (n, n) for n in range(1, 30_000)])
    result = audit(sent, rows.read(spec.columns), spec)
    assert found(result) == {"missing": [(None, None, None, None)] * 2}


SPEC = AuditSpec("t", parse_terms(["id = json:$.id"]))


def test_nothing_judged_is_not_clean_and_says_why(spark: SparkSession) -> None:
    table = spark.createDataFrame([(0, 7), (1, 8)], "id long, version long")
    sent = messages(spark, b'{"id": 0}', b'{"id": 1}', keys=None)
    empty = audit(sent.limit(0), table.limit(0), SPEC)
    assert (empty.is_clean, empty.has_findings) == (False, False)
    assert empty.blind == ["nothing was judged: the window has no rows and no messages"]
    unordered = audit(sent, table, replace(SPEC, order="version"))
    assert (unordered.is_clean, unordered.has_findings) == (False, False)
    assert unordered.unjudged == {"messages without a key, or a row with an order value": 2}
    assert audit(sent, table, SPEC).is_clean


def test_updated_rows_are_held_against_their_newest_message(spark: SparkSession) -> None:
    table = spark.createDataFrame([(0, 3), (1, 5), (2, 1), (4, 4)], "id long, v long")
    values = [(0, 1), (1, 5), (0, 2), (2, 1), (0, 3), (1, 6), (3, 1), (3, None), (4, 3)]
    lines = [
        (b"%d" % n, None if v is None else b'{"v": %d}' % v, "t", 0, place, NOON, None, "tx")
        for place, (n, v) in enumerate(values)
    ]
    sent = spark.createDataFrame(lines, MESSAGES)
    spec = AuditSpec("t", parse_terms(["id = key"]), parse_terms(["v = json:$.v"]), latest=True)
    came = spark.createDataFrame([(b"4", b'{"v": 4}', "t", 0, 9, NOON, None, "tx")], MESSAGES)
    result = audit(sent, table, spec, around=Surroundings(later_messages=lambda: came))
    assert found(result) == {"differs": [("1", 0, 5, "tx")]}, "4 has been changed since"
    assert result.unjudged["earlier messages"] == 3
