"""MySQL's events, made by hand after its documentation: GTIDs, transactions, XA, JSON, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.unit.binlog.source import wire
from txmq.binlog.decoded_changes import DdlKind, TableName, TransactionPart, XaEnd, XaPrepare
from txmq.binlog.errors import ColumnError, SourceError
from txmq.binlog.position import Position
from txmq.binlog.source import transactions
from txmq.binlog.source.events import REFUSED
from txmq.xid import Xid

BEGIN = Position("mysql", f"{wire.SERVER}:1-10")
DOCUMENT = bytes.fromhex("00 0100 0c00 0b00 0100 05 0700 61".replace(" ", ""))  # {"a": 7}: one small object
TEN = wire.image(2**64 - 1, "grün", DOCUMENT)


def transaction(number: int, *events: bytes) -> list[bytes]:
    """A transaction of InnoDB."""
    return [wire.gtid(number), wire.query("BEGIN"), *events, wire.xid()]


def only(events: list[bytes]) -> TransactionPart:
    (part,) = wire.read(events, BEGIN)
    return part


def test_rows_come_with_their_gtid() -> None:
    changed = wire.image(3, "b")
    part = only(
        transaction(
            11, wire.table_map(), wire.rows(wire.WRITE, TEN, wire.image(3, "a")),
            wire.rows(wire.UPDATE, wire.image(3, "a"), changed), wire.rows(wire.DELETE, changed),
        )
    )  # fmt: skip
    assert part.gtid == f"{wire.SERVER}:11"
    assert part.after.gtids == f"{wire.SERVER}:1-11"
    assert [(change.op, change.before, change.after) for change in part.changes] == [
        ("c", None, (2**64 - 1, "grün", '{"a": 7}')), ("c", None, (3, "a", None)),
        ("u", (3, "a", None), (3, "b", None)), ("d", (3, "b", None), None),
    ]  # fmt: skip
    schema = part.changes[0].schema
    assert (schema.key, [column.type for column in schema.columns]) == (
        (0,),
        ["bigint unsigned", "varchar(10)", "json"],
    )
    assert json.loads(str((part.changes[0].after or ())[2])) == {"a": 7}


def test_a_statement_is_a_transaction_of_its_own() -> None:
    events = [wire.gtid(11), wire.query("CREATE TABLE u (id INT)"), wire.gtid(12), wire.query("ALTER TABLE u DROP x")]
    parts = wire.read(events, BEGIN)
    assert [part.ddl.kind for part in parts if part.ddl is not None] == [DdlKind.CREATE, DdlKind.ALTER]
    assert [part.after.gtids for part in parts] == [f"{wire.SERVER}:1-11", f"{wire.SERVER}:1-12"]


def test_a_table_made_from_rows_is_one_transaction() -> None:
    statement = wire.query("CREATE TABLE t (id BIGINT UNSIGNED, v VARCHAR(10), doc JSON) START TRANSACTION")
    part = only(transaction(11, statement, wire.table_map(), wire.rows(wire.WRITE, wire.image(1, "a"))))
    assert part.ddl is not None
    assert (part.ddl.kind, len(part.changes)) == (DdlKind.CREATE, 1)


def test_a_table_that_is_not_captured_is_named_as_such() -> None:
    part = only(transaction(11, wire.query("RENAME TABLE t TO attic.t, u TO w")))
    assert part.ddl is not None
    assert part.ddl.foreign == {TableName("attic", "t")}
    assert part.ddl.captured == (TableName("shop", "t"), TableName("shop", "u"), TableName("shop", "w"))


def test_vectors_are_bytes_and_what_follows_is_read() -> None:
    names = b"".join(wire.sized(name) for name in (b"id", b"e", b"v"))
    optional = wire.field(1, b"\x80") + wire.field(2, bytes([wire.UTF8MB4])) + wire.field(4, names)
    named = wire.sized(b"shop") + b"\0" + wire.sized(b"t") + b"\0"
    described = named + wire.sized(bytes([8, 242, 15])) + wire.sized(b"\x04" + b"\x28\0") + b"\x06" + optional
    table = wire.event(wire.TABLE_MAP, (5).to_bytes(6, "little") + b"\x01\0" + described)
    row = b"\0" + (1).to_bytes(8, "little") + (8).to_bytes(4, "little") + bytes(range(8)) + wire.sized(b"a")
    part = only(transaction(11, table, wire.rows(wire.WRITE, row)))
    assert part.changes[0].after == (1, bytes(range(8)), "a")
    assert part.changes[0].schema.columns[1].type == "vector"


def test_xa_rows_stand_at_the_prepare() -> None:
    xid = "X'ff',X'02',7"
    prepared = wire.event(wire.XA_PREPARE, b"\0" + b"".join(n.to_bytes(4, "little") for n in (7, 1, 1)) + b"\xff\x02")
    parts = wire.read(
        [
            wire.gtid(11), wire.query(f"XA START {xid}"), wire.table_map(),
            wire.rows(wire.WRITE, wire.image(1, "a")), wire.query(f"XA END {xid}"), prepared,
            wire.gtid(12), wire.query(f"XA ROLLBACK {xid}"),
        ],
        BEGIN,
    )  # fmt: skip
    known = Xid(7, b"\xff", b"\x02")
    assert [(part.xa, len(part.changes)) for part in parts] == [
        (XaPrepare(known), 1), (XaEnd(known, committed=False), 0),
    ]  # fmt: skip


LARGE = (
    wire.gtid(11), wire.query("XA START X'ff',X'02',7"), wire.table_map(),
    wire.rows(wire.WRITE, *(wire.image(number, "a") for number in (1, 2, 3))), wire.query("XA END X'ff',X'02',7"),
)  # fmt: skip


@pytest.mark.parametrize("is_prepared", [True, False])
def test_parts_of_an_xa_transaction_wait_for_its_end(*, is_prepared: bool) -> None:
    """Found: the first parts of a large one were published when they were read, prepared or not."""
    numbers = b"".join(n.to_bytes(4, "little") for n in (7, 1, 1))
    end = wire.event(wire.XA_PREPARE, bytes([not is_prepared]) + numbers + b"\xff\x02")
    parts = wire.read([*LARGE, end], BEGIN, rows_max=2)
    xa = XaPrepare(Xid(7, b"\xff", b"\x02")) if is_prepared else None
    assert [(part.xa, part.first, part.last, part.number, len(part.changes)) for part in parts] == [
        (xa, True, False, 0, 2), (xa, False, True, 2, 1),
    ]  # fmt: skip
    position = Position("mysql", BEGIN.gtids, 2, partial=f"{wire.SERVER}:11")
    assert wire.read([*LARGE, end], position, rows_max=2) == parts[1:]
    assert wire.read(LARGE, BEGIN, rows_max=2) == []


@pytest.mark.parametrize(("statement", "left"), [("ROLLBACK", []), ("ROLLBACK TO SAVEPOINT `s`", [1])])
def test_held_parts_of_an_xa_transaction_are_taken_back(statement: str, left: list[int]) -> None:
    """Found: the reader stopped, and said that they were handed out; a transaction without changes left no GTID."""
    numbers = b"".join(n.to_bytes(4, "little") for n in (7, 1, 1))
    rows = [wire.rows(wire.WRITE, wire.image(number, "a")) for number in (1, 2, 3, 4)]
    events = [*LARGE[:3], rows[0], wire.query("SAVEPOINT `s`"), *rows[1:], wire.query(statement)]
    if left:
        events.append(wire.event(wire.XA_PREPARE, b"\0" + numbers + b"\xff\x02"))
    (part,) = wire.read(events, BEGIN, rows_max=2)
    assert (part.first, part.last, part.number, [change.after[0] for change in part.changes if change.after]) == (
        True, True, 0, left,
    )  # fmt: skip
    assert part.after.gtids == f"{wire.SERVER}:1-11"


def test_an_xa_transaction_that_a_crash_cut_off_is_dropped() -> None:
    description = wire.event(wire.DESCRIPTION, bytes(57) + b"\x01")
    assert wire.read([*LARGE, description], BEGIN, rows_max=2) == []
    position = Position("mysql", BEGIN.gtids, 1, partial=f"{wire.SERVER}:11")
    with pytest.raises(SourceError, match="a crash of the server cut it off, and part of it was handed out"):
        wire.read([*LARGE, description], position, rows_max=1)


def test_an_xa_transaction_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "HELD_BYTES_MAX", 40)
    with pytest.raises(SourceError, match=f"transaction {wire.SERVER}:11: an XA transaction of more than 40 bytes"):
        wire.read(LARGE, BEGIN, rows_max=2)


def test_gtids_of_several_servers_are_one_set() -> None:
    other = "3e11fa47-71ca-11e1-9e33-c80aa9429563"
    position = Position("mysql", f"{other}:1-3:5,{wire.SERVER}:1-10")
    (part,) = wire.read(transaction(12), position)
    assert part.after.gtids == f"{wire.SERVER}:1-10:12,{other}:1-3:5"


def test_a_transaction_that_is_sent_again_is_refused() -> None:
    with pytest.raises(SourceError, match=":10 is published already"):
        wire.read(transaction(10), BEGIN)


def test_a_position_within_a_transaction_goes_on_there() -> None:
    position = Position("mysql", BEGIN.gtids, 1, partial=f"{wire.SERVER}:11")
    images = [wire.image(number, "a") for number in (1, 2, 3)]
    (part,) = wire.read(transaction(11, wire.table_map(), wire.rows(wire.WRITE, *images)), position)
    assert [(change.after or ())[0] for change in part.changes] == [2, 3]
    assert (part.first, part.number) == (False, 1)
    with pytest.raises(SourceError, match=":11 was expected"):
        wire.read(transaction(12), position)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_cannot_be_read_is_named(kind: int) -> None:
    with pytest.raises(SourceError, match=f"transaction {wire.SERVER}:11: "):
        wire.read([wire.gtid(11), wire.query("BEGIN"), wire.event(int(kind), bytes(40))], BEGIN)


def test_an_event_that_only_ends_a_statement_has_no_rows() -> None:
    events = [wire.table_map(), wire.rows(wire.WRITE, wire.image(1, "a")), wire.rows(wire.WRITE, number=0xFFFFFF)]
    assert len(only(transaction(11, *events)).changes) == 1


def test_unknown_events_are_refused_unless_the_server_marks_them() -> None:
    unknown = wire.event(200, b"what")
    with pytest.raises(SourceError, match=r"not known \(200\)"):
        wire.read(transaction(11, unknown), BEGIN)
    assert only(transaction(11, wire.event(200, b"what", flags=0x80))).changes == []


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([wire.query("BEGIN")], "outside of every transaction"),
        ([wire.gtid(11), wire.gtid(12)], "begins before it has ended"),
        (transaction(11, wire.rows(wire.WRITE, TEN)), "rows without a table map"),
        (transaction(11, wire.table_map(), wire.rows(wire.WRITE, TEN + b"\0")), "cannot be read|behind it|column"),
        ([wire.gtid(11), wire.query("INSERT INTO t VALUES (1)")], "changes rows by a statement"),
        ([wire.gtid(11)[:-1]], "has"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(events: list[bytes], text: str) -> None:
    with pytest.raises((SourceError, ColumnError), match=text):
        wire.read(events, BEGIN)


def test_a_transaction_that_a_crash_cut_off_is_dropped() -> None:
    description = wire.event(wire.DESCRIPTION, bytes(57) + b"\x01")  # with checksums: the last byte of the body
    cut = [wire.gtid(11), wire.query("BEGIN"), wire.table_map(), wire.rows(wire.WRITE, TEN), description]
    assert wire.read(cut, BEGIN) == []
    parts = wire.read([*cut, *transaction(11, wire.table_map(), wire.rows(wire.WRITE, TEN))], BEGIN)
    assert [len(part.changes) for part in parts] == [1]
    with pytest.raises(SourceError, match="a crash of the server cut it off, and part of it was handed out"):
        wire.read(cut, BEGIN, rows_max=1)


def test_a_damaged_document_names_its_column() -> None:
    with pytest.raises(ColumnError, match="column doc") as caught:
        wire.read(transaction(11, wire.table_map(), wire.rows(wire.WRITE, wire.image(1, "a", b"\x00\xff\xff"))), BEGIN)
    assert caught.value.column == "doc"


def test_shadow_tables_and_other_databases_are_not_read() -> None:
    events = transaction(11, wire.table_map(table="_t_gho"), wire.rows(wire.WRITE, TEN))
    events += transaction(12, wire.table_map(database="other"), wire.rows(wire.WRITE, TEN))
    assert [part.changes for part in wire.read(events, BEGIN)] == [[], []]
