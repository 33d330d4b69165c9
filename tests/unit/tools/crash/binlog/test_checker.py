"""The checker of the binlog campaign finds each kind of damage, and nothing in topics that are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tools.crash.binlog.checker import Checker, Place
from tools.crash.binlog.decoded import Decoded, DecodedChange, Image
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.event_json import ChangeEvent

PREFIX = "b1.shop."
TABLE = "tab_int"
TOPIC = f"{PREFIX}{TABLE}"


@dataclass(frozen=True)
class Stored:
    """A message."""

    place: Place
    offset: int
    key: bytes
    event: ChangeEvent


def image(id_: int, stamp: int) -> Image:
    """A row as the binlog has it."""
    return (str(id_).encode(), "INT"), (str(stamp).encode(), "LONGINT")


def change(gtid: int, op: str, id_: int, before: int | None, after: int | None, row: int = 0) -> DecodedChange:
    """A change of a row, whose stamp goes from one to the other."""
    sides = [None if stamp is None else image(id_, stamp) for stamp in (before, after)]
    return DecodedChange(f"0-1-{gtid}", row, op, TABLE, sides[0], sides[1])


BINLOG = [
    Decoded("0-1-1", [change(1, "c", 1, None, 10), change(1, "c", 2, None, 10, 1), change(1, "c", 3, None, 10, 2)]),
    Decoded("0-1-2", [change(2, "u", 1, 10, 20)]),  # the sync begins after this one
    Decoded("0-1-3", [change(3, "u", 1, 20, 30), change(3, "u", 2, 10, 30, 1)]),
    Decoded("0-1-4", [change(4, "c", 4, None, 40)]),
    Decoded("0-1-6", [change(5, "u", 1, 30, 50)]),  # an XA transaction, prepared by 5
    Decoded("0-1-7", [], "ALTER TABLE tab_int ADD COLUMN x INT"),
    Decoded("0-1-8", [change(8, "d", 1, 50, None), change(8, "c", 1, None, 80, 1)]),
    Decoded("0-1-9", [DecodedChange("0-1-9", 0, "u", TABLE, image(2, 30), image(9, 90))]),  # it changes the key
]


def event(op: str, gtid: int, row: int, before: Any = None, after: Any = None) -> ChangeEvent:
    """An event; rows are given as pairs of id and stamp."""
    sides = [None if side is None else dict(zip(("id", "stamp"), side, strict=True)) for side in (before, after)]
    source = {"gtid": f"0-1-{gtid}", "row": row}
    return ChangeEvent(op, TableName("shop", TABLE), sides[0], sides[1], source, {})


EVENTS = [  # what partition 0 has: odd keys; partition 1: even ones. The snapshot read rows at 2, and 3 at 4
    [
        event("r", 2, 0, None, (1, 20)), event("r", 4, 0, None, (3, 10)), event("u", 3, 0, (1, 20), (1, 30)),
        event("u", 5, 0, (1, 30), (1, 50)), event("ddl", 7, 0), event("d", 8, 0, (1, 50)),
        event("c", 8, 1, None, (1, 80)), event("c", 9, 0, None, (9, 90)),
    ],
    [
        event("r", 2, 0, None, (2, 10)), event("u", 3, 1, (2, 10), (2, 30)), event("c", 4, 0, None, (4, 40)),
        event("ddl", 7, 0), event("d", 9, 0, (2, 30)),
    ],
]  # fmt: skip


def stored(events: Sequence[Sequence[ChangeEvent]] = EVENTS) -> list[list[Stored]]:
    """The messages of the partitions."""
    return [
        [
            Stored((TOPIC, partition), offset, str((one.after or one.before or {}).get("id")).encode(), one)
            for offset, one in enumerate(part)
        ]
        for partition, part in enumerate(events)
    ]


def findings(parts: list[list[Stored]], binlog: Sequence[Decoded] = BINLOG, complete: str = "") -> list[str]:
    """What the checker says."""
    checker = Checker(binlog, "0-1-2", {TOPIC: 2}, PREFIX, complete)
    for part in parts:
        for one in part:
            checker.take(one.place, one.offset, one.key, one.event)
    return checker.findings()


def test_whole_topics_have_no_finding() -> None:
    assert findings(stored()) == []


def test_row_gone_before_the_last_view_may_lack_its_end() -> None:
    """Found: rows at a table's end were deleted between its last two views, and the last one had no row."""
    begun = Decoded("0-1-1", [*BINLOG[0].changes, change(1, "c", 11, None, 10, 3)])
    ended = Decoded("0-1-8", [*BINLOG[6].changes, change(8, "d", 11, 10, None, 2)])
    binlog = [begun, *BINLOG[1:6], ended, BINLOG[7]]
    assert findings(stored(), binlog, "0-1-8") == []
    for earlier in ("0-1-7", ""):
        assert [text[:2] for text in findings(stored(), binlog, earlier)] == ["B3"]


