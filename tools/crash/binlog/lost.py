"""What a killed source's engine has lost of its own binlog is put back, so that both say the same of what follows.

Theory of operation. A server with ``Ability.LOSES_ONE_PHASE`` (MariaDB) commits an XA transaction in one phase as it
commits any other: the engine prepares, the binlog has the transaction, the engine commits. A kill between the last two
leaves it prepared under the xid, which the binlog does not name: recovery does not know it again. The load does not
either, and rolls it back. Every reader of the binlog has it. If the load changed the same rows again, the binlog would
contradict itself; and a snapshot that was read meanwhile stands at a position that its rows do not have. An applier
would stop with a conflict, as a replica does.

So the last transactions of the killed server's file are looked for in its tables. Each change of a row has a stamp of
its own. If one is missing, what is prepared and unknown to the binlog is rolled back, and the missing one is run again;
both without a binlog. A session has one such transaction at a time.

What InnoDB has committed has all before it. So a row that a later transaction has changed, or a table that a later
statement has, says nothing of an earlier one, unless the later one is lost. A transaction with an XA PREPARE of its own
is never lost: if its end is, the load ends it again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Reversible, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import MySQLdb

from tools.crash.binlog.checker import Key, folded, halves
from tools.crash.binlog.decoded import Decoded, Image, read_binlog
from tools.crash.binlog.load import prepared
from tools.crash.binlog.replay import GROUP, binlog_lines, run_lines
from tools.crash.binlog.tables import DATABASE, TABLE_NAME, key_columns, key_width
from tools.crash.binlog.values import canonical
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa.database.dbapi import run

LOOKED_AT: Final = 40  # transactions and statements; the load has nine sessions
_UNLOGGED: Final = b"SET sql_log_bin = 0;"
_PREPARED: Final = re.compile(rb"XA PREPARE X'(\w+)'")
_NO_TABLE: Final = 1146
_OF_THE_SESSION: Final = (b"SET ", b"/*", b"use ", b"DELIMITER ")
_ID: Final = b"/*M!100001 SET @@session.gtid_seq_no"  # refused, for the server has it
IsThere = Callable[[Key, Image | None], bool | None]


def put_back(server: MariaDB, files: Sequence[Path]) -> list[str]:
    """Run again what a server's engine has lost of the end of its binlog; nobody writes or reads meanwhile.

    Args:
        files: up to the one that was written to when the server was killed.

    Returns:
        The ids of these transactions.

    Raises:
        CampaignError: it cannot be run.
    """
    last = deque(read_binlog(files[-1:], DATABASE), maxlen=LOOKED_AT)
    with closing(server.connect(autocommit=True)) as connection:
        lost = missing(last, lambda key, after: _is_there(connection, key, after))
        if lost:
            _roll_back_unknown(connection, binlog_lines(files))
            run_lines(server, [_UNLOGGED, *groups(binlog_lines(files[-1:]), lost)])
    return lost


def _roll_back_unknown(connection: Any, lines: Iterable[bytes]) -> None:
    """End what is prepared of which the binlog has no XA PREPARE."""
    known = {found[1] for line in lines if (found := _PREPARED.match(line)) is not None}
    run(connection, _UNLOGGED.decode())
    for name in prepared(connection):
        if name.encode().hex().encode() not in known:
            run(connection, f"XA ROLLBACK '{name}'")


def missing(transactions: Reversible[Decoded], is_there: IsThere) -> list[str]:
    """The ids of those that are not in the tables.

    Args:
        is_there: whether a row is as it was after a change; None if nobody can say.
    """
    lost, changed, tables = list[str](), set[Key](), set[str]()
    for transaction in reversed(transactions):
        rows = {folded(key): after for change in transaction.changes for _, key, _, after in halves(change)}
        told = [] if _is_xa(transaction) else [key for key in rows if key not in changed and key[0] not in tables]
        if any(is_there(key, rows[key]) is False for key in told):
            lost.insert(0, transaction.gtid)
        else:
            changed |= rows.keys()
            tables |= set(TABLE_NAME.findall(transaction.statement))
    return lost


def _is_xa(transaction: Decoded) -> bool:
    return any(change.gtid != transaction.gtid for change in transaction.changes)


def groups(lines: Iterable[bytes], gtids: Collection[str]) -> Iterator[bytes]:
    """Of the output of ``binlog_lines`` some transactions, and what they need of the rest."""
    wanted, is_wanted = {gtid.encode() for gtid in gtids}, True
    for line in lines:
        if (found := GROUP.match(line)) is not None:
            is_wanted = found[1] is None or found[1] in wanted
        if (is_wanted or line.startswith(_OF_THE_SESSION)) and not line.startswith(_ID):
            yield line


def _is_there(connection: Any, key: Key, after: Image | None) -> bool | None:
    table, *values = key
    width = key_width(table)
    if not width and after is None:
        return None
    names = [name for name, _ in key_columns(table)] if width else ["id"]
    conditions = " AND ".join(f"REPLACE(CAST({name} AS CHAR), ' ', 'T') = %s" for name in names)
    stamp = None if after is None else canonical(after[len(names)])
    try:
        ((found,),) = run(
            connection,
            f"SELECT COUNT(*) FROM {table} WHERE {conditions} AND (%s IS NULL OR stamp = %s)",
            (*values[: len(names)], stamp, stamp),
        )[0]
    except MySQLdb.ProgrammingError as error:
        if error.args[0] != _NO_TABLE:
            raise
        return None  # a statement after it has dropped or renamed the table
    return bool(found) == (after is not None)
