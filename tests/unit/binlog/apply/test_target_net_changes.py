"""Changes of rows become few statements: what was there is deleted, what there is now is inserted."""

from __future__ import annotations

from typing import Any

import pytest

from txmq.binlog.apply.target import OutOfStepError, RowEvent, Statement, TargetColumn, TargetTable, statements
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import TargetError

ID, NAME = TargetColumn("id", "int", "int(11)"), TargetColumn("name", "varchar", "varchar(9)", is_text=True)
TABLE = TargetTable(TableName("shop", "items"), (ID, NAME), ("id",))
DELETE, INSERT = "DELETE FROM `shop`.`items` WHERE `id` IN", "INSERT INTO `shop`.`items` (`id`,`name`) VALUES"


def row(id_: int, name: str = "lamp") -> dict[str, Any]:
    """A row of ``TABLE``."""
    return {"id": id_, "name": name}


def created(id_: int, name: str = "lamp") -> RowEvent:
    """An insert."""
    return RowEvent("c", None, row(id_, name))


def updated(id_: int, name: str) -> RowEvent:
    """An update that leaves the key."""
    return RowEvent("u", row(id_), row(id_, name))


def deleted(id_: int) -> RowEvent:
    """A delete."""
    return RowEvent("d", row(id_), None)


def made(*events: RowEvent, table: TargetTable = TABLE, overwrites: bool = False) -> list[Statement]:
    """The statements of some events."""
    return list(statements(table, events, overwrites=overwrites))


def test_inserts_are_one_statement() -> None:
    assert made(created(1), created(2)) == [Statement(f"{INSERT} (%s,%s),(%s,%s)", (1, "lamp", 2, "lamp"))]


def test_an_update_deletes_the_old_row_and_inserts_the_new() -> None:
    assert made(updated(1, "desk")) == [
        Statement(f"{DELETE} (%s)", (1,), 1), Statement(f"{INSERT} (%s,%s)", (1, "desk")),
    ]  # fmt: skip


def test_only_first_and_last_state_of_a_row_count() -> None:
    assert made(updated(1, "a"), deleted(1), created(1, "b"), updated(1, "c")) == [
        Statement(f"{DELETE} (%s)", (1,), 1), Statement(f"{INSERT} (%s,%s)", (1, "c")),
    ]  # fmt: skip
    assert made(deleted(1)) == [Statement(f"{DELETE} (%s)", (1,), 1)]


def test_a_row_that_comes_and_goes_must_not_be_there() -> None:
    events = created(1), updated(1, "a"), deleted(1)
    assert made(*events) == [Statement(f"{DELETE} (%s)", (1,), 0)]
    assert made(*events, overwrites=True) == [Statement(f"{DELETE} (%s)", (1,), None)]


def test_an_update_of_the_key_deletes_and_inserts() -> None:
    assert made(RowEvent("u", row(1), row(2))) == [
        Statement(f"{DELETE} (%s)", (1,), 1), Statement(f"{INSERT} (%s,%s)", (2, "lamp")),
    ]  # fmt: skip


