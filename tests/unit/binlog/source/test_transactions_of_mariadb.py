"""What a real MariaDB sent, read without it; and the same bytes damaged."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from tests.unit.binlog.source.recorded import EVENTS, START
from tests.unit.binlog.source.wire import read
from txmq.binlog.decoded_changes import DdlKind, TransactionPart, XaEnd, XaPrepare
from txmq.binlog.errors import BinlogError, SourceError
from txmq.binlog.position import Position
from txmq.xid import Xid

BEGIN = Position("mariadb", START)
FORMAT_DESCRIPTION, ROTATE = 15, 4
FIRST = (1, "grün", "9.90", "b", "2026-11-23T09:05:00.500Z", b"x\0\0\0")
SECOND = (4294967295, None, "-0.01", None, None, None)
CHANGED = (1, "b", *FIRST[2:])
XA = Xid(7, b"\x01", b"\x02")


def rows(parts: list[TransactionPart]) -> list[Any]:
    """What each part does to rows."""
    changes = [[(change.op, change.before, change.after) for change in part.changes] for part in parts]
    return [(part.gtid, part.xa, told) for part, told in zip(parts, changes, strict=True)]


def test_transactions_are_those_that_were_run() -> None:
    create, rows, prepare, end, alter, compressed = parts = read(EVENTS, BEGIN)
    assert [part.gtid for part in parts] == [f"0-1-{number}" for number in range(2, 8)]
    assert create.ddl is not None
    assert create.ddl.kind is DdlKind.CREATE
    assert [(change.op, change.before, change.after) for change in rows.changes] == [
        ("c", None, FIRST), ("c", None, SECOND), ("u", FIRST, CHANGED),
    ]  # fmt: skip
    assert (prepare.xa, prepare.changes[0].before) == (XaPrepare(XA), CHANGED)
    assert (end.xa, end.changes) == (XaEnd(XA, committed=True), [])
    assert alter.ddl is not None
    assert (alter.ddl.kind, alter.ddl.additive) == (DdlKind.ALTER, False)
    row = "zzzzzzzzzzzzzz", None, None, None
    assert [change.after for change in compressed.changes] == [(number, *row) for number in range(1, 10)]


def test_a_file_without_checksums_may_have_a_wrong_one_itself() -> None:
    """MariaDB 11.8 with binlog_checksum=NONE changes a file's description on its way, and not its sum."""
    description = next(one for one in EVENTS if one[4] == FORMAT_DESCRIPTION)
    without = [one if one[4] in (FORMAT_DESCRIPTION, ROTATE) else shorter(one) for one in EVENTS]
    without[EVENTS.index(description)] = description[:-5] + b"\0" + b"\x37\x6d\xdb\x15"
    assert rows(read(without, BEGIN)) == rows(read(EVENTS, BEGIN))


def shorter(event: bytes) -> bytes:
    """An event without its sum."""
    return event[:9] + (len(event) - 4).to_bytes(4, "little") + event[13:-4]


def test_position_and_columns_are_told() -> None:
    rows = read(EVENTS, BEGIN)[1]
    assert (rows.after.gtids, rows.after.file, rows.after.offset) == ("0-1-3", "binlog.000001", 1297)
    assert rows.timestamp_ms == 1_795_424_700_000
    schema = rows.changes[0].schema
    assert schema.key == (0,)
    assert [(column.name, column.type) for column in schema.columns] == [
        ("id", "int unsigned"), ("v", "varchar(20)"), ("p", "decimal(5,2)"), ("e", "enum('a','b')"),
        ("m", "timestamp(3)"), ("b", "binary(4)"),
    ]  # fmt: skip


def test_what_is_not_captured_moves_the_position_only() -> None:
    parts = read(EVENTS, BEGIN, captures=lambda table: False)
    assert [(part.changes, part.ddl, str(part.gtids)) for part in parts] == [
        ([], None, f"0-1-{number}") for number in range(2, 8)
    ]


def test_parts_of_one_change_each_are_the_same_changes() -> None:
    parts = [part for part in read(EVENTS, BEGIN, rows_max=1) if part.gtid == "0-1-3"]
    assert [part.changes for part in parts if part.changes] == [[one] for one in read(EVENTS, BEGIN)[1].changes]
    assert [part.first for part in parts] == [True, *[False] * (len(parts) - 1)]
    assert [part.after.rows for part in parts] == [1, 2, 3, 0]


def test_a_flipped_bit_is_found_by_the_checksum() -> None:
    for place, event in enumerate(EVENTS):
        if event[4] == 4:  # the server makes it for the connection: with or without a checksum
            continue
        for byte in range(13, len(event), 5):
            damaged = bytearray(event)
            damaged[byte] ^= 0x10
            with pytest.raises(SourceError, match="damaged"):
                read([*EVENTS[:place], bytes(damaged), *EVENTS[place + 1 :]], BEGIN)


def test_wrong_bytes_are_an_error_or_as_many_transactions() -> None:
    whole = read(EVENTS, BEGIN)
    for place, event in enumerate(EVENTS):
        for bit in range(0, 8 * len(event) - 32, 29):
            damaged = bytearray(event)
            damaged[bit // 8] ^= 1 << bit % 8
            events = [*EVENTS[:place], _checked(bytes(damaged)), *EVENTS[place + 1 :]]
            try:
                parts = read(events, BEGIN)
            except BinlogError:
                continue
            assert len(parts) == len(whole), (place, bit)


def test_cut_events_are_an_error_or_tell_less() -> None:
    for place, event in enumerate(EVENTS):
        if event[4] in (4, 161, 163):  # a file's name, and lists that are passed over
            continue
        for size in range(place % 3, len(event) - 4, 3):
            cut = event[:9] + (size + 4).to_bytes(4, "little") + event[13:size] + bytes(4)
            events = [*EVENTS[:place], _checked(cut) if size >= 19 else event[:size], *EVENTS[place + 1 :]]
            _require_no_more(events, rows(read(EVENTS, BEGIN)))


def _require_no_more(events: list[bytes], whole: list[Any]) -> None:
    """Read with an error; or whole rows were cut off, or what is not used: no row is another one."""
    try:
        parts = rows(read(events, BEGIN))
    except BinlogError:
        return
    assert [part[:2] for part in parts] == [part[:2] for part in whole]
    for (*_, found), (*_, wanted) in zip(parts, whole, strict=True):
        assert all(row in wanted for row in found)


def _checked(event: bytes) -> bytes:
    return event[:-4] + zlib.crc32(event[:-4]).to_bytes(4, "little")
