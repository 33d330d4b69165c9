"""What the programs mariadb-binlog and mysqlbinlog print is read as a replica would run it."""

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
UUID = "fb61775d-ec05-11f1-8d92-02fc00000001"
NEXT = (
    f"{HEAD}GTID\tlast_committed=0\tsequence_number=1\trbr_only=yes\ttransaction_length=185\n"
    "/*!80014 SET @@session.original_server_version=90704*//*!*/;\n"
    f"SET @@SESSION.GTID_NEXT= '{UUID}:{{0}}'/*!*/;\n"
)
END_OF_FILE = "SET @@SESSION.GTID_NEXT= 'AUTOMATIC' /* added by mysqlbinlog */ /*!*/;\nDELIMITER ;\n"


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


def mysql(number: int, *rest: str) -> str:
    """A group of MySQL."""
    return NEXT.format(number) + "".join(rest)


def test_groups_of_mysql_are_read() -> None:
    made = "CREATE TABLE `t` (\n  `id` int\n) START TRANSACTION"
    shown = mysql(1, query("CREATE TABLE t (id INT)")) + mysql(2, query("BEGIN"), ROW, COMMIT)
    shown += mysql(3, query("BEGIN"), query(made), ROW, COMMIT) + mysql(4, query("DROP TABLE t")) + END_OF_FILE
    assert read(shown) == [
        (f"{UUID}:1", 0, "CREATE TABLE t (id INT)"), (f"{UUID}:2", 2, ""), (f"{UUID}:3", 2, made),
        (f"{UUID}:4", 0, "DROP TABLE t"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (["PREPARE"], []), (["PREPARE", "COMMIT"], [(f"{UUID}:2", 2, "")]),
        (["PREPARE", "ROLLBACK"], [(f"{UUID}:2", 0, "")]), (["COMMIT ONE PHASE"], [(f"{UUID}:1", 2, "")]),
    ],
)  # fmt: skip
def test_xa_transactions_of_mysql_come_with_their_commit(ends: list[str], told: list[tuple[str, int, str]]) -> None:
    xid = "X'61',X'',1"
    word, *more = ends[0].partition(" ")
    shown = mysql(1, query(f"XA START {xid}"), ROW, query(f"XA END {xid}"))
    shown += f"{HEAD}XA PREPARE {xid}\nXA {word} {xid}{''.join(more)}\n/*!*/;\n"
    for number, end in enumerate(ends[1:], 2):
        shown += mysql(number, query(f"XA {end} {xid}"))
    assert read(shown + END_OF_FILE) == told
