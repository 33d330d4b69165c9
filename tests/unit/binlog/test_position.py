"""Positions and sets of global transaction ids: text, order, what comes after what."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.binlog.position import MariadbGtids, MysqlGtids, Position, parse_gtids

A = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
B = "4e11fa47-71ca-11e1-9e33-c80aa9429562"


@pytest.mark.parametrize("text", ["", "0-1-442", "0-1-442,1-2-7"])
def test_mariadb_text_comes_back(text: str) -> None:
    assert str(MariadbGtids.parse(text)) == text


def test_mariadb_transaction_moves_its_own_domain() -> None:
    gtids = MariadbGtids.parse("1-2-7,0-1-442").including("1-3-8").including("5-1-1")
    assert str(gtids) == "0-1-442,1-3-8,5-1-1"
    assert (gtids.sequence(0), gtids.sequence(1), gtids.sequence(9)) == (442, 8, 0)


def test_mariadb_covers_by_domain() -> None:
    gtids = MariadbGtids.parse("0-1-442,1-2-7")
    assert gtids.covers(MariadbGtids.parse("0-9-442"))
    assert gtids.covers(MariadbGtids.parse(""))
    assert not gtids.covers(MariadbGtids.parse("0-1-443"))
    assert not gtids.covers(MariadbGtids.parse("2-1-1"))
    assert not gtids.covers(MysqlGtids.parse(f"{A}:1"))


@pytest.mark.parametrize("text", ["0-1", "0-1-2-3", "a-1-2", "0-1-2,", "0-1-2,0-1-3", f"{A}:1"])
def test_strange_mariadb_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"GTID|twice"):
        MariadbGtids.parse(text)


@pytest.mark.parametrize(
    ("text", "one_form"),
    [
        ("", ""),
        (f"{A}:1", f"{A}:1"),
        (f"{A.upper()}:1-5:8", f"{A}:1-5:8"),
        (f"{B}:3, {A}:4-6:1-3", f"{A}:1-6,{B}:3"),
        (f"{A}:1-5,{A}:3-9", f"{A}:1-9"),
    ],
)
def test_mysql_sets_have_one_form(text: str, one_form: str) -> None:
    assert str(MysqlGtids.parse(text)) == one_form


@pytest.mark.parametrize("text", [A, f"{A}:", f"{A}:0", f"{A}:5-4", f"{A}:tag:1-4", "0-1-442", f"{A}:1,"])
def test_strange_mysql_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"GTID set|interval"):
        MysqlGtids.parse(text)


@given(st.lists(st.integers(1, 30), min_size=1, unique=True), st.integers(1, 30))
def test_mysql_set_holds_exactly_what_was_put_in(numbers: list[int], asked: int) -> None:
    gtids = MysqlGtids.parse("")
    for number in numbers:
        gtids = gtids.including(f"{A}:{number}")
    assert gtids.covers(MysqlGtids.parse(f"{A}:{asked}")) == (asked in numbers)
    assert MysqlGtids.parse(str(gtids)) == gtids
    assert hash(MysqlGtids.parse(str(gtids))) == hash(gtids)
    assert not gtids.covers(MysqlGtids.parse(f"{B}:1"))


def test_position_survives_its_json() -> None:
    position = Position("mariadb", "0-1-442,1-2-7", 12, "binlog.000003", 4711, "mariadb x /data/", "0-1-443")
    assert Position.from_json(position.to_json()) == position
    assert Position.from_json('{"flavor":"mysql","gtids":""}') == Position("mysql", "")


@pytest.mark.parametrize(
    "change",
    [
        {"flavor": "oracle"},
        {"gtids": "x"},
        {"gtids": None},
        {"rows": -1},
        {"rows": "1"},
        {"rows": 1},
        {"partial": "0-1-3"},
        {"offset": -1},
        {"more": 1},
    ],
)
def test_strange_position_is_refused(change: dict[str, object]) -> None:
    fields = json.loads(Position("mariadb", "0-1-2").to_json())
    with pytest.raises(ValueError, match=r"position|GTID|flavor|below 0|rows are"):
        Position.from_json(json.dumps(fields | change))


@pytest.mark.parametrize("text", ["[]", "{}", "1"])
def test_other_json_is_no_position(text: str) -> None:
    with pytest.raises(ValueError, match="not a position"):
        Position.from_json(text)


def test_position_covers_what_is_not_behind_it() -> None:
    position = Position("mariadb", "0-1-442", 5, partial="0-1-443")
    assert position.covers(Position("mariadb", "0-1-442", 5, partial="0-1-443"))
    assert position.covers(Position("mariadb", "0-1-441", 9, partial="0-1-442"))
    assert not position.covers(Position("mariadb", "0-1-442", 6, partial="0-1-443"))
    assert not position.covers(Position("mariadb", "0-1-443"))


def test_position_moves_to_another_server() -> None:
    position = Position("mysql", f"{A}:1-5", 2, "binlog.000001", 99, A, f"{A}:6")
    assert position.on_server(B) == Position("mysql", f"{A}:1-5", 2, "", 0, B, f"{A}:6")


def test_flavor_says_how_a_set_is_read() -> None:
    assert isinstance(parse_gtids("mariadb", "0-1-2"), MariadbGtids)
    assert isinstance(parse_gtids("mysql", f"{A}:1"), MysqlGtids)
    assert hash(MariadbGtids.parse("0-1-2")) == hash(parse_gtids("mariadb", "0-1-2"))
