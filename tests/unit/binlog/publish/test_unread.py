"""Which changes are passed over while a snapshot is unfinished, and what statements make of its state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.services.binlog.scripted import TABLES
from txmq.binlog.decoded_changes import Ddl, Row, RowChange, TableName
from txmq.binlog.position import Position
from txmq.binlog.publish.published import Published, read_published
from txmq.binlog.publish.unread import Key, SnapshotState, TableProgress, Unread
from txmq.binlog.statements import recognise

ORDERS, STOCK, CUSTOMER = TABLES
BORDER = 10


def compare(progress: TableProgress, keys: Sequence[Key]) -> list[bool]:
    """As a database compares numbers."""
    assert progress.after == (BORDER,)
    return [int(str(key[0])) <= BORDER for key in keys]


def state(**fields: Any) -> SnapshotState:
    """Orders are read up to the border, stock is left, customers are read."""
    current = TableProgress(ORDERS.table, (("id", "bigint"),), (BORDER,), 3)
    return replace(SnapshotState((STOCK.table,), current, 3, 8), **fields)


def row(key: int) -> Row:
    """A row of any of the tables."""
    return key, "v"


@pytest.mark.parametrize(
    ("op", "before", "after", "wanted"),
    [
        ("c", None, 10, ("c", None, 10)),
        ("c", None, 11, None),
        ("d", 10, None, ("d", 10, None)),
        ("d", 11, None, None),
        ("u", 9, 9, ("u", 9, 9)),
        ("u", 11, 11, None),
        ("u", 9, 10, ("u", 9, 10)),
        ("u", 9, 11, ("d", 9, None)),
        ("u", 11, 9, ("c", None, 9)),
    ],
)
def test_changes_of_rows_not_read_are_passed_over(
    op: str, before: int | None, after: int | None, wanted: tuple[str, int | None, int | None] | None
) -> None:
    sides = [None if key is None else row(key) for key in (before, after)]
    (found,) = Unread(compare).judged(state(), [RowChange(op, ORDERS, *sides)])
    if wanted is None:
        assert found is None
    else:
        kept = [None if key is None else row(key) for key in wanted[1:]]
        assert found == RowChange(wanted[0], ORDERS, *kept)


def test_tables_left_are_passed_over_and_tables_read_are_not() -> None:
    changes = [RowChange("c", schema, None, row(99)) for schema in (STOCK, CUSTOMER)]
    assert Unread(compare).judged(state(), changes) == [None, changes[1]]


def test_table_without_a_row_read_is_passed_over() -> None:
    begun = state(current=TableProgress(ORDERS.table, (("id", "bigint"),)))
    assert Unread(compare).judged(begun, [RowChange("d", ORDERS, row(1), None)]) == [None]


@pytest.mark.parametrize("of", ["table", "snapshot"])
def test_nothing_read_again_is_passed_over(of: str) -> None:
    changes = [RowChange("c", ORDERS, None, row(99)), RowChange("c", STOCK, None, row(99))]
    if of == "table":
        again = state(current=TableProgress(ORDERS.table, (("id", "bigint"),), (BORDER,), 3, again=True))
        assert Unread(compare).judged(again, changes) == [changes[0], None]
    else:
        assert Unread(compare).judged(state(again=True), changes) == changes


def ddl(text: str) -> Ddl:
    """A statement that was run in ``shop``."""
    found = recognise(text, "shop").ddl
    assert found is not None
    return found


@pytest.mark.parametrize("verb", ["DROP", "TRUNCATE", "CREATE", "CREATE OR REPLACE"])
def test_table_that_ends_or_begins_comes_by_binlog_alone(verb: str) -> None:
    assert state().behind(ddl(f"{verb} TABLE stock")) == state(left=())
    assert state().behind(ddl(f"{verb} TABLE orders")) == state(current=None)


@pytest.mark.parametrize("text", ["CREATE TABLE x LIKE {}", "CREATE TABLE IF NOT EXISTS {} (id INT)"])
def test_table_that_a_statement_leaves_as_it_is_stays(text: str) -> None:
    for table in ("stock", "orders"):
        assert state().behind(ddl(text.format(table))) == state()


def test_dropped_database_takes_its_tables_with_it() -> None:
    for text in ("/* why */ DROP DATABASE shop", "CREATE OR REPLACE DATABASE shop"):
        assert state().behind(ddl(text)) == state(left=(), current=None)
    for text in ("ALTER DATABASE shop", "CREATE DATABASE IF NOT EXISTS shop", "DROP DATABASE other"):
        assert state().behind(ddl(text)) == state()


def test_tables_that_are_renamed_are_read_under_their_new_names() -> None:
    found = state().behind(ddl("RENAME TABLE orders TO new, stock TO orders, new TO other"))
    found = found.behind(ddl("ALTER TABLE orders ADD x INT, RENAME AS attic.orders"))
    assert found.current is not None
    assert (found.current.table, found.left) == (TableName("shop", "other"), (TableName("attic", "orders"),))


def test_an_altered_table_goes_on() -> None:
    assert state().behind(ddl("ALTER TABLE orders ADD x INT")) == state()


@pytest.mark.parametrize("after", [(1, "ü"), (b"\x00\xff",), ()])
def test_state_is_read_back_from_its_position_message(after: Key) -> None:
    held = state(current=TableProgress(ORDERS.table, (("id", "bigint"),), after, 3, again=True), again=True)
    published = Published("a-1", Position("mariadb", "0-1-7"), snapshot=held)
    assert read_published(published.to_json(), "here") == published
    ended = Published("a-1", Position("mariadb", "0-1-7"))
    assert "snapshot" not in json.loads(ended.to_json())
