"""Which tables the patterns of a configuration name."""

from __future__ import annotations

import pytest

from txmq.binlog.decoded_changes import TableName
from txmq.binlog.source.options import SYSTEM_DATABASES, captures


@pytest.mark.parametrize("database", sorted(SYSTEM_DATABASES))
def test_the_servers_own_databases_are_captured_only_by_name(database: str) -> None:
    table = TableName(database, "user")
    assert not captures(("*.*",), ())(table)
    assert not captures(("*.user", "shop.*"), ())(table)
    assert captures(("*.*", f"{database}.*"), ())(table)
    assert not captures(("*.*", f"{database}.*"), ("*.user",))(table)


def test_names_with_dots_are_matched() -> None:
    dotted = TableName("shop", "orders.2026")
    assert captures(("shop.*",), ())(dotted)
    assert captures(("shop.`orders.2026`",), ())(dotted)
    assert captures(("*.`orders.*`",), ("other.*",))(dotted)
    assert not captures(("shop.*",), ("*.`*.2026`",))(dotted)
    assert not captures(("`shop.orders`.*",), ())(dotted)
    assert captures(("`shop.orders`.`a``b c`",), ())(TableName("shop.orders", "a`b c"))
    assert captures(("`shop.orders`.*",), ())(TableName("shop.orders", "2026"))
    assert not captures(("shop.*",), ())(TableName("shop.orders", "2026"))


def test_a_star_is_any_text_of_a_name() -> None:
    is_captured = captures(("shop.*", "c*m.orders"), ("shop.tmp_*",))
    assert is_captured(TableName("shop", "items"))
    assert is_captured(TableName("crm", "orders"))
    assert not is_captured(TableName("shop", "tmp_items"))
    assert not is_captured(TableName("crm", "items"))