def drop(parts: list[list[Stored]]) -> None:
    del parts[0][3]


def drop_the_last(parts: list[list[Stored]]) -> None:
    del parts[0][-1]


def drop_half_a_rekey(parts: list[list[Stored]]) -> None:
    del parts[1][-1]


def double(parts: list[list[Stored]]) -> None:
    parts[0].append(replace(parts[0][2], offset=99))


def swap(parts: list[list[Stored]]) -> None:
    one, other = parts[0][2], parts[0][3]
    parts[0][2], parts[0][3] = replace(other, offset=one.offset), replace(one, offset=other.offset)


def before_its_xa_commit(parts: list[list[Stored]]) -> None:
    """After the rows of 3, and before those of 4."""
    parts[0].insert(2, parts[0].pop(3))


def another_partition(parts: list[list[Stored]]) -> None:
    parts[1].append(replace(parts[0].pop(7), place=(TOPIC, 1), offset=99))
    parts[1].insert(3, replace(parts[0].pop(3), place=(TOPIC, 1)))


def of_no_transaction(parts: list[list[Stored]]) -> None:
    parts[0].append(replace(parts[0][2], event=event("u", 77, 0, (1, 20), (1, 30))))


def another_value(parts: list[list[Stored]]) -> None:
    parts[0][2] = replace(parts[0][2], event=event("u", 3, 0, (1, 20), (1, 31)))


def a_statement_missing(parts: list[list[Stored]]) -> None:
    del parts[1][3]


def a_statement_too_late(parts: list[list[Stored]]) -> None:
    parts[0].insert(6, parts[0].pop(4))


def read_twice(parts: list[list[Stored]]) -> None:
    parts[0].insert(1, parts[0][0])


def not_read(parts: list[list[Stored]]) -> None:
    del parts[0][1]


def read_as_it_was(parts: list[list[Stored]]) -> None:
    parts[0][0] = replace(parts[0][0], event=event("r", 2, 0, None, (1, 10)))


def read_with_what_follows(parts: list[list[Stored]]) -> None:
    parts[0][0] = replace(parts[0][0], event=event("r", 3, 0, None, (1, 30)))


def read_and_lost(parts: list[list[Stored]]) -> None:
    """The snapshot has the row of 2, and the change of 3 is passed over as if it had that of 3."""
    del parts[0][2]


def missing_behind_the_snapshot(parts: list[list[Stored]]) -> None:
    del parts[1][2]


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (drop, "B3"), (drop_the_last, "B3"), (drop_half_a_rekey, "B3"), (double, "B2"), (swap, "B4"),
        (another_partition, "B5"), (of_no_transaction, "B1"), (another_value, "B6"), (a_statement_missing, "B3"),
        (a_statement_too_late, "B4"), (read_twice, "B7"), (not_read, "B7"), (read_as_it_was, "B7"),
        (read_with_what_follows, "B7"), (read_and_lost, "B3"), (missing_behind_the_snapshot, "B7"),
    ],
)  # fmt: skip
def test_damage_is_found(damage: Callable[[list[list[Stored]]], None], rule: str) -> None:
    parts = stored()
    damage(parts)
    assert any(finding.startswith(rule) for finding in findings(parts)), findings(parts)


