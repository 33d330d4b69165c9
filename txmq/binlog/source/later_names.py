"""What a table and its columns are called further on in the binlog: the database knows them by those names alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from txmq.binlog.decoded_changes import DdlKind, TableName
from txmq.binlog.statements import What, recognise, renamed_columns


class LaterNames(NamedTuple):
    """``columns``: of each name of before the name that it has then."""

    table: TableName
    columns: dict[str, str]


# SHOW BINLOG EVENTS does not tell a statement's mode. In either one, what stands in double quotes where a name does
# is a name.
_MODE = frozenset({"ANSI_QUOTES"})


def later_names(statements: Iterable[tuple[str, str]], table: TableName, columns: Sequence[str]) -> LaterNames | None:
    """Names after these statements; None if the table is dropped, or made anew.

    Args:
        statements: in order; before each the database in which it was run.
    """
    names = {name: name for name in columns}
    for database, text in statements:
        found = recognise(text, database, _MODE)
        if found.what is not What.DDL or found.ddl is None:
            continue
        ddl = found.ddl
        if ddl.kind is not DdlKind.TRUNCATE and (table in ddl.emptied or TableName(table.database, "") in ddl.emptied):
            return None
        if table in ddl.changed:
            changed = renamed_columns(text, database, _MODE)
            names = {name: changed.get(now.lower(), now) for name, now in names.items()}
        for old, new in ddl.moved:
            table = new if table == old else table
    return LaterNames(table, names)
