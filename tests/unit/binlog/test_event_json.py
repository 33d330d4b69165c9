"""Change events: the documented JSON, keys, and what comes back from it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.binlog.decoded_changes import (
    ABSENT,
    Column,
    ColumnKind,
    Ddl,
    DdlKind,
    Op,
    Origin,
    Row,
    RowChange,
    TableName,
    TableSchema,
    TransactionPart,
    Value,
)
from txmq.binlog.event_json import BEGIN, END, EventEncoder, EventMessage, read_event, read_statement
from txmq.binlog.position import MariadbGtids, Position

ITEMS = TableSchema(
    TableName("shop", "items"),
    (Column("id", ColumnKind.INTEGER, "int"), Column("name", ColumnKind.TEXT, "varchar(20)")),
    (0,),
)
PICTURES = TableSchema(
    TableName("shop", "pictures"),
    (Column("id", ColumnKind.BINARY, "binary(2)"), Column("data", ColumnKind.BINARY, "blob")),
    (0,),
)
ENCODER = EventEncoder('the "shop"')
TOPICS = {"s.shop.items": 4}  # that have a statement


def _part(*changes: RowChange, **fields: Any) -> TransactionPart:
    origin, gtids = Origin("mariadb", "s"), MariadbGtids.parse("0-1-5")
    return TransactionPart(
        "0-1-5", gtids, origin, 7, 1000, changes=list(changes), file="binlog.000001", offset=99, **fields
    )


def _messages(*changes: RowChange, **fields: Any) -> list[EventMessage]:
    return list(ENCODER.changes(_part(*changes, **fields), 1234))


def test_the_event_of_an_update_is_as_documented() -> None:
    (message,) = _messages(RowChange(Op.UPDATE, ITEMS, (1, "a"), (1, None)))
    assert json.loads(message.value) == {
        "op": "u",
        "before": {"id": 1, "name": "a"},
        "after": {"id": 1, "name": None},
        "source": {
            "connector": "txmq", "name": 'the "shop"', "server_id": 7, "gtid": "0-1-5", "file": "binlog.000001",
            "pos": 99, "ts_ms": 1000, "snapshot": False, "row": 0, "db": "shop", "table": "items", "schema": ITEMS.tag,
        },
        "transaction": {"id": "0-1-5", "total_order": 1},
        "ts_ms": 1234,
    }  # fmt: skip
    assert (message.table, message.key) == (ITEMS.table, b"[1]")
    assert message.headers == {"txmq.op": b"u", "txmq.schema": ITEMS.tag.encode()}


def test_rows_are_numbered_over_the_parts_of_a_transaction() -> None:
    changes = [RowChange(Op.CREATE, ITEMS, None, (count, "x")) for count in (5, 6)]
    events = [json.loads(message.value) for message in _messages(*changes, number=100, first=False)]
    assert [event["source"]["row"] for event in events] == [100, 101]
    assert [event["transaction"]["total_order"] for event in events] == [101, 102]


def test_change_of_the_key_is_a_delete_and_a_create() -> None:
    deleted, created = _messages(RowChange(Op.UPDATE, ITEMS, (1, "a"), (2, "b")))
    assert (deleted.key, deleted.headers["txmq.op"], deleted.headers["txmq.rekey"]) == (b"[1]", b"d", b"[2]")
    assert (created.key, created.headers["txmq.op"], created.headers["txmq.rekey"]) == (b"[2]", b"c", b"[1]")
    gone, there = read_event(deleted.value), read_event(created.value)
    assert (gone.op, gone.before, gone.after) == ("d", {"id": 1, "name": "a"}, None)
    assert (there.op, there.before, there.after) == ("c", None, {"id": 2, "name": "b"})


def test_table_without_a_key_is_keyed_by_the_whole_row() -> None:
    schema = replace(ITEMS, key=())
    (first,) = _messages(RowChange(Op.CREATE, schema, None, (1, "a")))
    (second,) = _messages(RowChange(Op.DELETE, replace(schema), (1, "a"), None))
    (other,) = _messages(RowChange(Op.CREATE, schema, None, (1, "b")))
    assert first.key == second.key != other.key
    assert len(_messages(RowChange(Op.UPDATE, schema, (1, "a"), (1, "b")))) == 2


def test_binary_columns_are_named_and_come_back_as_bytes() -> None:
    (message,) = _messages(RowChange(Op.CREATE, PICTURES, None, (b"\xff\x00", None)))
    event = json.loads(message.value)
    assert event["after"] == {"id": "/wA=", "data": None}
    assert event["source"]["binary"] == ["id", "data"]
    assert message.key == b'["/wA="]'
    assert read_event(message.value).after == {"id": b"\xff\x00", "data": None}


def test_a_row_of_a_snapshot_says_so() -> None:
    position = Position("mariadb", "0-1-5,1-1-2", 0, "binlog.000001", 4)
    message = ENCODER.snapshot_row(ITEMS, (1, "a"), position, 1234)
    event = read_event(message.value)
    assert (event.op, event.before, event.after, message.key) == ("r", None, {"id": 1, "name": "a"}, b"[1]")
    assert (event.source["snapshot"], event.source["gtid"], event.source["pos"]) == (True, "0-1-5,1-1-2", 4)
    assert event.table == ITEMS.table


def test_a_statement_names_its_tables() -> None:
    ddl = Ddl(DdlKind.ALTER, "ALTER TABLE items ADD x INT", "shop", concerned=(ITEMS.table,), additive=True)
    event = read_event(ENCODER.statement(_part(ddl=ddl), ITEMS.table, TOPICS, 1).value)
    assert (event.op, event.table) == ("ddl", ITEMS.table)
    assert (event.fields["concerned"], event.fields["topics"]) == ([["shop", "items"]], TOPICS)
    assert read_statement(event) == ddl
    assert (event.fields["kind"], event.fields["additive"]) == ("alter", True)
    assert (event.fields["ddl"], event.fields["database"]) == (ddl.statement, "shop")
    assert event.fields["transaction"] == {"id": "0-1-5"}


def test_truncate_has_its_own_op() -> None:
    ddl = Ddl(DdlKind.TRUNCATE, "TRUNCATE items", "shop", emptied=(ITEMS.table,))
    message = ENCODER.statement(_part(ddl=ddl), ITEMS.table, TOPICS, 1)
    assert (read_event(message.value).op, message.headers) == ("t", {"txmq.op": b"t"})


def test_a_part_without_a_statement_has_no_event_of_one() -> None:
    with pytest.raises(ValueError, match="0-1-5 has no statement"):
        ENCODER.statement(_part(), ITEMS.table, TOPICS, 1)


def test_markers_stand_around_a_large_transaction() -> None:
    change = RowChange(Op.CREATE, ITEMS, None, (1, "a"))
    begin = read_event(ENCODER.marker(_part(change, last=False), BEGIN, ITEMS.table, None, 1).value)
    end = read_event(ENCODER.marker(_part(change, change, first=False, number=5), END, ITEMS.table, 7, 1).value)
    assert (begin.op, begin.fields["rows"]) == ("begin", None)
    assert (end.op, end.fields["rows"]) == ("end", 7)


VALUES: st.SearchStrategy[Value] = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8")),
)


@given(st.lists(st.tuples(VALUES, st.binary()), min_size=1, max_size=3))
def test_every_value_comes_back(row: list[tuple[Value, bytes]]) -> None:
    values: Row = tuple(value for pair in row for value in pair)
    kinds = [ColumnKind.TEXT, ColumnKind.BINARY] * len(row)
    columns = tuple(Column(f"c{number}", kind, "") for number, kind in enumerate(kinds))
    schema = TableSchema(TableName("d", "t"), columns, (0,))
    (message,) = _messages(RowChange(Op.DELETE, schema, values, None))
    before = read_event(message.value).before
    assert before is not None
    assert tuple(before.values()) == values


@pytest.mark.parametrize("key", [(0,), ()], ids=["key", "no key"])
def test_an_absent_generated_value_is_left_out(key: tuple[int, ...]) -> None:
    doubled = Column("doubled", ColumnKind.INTEGER, "int", is_generated=True)
    schema = TableSchema(ITEMS.table, (*ITEMS.columns, doubled), key)
    created, deleted = _messages(
        RowChange(Op.CREATE, schema, None, (1, "a", 2)), RowChange(Op.DELETE, schema, (1, "a", ABSENT), None)
    )
    assert read_event(created.value).after == {"id": 1, "name": "a", "doubled": 2}
    assert read_event(deleted.value).before == {"id": 1, "name": "a"}
    assert created.key == deleted.key  # a row's messages have one key, and so one partition


def test_a_schema_is_not_known_by_its_place_in_memory() -> None:
    for number in range(50):
        schema = replace(ITEMS, table=TableName("shop", f"t{number}"))
        (message,) = _messages(RowChange(Op.CREATE, schema, None, (1, "a")))
        assert read_event(message.value).table.name == f"t{number}"


@pytest.mark.parametrize("value", [b"[]", b"{}", b'{"op":"c"}', b'{"source":{}}', b"no json"])
def test_other_bytes_are_no_event(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a change event|Expecting"):
        read_event(value)


def test_what_is_no_value_of_a_row_is_refused() -> None:
    values: Any = (object(), "x")
    with pytest.raises(TypeError, match="no value of a row"):
        _messages(RowChange(Op.CREATE, ITEMS, None, values))
