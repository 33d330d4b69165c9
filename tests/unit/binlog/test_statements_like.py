"""CREATE TABLE ... LIKE concerns both tables: it must not be run after a later statement has changed the older one."""

from __future__ import annotations

import pytest

from txmq.binlog.changes import DdlKind, TableName
from txmq.binlog.statements import recognise


@pytest.mark.parametrize("text", ["CREATE TABLE a LIKE b.c", "CREATE TABLE IF NOT EXISTS `a` (LIKE b.`c`)"])
def test_the_table_that_a_new_one_is_like_is_named(text: str) -> None:
    ddl = recognise(text, "shop").ddl
    assert ddl is not None
    assert (ddl.kind, ddl.tables) == (DdlKind.CREATE, (TableName("shop", "a"), TableName("b", "c")))