PLAIN = "tab_heap"
PLAIN_BINLOG = [
    Decoded("0-1-1", [DecodedChange("0-1-1", row, "c", PLAIN, None, image(1, 10)) for row in range(2)]),
    Decoded("0-1-3", [DecodedChange("0-1-3", 0, "u", PLAIN, image(1, 10), image(1, 30))]),
    Decoded("0-1-4", [DecodedChange("0-1-4", 0, "d", PLAIN, image(1, 10), None)]),
]


@pytest.mark.parametrize(
    ("events", "rules"),
    [
        ("r10@2 r10@2 d3 c3 d4", set()), ("r10@3 r30@3 d4", set()), ("r30@4", set()), ("r10@2 d3 c3 d4", {"B7"}),
        ("r10@3 r30@3 r30@3 d4", {"B7"}), ("r10@3 r30@3 d3 d4", {"B7"}), ("r10@2 r10@2 c3 d4", {"B3"}),
        ("d3 c3 d4", {"B7"}), ("r10@2 r10@2 d3 c3 d4 d4", {"B2"}),
    ],
)  # fmt: skip
def test_rows_of_a_table_without_key_are_counted(events: str, rules: set[str]) -> None:
    """``r10@2``: the row with stamp 10 was read at 2; ``d3``: the part of transaction 3 that deletes."""
    stamps = {"d3": ((1, 10), None), "c3": (None, (1, 30)), "d4": ((1, 10), None)}
    made = []
    for word in events.split():
        stamp, _, position = word[1:].partition("@")
        sides = (None, (1, int(stamp))) if word[0] == "r" else stamps[word]
        made.append(replace(event(word[0], int(position or stamp), 0, *sides), table=TableName("shop", PLAIN)))
    checker = Checker(PLAIN_BINLOG, "0-1-2", {f"{PREFIX}{PLAIN}": 1}, PREFIX)
    for offset, one in enumerate(made):
        checker.take((f"{PREFIX}{PLAIN}", 0), offset, b"k", one)
    assert {finding[:2] for finding in checker.findings()} == rules


def test_an_xa_transaction_stands_at_its_commit() -> None:
    binlog = [*BINLOG[:3], BINLOG[4], BINLOG[3], *BINLOG[5:]]  # committed before 4, by another order of the binlog
    both = [Decoded("0-1-4", BINLOG[4].changes), Decoded("0-1-6", BINLOG[3].changes)]
    one_partition = [[*EVENTS[0][:4], EVENTS[1][2], *EVENTS[0][4:]], [*EVENTS[1][:2], *EVENTS[1][3:]]]
    assert findings(stored(one_partition), [*binlog[:3], *both, *binlog[5:]]) == []
    assert any(finding.startswith("B4") for finding in findings(stored(one_partition)))


def test_markers_stand_around_a_large_transaction() -> None:
    begin, end = event("begin", 3, 0), event("end", 3, 0)
    whole = [[*EVENTS[0][:2], begin, EVENTS[0][2], end, *EVENTS[0][3:]]]
    whole.append([EVENTS[1][0], begin, EVENTS[1][1], end, *EVENTS[1][2:]])
    assert findings(stored(whole)) == []
    outside = [whole[0], [EVENTS[1][0], begin, end, EVENTS[1][1], *EVENTS[1][2:]]]
    assert [finding[:2] for finding in findings(stored(outside))] == ["B8"]
    missing = [whole[0], EVENTS[1]]
    assert "B8" in {finding[:2] for finding in findings(stored(missing))}
