"""Names of tables and columns further on in the binlog."""

from __future__ import annotations

import pytest

from txmq.binlog.decoded_changes import TableName
from txmq.binlog.source.server import later_names

T = TableName("shop", "t")


@pytest.mark.parametrize(
    ("statements", "table", "columns"),
    [
        ((), "t", {"u": "u", "n": "n"}),
        (("RENAME TABLE t TO v, x TO t", "ALTER TABLE v RENAME TO w"), "w", {"u": "u", "n": "n"}),
        (("ALTER TABLE t CHANGE u `a b` UUID, ADD c INT, RENAME COLUMN N TO m",), "t", {"u": "a b", "n": "m"}),
        (("ALTER TABLE t NOWAIT CHANGE COLUMN IF EXISTS u a UUID", "ALTER TABLE t CHANGE a b UUID"), "t", {"u": "b"}),
        (
            ("ALTER TABLE t WAIT 5 CHANGE u a UUID, RENAME v", "ALTER TABLE shop.v RENAME COLUMN a TO c"),
            "v",
            {"u": "c"},
        ),
        (('RENAME TABLE "t" TO "v"', 'ALTER TABLE v RENAME COLUMN "u" TO "c"'), "v", {"u": "c"}),
        (("ALTER TABLE other CHANGE u a UUID", "TRUNCATE t", "INSERT INTO t VALUES (1)", "COMMIT"), "t", {"u": "u"}),
    ],
)
def test_names_are_followed_through_statements(
    statements: tuple[str, ...], table: str, columns: dict[str, str]
) -> None:
    found = later_names([("shop", text) for text in statements], T, [*columns])
    assert found == (TableName("shop", table), columns)


@pytest.mark.parametrize("statement", ["DROP TABLE t", "CREATE OR REPLACE TABLE t (a INT)", "DROP DATABASE shop"])
def test_a_table_that_is_gone_has_no_later_names(statement: str) -> None:
    assert later_names([("shop", "RENAME TABLE t TO v, v TO t"), ("shop", statement)], T, ["u"]) is None
