"""Status variables of a statement's event: what they say of its session, and what is refused."""

from __future__ import annotations

import struct

import pytest

from txmq.binlog.position import Flavor
from txmq.binlog.source.events import StatusVariables, status_variables

NAMES = {8: "latin1_swedish_ci", 33: "utf8mb3_general_ci", 45: "utf8mb4_general_ci", 2304: "utf8mb4_uca1400_ai_ci"}
FLAGS, MODE = b"\0" + struct.pack("<I", 1 << 24), b"\1" + struct.pack("<Q", 1 << 21 | 4)
CHARSET = b"\4" + struct.pack("<HHH", 8, 45, 33)
ZONE = b"\5\x0dEurope/Berlin"


def session(status: bytes, flavor: Flavor = "mariadb") -> dict[str, object]:
    return dict(status_variables(status).session(flavor, 100, NAMES.__getitem__, lambda: "clock"))


def test_each_variable_is_told_by_its_name() -> None:
    status = (
        FLAGS + MODE + b"\6\3std" + b"\3\2\0\1\0" + CHARSET + ZONE + b"\7\5\0" + b"\x08\x08\0" + b"\x09" + bytes(8)
        + b"\x0a" + bytes(4) + b"\x0b\2me\4host" + b"\x80\1\0\0" + b"\x81" + bytes(8) + b"\x82\4" + bytes(8) + b"\xff"
    )  # fmt: skip
    assert session(status) == {
        "timestamp": 100.000001, "sql_mode": "ANSI_QUOTES,STRICT_TRANS_TABLES", "lc_time_names": 5,
        "auto_increment_increment": 2, "auto_increment_offset": 1, "unique_checks": 1, "sql_auto_is_null": 0,
        "check_constraint_checks": 1, "explicit_defaults_for_timestamp": 1, "sql_if_exists": 0,
        "collation_connection": "utf8mb4_general_ci", "collation_server": "utf8mb3_general_ci",
        "collation_database": "latin1_swedish_ci", "time_zone": "Europe/Berlin",
    }  # fmt: skip
    assert status_variables(status).charset == 8


def test_variables_of_mysql_are_told_by_their_names() -> None:
    status = (
        b"\0" + struct.pack("<I", 1 << 26 | 1 << 27 | 1 << 19) + b"\2\3std\0" + b"\x0c\2a\0bc\0" + b"\x0d\2\0\0"
        + b"\x10\1" + b"\x11" + bytes(8) + b"\x12\x2d\0" + b"\x13\1" + b"\x14\1"
    )  # fmt: skip
    found = session(status, "mysql")
    assert {name: found[name] for name in ("timestamp", "unique_checks", "explicit_defaults_for_timestamp")} == {
        "timestamp": 100.000002, "unique_checks": 0, "explicit_defaults_for_timestamp": 1,
    }  # fmt: skip
    assert (found["default_collation_for_utf8mb4"], found["sql_require_primary_key"]) == ("utf8mb4_general_ci", 1)
    assert found["default_table_encryption"] == 1
    assert not {"time_zone", "sql_if_exists", "foreign_key_checks"} & found.keys()


def test_default_collations_stand_before_the_character_set() -> None:
    found = status_variables(b"\x83\1" + struct.pack("<HH", 45, 2304) + CHARSET)
    assert found.charset == 8
    told = found.session("mariadb", 0, NAMES.__getitem__, str)
    assert told["character_set_collations"] == "utf8mb4=utf8mb4_uca1400_ai_ci"


def test_time_zone_of_the_machine_is_told_with_its_clock() -> None:
    found = session(b"\5\6SYSTEM")
    assert (found["time_zone"], found["system_clock"]) == ("SYSTEM", "clock")


@pytest.mark.parametrize(
    ("status", "flavor"),
    [
        (MODE + b"\x63\1", "mariadb"), (b"\0" + struct.pack("<I", 1 << 29), "mariadb"),
        (b"\0" + struct.pack("<I", 1 << 24), "mysql"), (b"\1" + struct.pack("<Q", 1 << 40), "mariadb"),
        (b"\1" + struct.pack("<Q", 1 << 33), "mysql"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(status: bytes, flavor: Flavor) -> None:
    with pytest.raises(ValueError, match="not known"):
        session(status, flavor)


def test_what_comes_before_an_unknown_variable_is_read() -> None:
    found = status_variables(MODE + CHARSET + b"\x63")
    assert isinstance(found, StatusVariables)
    assert (found.charset, found.sql_mode("mariadb")) == (8, frozenset({"ANSI_QUOTES", "STRICT_TRANS_TABLES"}))


@pytest.mark.parametrize("status", [FLAGS[:-1], ZONE[:-1], b"\x0b\2me\4hos", b"\x82\4\0", b"\x0c\2a\0b"])
def test_cut_off_variable_is_refused(status: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut off|not found"):
        status_variables(status)
