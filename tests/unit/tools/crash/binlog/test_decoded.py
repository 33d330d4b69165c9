"""What the program mariadb-binlog prints is read as a replica would run it."""

from __future__ import annotations

import pytest

from tools.crash.binlog.decoded import decoded
from tools.crash.binlog.values import canonical, differing

HEAD = "#261123 15:14:31 server id 1  end_log_pos 100 CRC32 0x0d554369 \t"
GROUP = f"{HEAD}GTID 0-1-{{0}} trans\n/*M!100001 SET @@session.gtid_seq_no={{0}}*//*!*/;\nSTART TRANSACTION\n/*!*/;\n"
ROW = f"""{HEAD}Annotate_rows:
#Q> INSERT INTO t VALUES (1, 'x')
{HEAD}Write_rows: table id 18 flags: STMT_END_F
### INSERT INTO `shop`.`t`
### SET
###   @1=1 /* INT meta=0 nullable=0 is_null=0 */
###   @2='it's' /* VARSTRING(40) meta=40 nullable=1 is_null=0 */
### INSERT INTO `other`.`t`
### SET
###   @1=7 /* INT meta=0 nullable=0 is_null=0 */
### INSERT INTO `shop`.`t`
### SET
###   @1=-1 (4294967295) /* INT meta=0 nullable=0 is_null=0 */
###   @2=NULL /* VARSTRING(40) meta=40 nullable=1 is_null=1 */
# Number of rows: 3
"""
COMMIT = f"{HEAD}Xid = 9\nCOMMIT/*!*/;\n"


def query(text: str) -> str:
    """The event of a statement."""
    return f"{HEAD}Query\tthread_id=5\nSET TIMESTAMP=1/*!*/;\n{text}\n/*!*/;\n"


def read(text: str) -> list[tuple[str, int, str]]:
    """Each transaction's id, number of changes and statement."""
    found = decoded([f"{line}\n".encode() for line in text.split("\n")], "shop")
    return [(one.gtid, len(one.changes), one.statement) for one in found]


def test_changes_of_the_database_are_read() -> None:
    (found,) = decoded([f"{line}\n".encode() for line in (GROUP.format(1) + ROW + COMMIT).split("\n")], "shop")
    first, second = found.changes
    assert (first.gtid, first.row, first.op, first.table, first.before) == ("0-1-1", 0, "c", "t", None)
    assert first.after == ((b"1", "INT"), (b"'it's'", "VARSTRING(40)"))
    assert second.row == 1
    assert second.after is not None
    assert canonical(second.after[0]) == "4294967295"
    assert differing(second.after, {"id": 4294967295, "text": None}) == []
    assert differing(second.after, {"id": 4294967294, "text": ""}) == ["id", "text"]


def test_a_statement_by_itself_ends_with_its_group() -> None:
    statement = f"{HEAD}GTID 0-1-1 ddl\n" + query("ALTER TABLE t ADD x INT")
    assert read(statement + GROUP.format(2) + ROW + COMMIT) == [
        ("0-1-1", 0, "ALTER TABLE t ADD x INT"),
        ("0-1-2", 2, ""),
    ]


def test_what_a_killed_server_left_is_no_transaction() -> None:
    torn = GROUP.format(1) + ROW + f"{HEAD}Start: binlog v 4, server v 10.11.19 created 261123 15:14:31 at startup\n"
    assert read(torn + GROUP.format(1) + ROW + COMMIT) == [("0-1-1", 2, "")]


@pytest.mark.parametrize(("end", "rows"), [("XA COMMIT X'61',X'',1", 2), ("XA ROLLBACK X'61',X'',1", 0)])
def test_rows_of_an_xa_transaction_come_with_its_commit(end: str, rows: int) -> None:
    prepare = GROUP.format(1).replace("START TRANSACTION", "XA START X'61',X'',1") + ROW
    prepare += query("XA END X'61',X'',1") + f"{HEAD}XID = X'61',X'',1\nXA PREPARE X'61',X'',1\n/*!*/;\n"
    other = GROUP.format(2) + ROW + COMMIT
    assert read(prepare + other + GROUP.format(3).replace("START TRANSACTION\n/*!*/;\n", "") + query(end)) == [
        ("0-1-2", 2, ""), ("0-1-3", rows, ""),
    ]  # fmt: skip


def test_savepoints_end_no_transaction() -> None:
    assert read(GROUP.format(1) + query("SAVEPOINT `s`") + ROW + query("ROLLBACK TO `s`") + COMMIT) == [
        ("0-1-1", 2, "")
    ]


def test_a_line_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="not known"):
        read("### SOMETHING NEW")
