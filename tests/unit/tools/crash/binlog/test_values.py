"""A value of an event and what the server's program shows of it."""

from __future__ import annotations

import pytest

from tools.crash.binlog.values import compared_key, differing


@pytest.mark.parametrize(
    ("shown", "kind", "value", "other"),
    [
        (b"-1 (255)", "TINYINT", 255, 254), (b"-1 (255)", "TINYINT", -1, 1), (b"1900", "YEAR", 0, 1900),
        (b"2155", "YEAR", 2155, 0), (b"b'101'", "BIT(3)", 5, 4), (b"0.1       ", "FLOAT", 0.10000000149, 0.11),
        (b"0.10000000000000000555", "DOUBLE", 0.1, 0.2), (b"9.90", "DECIMAL(5,2)", "9.90", "9.9"),
        (b"'2026:11:23'", "DATE", "2026-11-23", "2026-11-24"), (b"'-01:02:03.5'", "TIME(1)", "-01:02:03.5", "1"),
        (b"'2026-11-23 09:00:00.1'", "DATETIME(1)", "2026-11-23T09:00:00.1", "2026-11-23T09:00:00"),
        (b"1795424887.12", "TIMESTAMP(2)", "2026-11-23T09:08:07.12Z", "2026-11-23T09:08:07Z"),
        (b"0", "TIMESTAMP(0)", "0000-00-00T00:00:00Z", "1970-01-01T00:00:00Z"),
        (rb"'it's\x0a'", "VARSTRING(9)", "it's\n", "its\n"), (rb"'a\x00b'", "STRING(5)", b"a\0b\0\0", b"a\0\0\0\0"),
        (rb"'\x00'", "BLOB/TEXT", b"\0", b"\1"), (b"NULL", "INT", None, 0), (b"0", "INT", 0, None),
        ("'{\"a\": \"ü\"}'".encode(), "JSON", '{"a": "ü"}', '{"a": "u"}'),
    ],
)  # fmt: skip
def test_a_value_is_what_is_shown(shown: bytes, kind: str, value: object, other: object) -> None:
    assert differing(((shown, kind),), {"c": value}) == []
    assert differing(((shown, kind),), {"c": other}) == ["c"]
    assert differing(((shown, kind),), {"o": other}) == ([] if None not in (value, other) else ["o"])


def test_another_number_of_columns_differs() -> None:
    assert differing(((b"1", "INT"),), {"a": 1, "b": 2}) == ["2 columns, 1 in the binlog"]


@pytest.mark.parametrize(
    ("table", "shown", "key"),
    [
        ("tab_bytes", ["61303034"], ("a004",)), ("tab_moment", ["2026-01-01 00:00:00.05"], ("2026-01-01T00:00:00.05",)),
        ("tab_two_moved", ["3", "b1"], ("3", "b1")), ("tab_decimal", ["7.125"], ("7.125",)),
        ("tab_heap", ["c0ffee"], ()),
    ],
)  # fmt: skip
def test_keys_of_compare_are_those_of_the_binlog(table: str, shown: list[str], key: tuple[str, ...]) -> None:
    assert compared_key(table, shown) == (table, *key)
