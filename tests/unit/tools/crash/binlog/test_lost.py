"""Which transactions at the end of a binlog a server's tables lack."""

from __future__ import annotations

import pytest

from tools.crash.binlog.checker import Key
from tools.crash.binlog.decoded import Decoded, DecodedChange, Image
from tools.crash.binlog.lost import groups, missing
from tools.crash.binlog.values import canonical

TABLE = "tab_int"


def image(id_: int, stamp: int) -> Image:
    """A row as the binlog has it."""
    return (str(id_).encode(), "INT"), (str(stamp).encode(), "LONGINT")


def transaction(number: int, text: str) -> Decoded:
    """Of words such as ``u1``: the operation and the key; the stamp is the transaction's number."""
    changes = []
    for row, word in enumerate(text.split()):
        before = image(int(word[1:]), 0) if word[0] in "ud" else None
        after = image(int(word[1:]), number) if word[0] in "uc" else None
        changes.append(DecodedChange(f"0-1-{number}", row, word[0], TABLE, before, after))
    return Decoded(f"0-1-{number}", changes)


@pytest.mark.parametrize(
    ("texts", "rows", "lost"),
    [
        (["u1", "u2", "d3"], {"1": 1, "2": 2}, []),
        (["u1", "u2", "d3"], {"1": 1, "2": 2, "3": 0}, [3]),
        (["u1", "u2", "d3"], {"1": 1, "2": 0, "3": 0}, [2, 3]),
        (["u1 c2", "u1"], {"1": 2, "2": 1}, []),
        (["u1 c2", "u1"], {"1": 1, "2": 1}, [2]),
        (["u1 c2", "u1"], {"1": 0}, [1, 2]),
        (["u1", "u1", "u1"], {"1": 3}, []),
        (["u1", "u1", "u1"], {"1": 1}, [2, 3]),
        (["u1", "d1", "c1"], {"1": 3}, []),
        (["u1", "d1", "c1"], {}, [3]),
        (["u1", "d1", "c1"], {"1": 1}, [2, 3]),
        (["c1 d1", "u2"], {"2": 2}, []),
    ],
)
def test_what_the_tables_lack_is_lost(texts: list[str], rows: dict[str, int], lost: list[int]) -> None:
    def is_there(key: Key, after: Image | None) -> bool:
        found = rows.get(key[1])
        return found is None if after is None else canonical(after[1]) == str(found)

    transactions = [transaction(number, text) for number, text in enumerate(texts, 1)]
    assert missing(transactions, is_there) == [f"0-1-{number}" for number in lost]


def test_rows_of_later_statements_and_xa_say_nothing() -> None:
    xa = Decoded("0-1-3", transaction(2, "u1").changes)
    statement = Decoded("0-1-4", [], f"TRUNCATE {TABLE}")
    for later in (xa, statement):
        assert missing([transaction(1, "u1"), later], lambda *_: False) == []
    assert missing([xa, transaction(5, "u1")], lambda *_: False) == ["0-1-5"]


def test_a_row_of_several_names_is_one_row() -> None:
    text, rows = "tab_text", [((name, "VARSTRING(20)"), (b"%d" % stamp, "LONGINT")) for name, stamp in (
        (b"'k1'", 1), (b"'K1'", 2),
    )]  # fmt: skip
    first = Decoded("0-1-1", [DecodedChange("0-1-1", 0, "c", text, None, rows[0])])
    second = Decoded("0-1-2", [DecodedChange("0-1-2", 0, "u", text, rows[0], rows[1])])
    asked = list[Key]()

    def is_there(key: Key, after: Image | None) -> bool:
        asked.append(key)
        return after == rows[1]

    assert missing([first, second], is_there) == []
    assert asked == [(text, "k1")]


def test_what_nobody_can_say_is_not_lost() -> None:
    assert missing([transaction(1, "u1"), transaction(2, "u1")], lambda *_: None) == []


def test_the_session_of_what_is_left_out_is_kept() -> None:
    head = "#261123 15:14:31 server id 1  end_log_pos 100 CRC32 0x0d554369 \t"
    lines = [
        "DELIMITER /*!*/;", f"{head}Start: binlog v 4", "BINLOG 'format'", f"{head}GTID 0-1-1 trans",
        "/*M!100001 SET @@session.gtid_seq_no=1*//*!*/;", "START TRANSACTION", "SET @@session.sql_mode=2/*!*/;",
        "BINLOG 'one'", "COMMIT", f"{head}GTID 0-1-2 trans", "/*M!100001 SET @@session.gtid_seq_no=2*//*!*/;",
        "START TRANSACTION", "BINLOG 'two'", "COMMIT", "DELIMITER ;",
    ]  # fmt: skip
    found = [line.decode() for line in groups([line.encode() for line in lines], ["0-1-2"])]
    assert [line for line in found if not line.startswith("#")] == [
        "DELIMITER /*!*/;", "BINLOG 'format'", "SET @@session.sql_mode=2/*!*/;", "START TRANSACTION", "BINLOG 'two'",
        "COMMIT", "DELIMITER ;",
    ]  # fmt: skip
