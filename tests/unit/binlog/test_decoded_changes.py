"""The values of the binlog: schema tags, positions after parts."""

from __future__ import annotations

from dataclasses import replace

from txmq.binlog.decoded_changes import (
    Column,
    ColumnKind,
    Op,
    Origin,
    RowChange,
    TableName,
    TableSchema,
    TransactionPart,
)
from txmq.binlog.position import MariadbGtids, Position

ID = Column("id", ColumnKind.INTEGER, "int")
NAME = Column("name", ColumnKind.TEXT, "varchar(20)")
PEOPLE = TableSchema(TableName("shop", "people"), (ID, NAME), (0,))


def test_schema_tag_changes_with_names_types_and_key() -> None:
    others = [
        replace(PEOPLE, columns=(ID, replace(NAME, name="title"))),
        replace(PEOPLE, columns=(ID, replace(NAME, type="varchar(21)"))),
        replace(PEOPLE, columns=(NAME, ID)),
        replace(PEOPLE, key=()),
    ]
    assert len({PEOPLE.tag, *(other.tag for other in others)}) == 5
    assert PEOPLE.tag == replace(PEOPLE, table=TableName("shop", "staff")).tag
    assert len(PEOPLE.tag) == 8


def test_changes_are_compared_by_value() -> None:
    change = RowChange(Op.UPDATE, PEOPLE, (1, "a"), (1, "b"))
    assert change == RowChange("u", replace(PEOPLE), (1, "a"), (1, "b"))
    assert change != RowChange(Op.UPDATE, PEOPLE, (1, "a"), (1, "c"))
    assert "shop.people" in repr(change)


def test_position_behind_an_unfinished_transaction_counts_its_rows() -> None:
    before, behind = MariadbGtids.parse("0-1-4"), MariadbGtids.parse("0-1-5")
    changes = [RowChange(Op.CREATE, PEOPLE, None, (number, "x")) for number in range(3)]
    origin = Origin("mariadb", "server a")
    first = TransactionPart("0-1-5", before, origin, 1, 1000, last=False, changes=changes, file="b.1", offset=70)
    middle = replace(first, first=False, number=3)
    last = replace(first, gtids=behind, first=False, last=True, number=6, offset=90)
    assert first.after == Position("mariadb", "0-1-4", 3, "b.1", 70, "server a", "0-1-5")
    assert middle.after.rows == 6
    assert last.after == Position("mariadb", "0-1-5", 0, "b.1", 90, "server a")