def test_a_row_of_a_snapshot_may_be_there_already() -> None:
    assert made(RowEvent("r", None, row(1)), created(2)) == [
        Statement(f"{DELETE} (%s)", (1,), None), Statement(f"{INSERT} (%s,%s),(%s,%s)", (1, "lamp", 2, "lamp")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "events", [(created(1), created(1)), (deleted(1), deleted(1)), (deleted(1), updated(1, "a"))], ids=str
)
def test_changes_that_cannot_follow_one_another_are_refused(events: tuple[RowEvent, RowEvent]) -> None:
    with pytest.raises(OutOfStepError):
        made(*events)
    made(*events, overwrites=True)


def test_to_overwrite_is_to_delete_any_number_and_to_replace() -> None:
    assert made(updated(1, "desk"), overwrites=True) == [
        Statement(f"{DELETE} (%s)", (1,), None),
        Statement(f"REPLACE{INSERT.removeprefix('INSERT')} (%s,%s)", (1, "desk")),
    ]


def test_a_key_of_two_columns_is_compared_as_such() -> None:
    table = TargetTable(TABLE.name, (ID, NAME), ("name", "id"))
    (found,) = made(deleted(1), RowEvent("d", row(2, "x"), None), table=table)
    condition = "(`name` = %s AND `id` = %s)"
    assert found == Statement(f"DELETE FROM `shop`.`items` WHERE {condition} OR {condition}", ("lamp", 1, "x", 2), 2)


def test_rows_without_a_key_are_compared_whole_and_in_order() -> None:
    table = TargetTable(TABLE.name, (ID, NAME), ())
    whole = "`id` <=> %s AND CAST(CONVERT(`name` USING utf8mb4) AS BINARY) <=> CAST(%s AS BINARY)"
    delete = f"DELETE FROM `shop`.`items` WHERE {whole} LIMIT 1"
    assert made(created(1), created(1), RowEvent("u", row(1), row(2)), deleted(2), table=table) == [
        Statement(f"{INSERT} (%s,%s),(%s,%s)", (1, "lamp", 1, "lamp")),
        Statement(delete, (1, "lamp"), 1),
        Statement(f"{INSERT} (%s,%s)", (2, "lamp")),
        Statement(delete, (2, "lamp"), 1),
    ]


def test_json_is_compared_by_what_its_text_tells() -> None:
    table = TargetTable(TABLE.name, (TargetColumn("doc", "json"), TargetColumn("e", "vector")), ())
    (found,) = made(RowEvent("d", {"doc": '{"a": 1.50}', "e": b"abcd"}, None), table=table)
    told = "CAST(CAST(CAST({} AS CHAR) AS JSON) AS CHAR)"
    condition = f"{told.format('`doc`')} <=> {told.format('%s')} AND HEX(`e`) <=> HEX(%s)"
    assert found == Statement(f"DELETE FROM `shop`.`items` WHERE {condition} LIMIT 1", ('{"a": 1.50}', b"abcd"), 1)


def test_generated_columns_are_left_out() -> None:
    table = TargetTable(TABLE.name, (ID, NAME, TargetColumn("twice", "int", is_generated=True)), ("id",))
    (found,) = made(RowEvent("c", None, row(1) | {"twice": 2}), table=table)
    assert found == Statement(f"{INSERT} (%s,%s)", (1, "lamp"))


def test_a_timestamp_is_written_as_utc() -> None:
    table = TargetTable(TABLE.name, (ID, TargetColumn("at", "timestamp")), ("id",))
    (found,) = made(RowEvent("c", None, {"id": 1, "at": "2026-03-29T02:30:00.5Z"}), table=table)
    assert found.parameters == (1, "2026-03-29 02:30:00.5")


@pytest.mark.parametrize("declared", ["enum('a','b')", "enum('a','c''d')", "enum('a','''')"])
def test_error_value_of_an_enum_is_written_leniently(declared: str) -> None:
    kinds = TargetColumn("kind", "enum", declared, is_text=True)
    table = TargetTable(TABLE.name, (ID, kinds), ("id",))
    events = [RowEvent("c", None, {"id": number, "kind": kind}) for number, kind in enumerate(("a", "", None))]
    assert [(one.parameters, one.is_lenient) for one in made(*events, table=table)] == [
        ((0, "a", 2, None), False), ((1, ""), True),
    ]  # fmt: skip
    with_empty = TargetColumn("kind", "enum", "enum('a','')", is_text=True)
    (found,) = made(*events, table=TargetTable(TABLE.name, (ID, with_empty), ("id",)))
    assert not found.is_lenient


@pytest.mark.parametrize(
    ("found", "named"), [({"id": 1, "name": "x", "size": 3}, "no column size"), ({"id": 1}, "no column name")]
)
def test_other_columns_than_the_sources_are_refused_by_name(found: dict[str, Any], named: str) -> None:
    with pytest.raises(TargetError, match=named):
        made(RowEvent("c", None, found))


def test_names_are_quoted_for_sql_and_for_the_driver() -> None:
    table = TargetTable(TableName("a`b", "c%d"), (TargetColumn("e%`", "int"),), ("e%`",))
    (found,) = made(RowEvent("d", {"e%`": 1}, None), table=table)
    assert found.sql == "DELETE FROM `a``b`.`c%%d` WHERE `e%%```  IN (%s)".replace("  ", " ")
