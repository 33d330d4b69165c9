"""Statements of a body whose work outlives the transaction: the connection is not given to another block."""

from __future__ import annotations

import pytest

from txmq.xa.database.guarded_connection import Guard

LASTING = (
    "USE mysql",
    "set names utf8",
    "\n reset all",
    "INSERT INTO t VALUES (1); SET SESSION wait_timeout = 5",
    "a;b;use x",
)
OF_THE_TRANSACTION = (
    "SELECT 1", "UPDATE t SET a = 1", "SET LOCAL x = 1", "SET TRANSACTION READ ONLY", "set @mine = 1", "; SELECT 1; ",
    "settle", "x" * 500 + "; USE mysql",
)  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "lasts"), [*((text, True) for text in LASTING), *((text, False) for text in OF_THE_TRANSACTION)]
)
def test_statement_that_outlives_the_transaction_is_noted(statement: str, lasts: bool) -> None:
    guard = Guard()
    guard.call(lambda text: text, statement)
    assert guard.is_changed is lasts
