"""Rows events: what an image may leave out, and what is refused."""

from __future__ import annotations

import pytest
from pymysqlreplication.constants import FIELD_TYPE

from txmq.binlog.decoded_changes import ABSENT, RowChange, TableName
from txmq.binlog.errors import ColumnError
from txmq.binlog.source.rows import AbsentColumnsError, TableDecoder, TableDescription
from txmq.binlog.source.table_map import MapColumn, TableMap

ALL, STORED = b"\x07", b"\x05"  # of the columns id, doubled, v


def decoder(generated: str = "doubled") -> TableDecoder:
    columns = [MapColumn(FIELD_TYPE.TINY, b"", name) for name in ("id", "doubled", "v")]
    return TableDecoder(TableMap(TableName("shop", "t"), columns), TableDescription(generated=frozenset([generated])))


def image(*values: int | None) -> bytes:
    nulls = sum(1 << place for place, value in enumerate(values) if value is None)
    return bytes([nulls, *(value for value in values if value is not None)])


def told(changes: list[RowChange]) -> list[tuple[object, object]]:
    return [(change.before, change.after) for change in changes]


def test_generated_columns_may_be_absent_from_an_image() -> None:
    one = decoder()
    updated = b"\x03" + STORED + STORED + image(1, 5) + image(1, None) + image(2, 6) + image(3, 7)
    assert told(one.changes("u", updated, 0, compressed=False)) == [
        ((1, ABSENT, 5), (1, ABSENT, None)), ((2, ABSENT, 6), (3, ABSENT, 7)),
    ]  # fmt: skip
    assert told(one.changes("d", b"\x03" + STORED + image(None, 4), 0, compressed=False)) == [((None, ABSENT, 4), None)]
    assert told(one.changes("c", b"\x03" + ALL + image(1, 2, 5), 0, compressed=False)) == [(None, (1, 2, 5))]


def test_images_of_an_update_may_differ_in_their_columns() -> None:
    updated = b"\x03" + STORED + ALL + image(1, 5) + image(1, 2, 6)
    assert told(decoder().changes("u", updated, 0, compressed=False)) == [((1, ABSENT, 5), (1, 2, 6))]


def test_another_column_that_is_absent_is_refused_by_name() -> None:
    for generated, name in (("v", "doubled"), ("nothing", "doubled"), ("doubled", "v")):
        present = b"\x01" if name == "v" else STORED
        with pytest.raises(ColumnError, match=f"column {name}: .*binlog_row_image=FULL"):
            decoder(generated).changes("d", b"\x03" + present + image(1, 5), 0, compressed=False)


def test_absent_columns_of_unknown_names_may_be_generated() -> None:
    one, deleted = decoder("other"), b"\x03" + STORED + image(1, 5)
    with pytest.raises(AbsentColumnsError) as caught:
        one.changes("d", deleted, 0, compressed=False)
    assert (caught.value.names, caught.value.is_known) == (["doubled"], False)
    known = one.with_generated(frozenset(["doubled"]))
    assert told(known.changes("d", deleted, 0, compressed=False)) == [((1, ABSENT, 5), None)]
    assert [column.is_generated for column in known.schema.columns] == [False, True, False]


def test_an_unreadable_value_is_named_behind_absent_ones() -> None:
    with pytest.raises(ColumnError, match="column v: "):
        decoder().changes("d", b"\x03" + STORED + b"\0\x01", 0, compressed=False)


def test_partial_rows_hold_whole_values_and_changes_of_documents() -> None:
    names = {"id": FIELD_TYPE.TINY, "a": FIELD_TYPE.JSON, "b": FIELD_TYPE.JSON}
    columns = [MapColumn(kind, b"\x04", name) for name, kind in names.items()]
    one = TableDecoder(TableMap(TableName("shop", "t"), columns), TableDescription())
    document, changed = bytes.fromhex("00 0100 0c00 0b00 0100 05 0700 61"), b"\x00\x03$.a\x03\x05\x08\x00"
    before = b"\0\x01" + sized(document) * 2
    events = before + b"\x01\x02\0\x01" + sized(b"\x04\x01") + sized(changed)  # diffs of b alone
    events += before + b"\0\x02\x02" + sized(document)  # no options: nothing is told by diffs, and a is NULL
    assert told(one.changes("u", b"\x03" + ALL + ALL + events, 0, compressed=False, is_partial=True)) == [
        ((1, '{"a": 7}', '{"a": 7}'), (1, "true", '{"a": 8}')),
        ((1, '{"a": 7}', '{"a": 7}'), (2, None, '{"a": 7}')),
    ]


def sized(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value
