"""The tables of ``MarkerTable``: how they are made, and what the server itself makes sure of.

In MySQL and MariaDB a marker refers to the database's identity by a foreign key, so that one of another identity does
not get in (``insert_committed_or_fail``). It needs no query: InnoDB looks the key up in the index. Tables that an older
txmq has made, or a user who may not refer to a table, have none; then the INSERT reads the identity, as elsewhere.
"""

from __future__ import annotations

import re
from contextlib import suppress

from txmq.runtime.logging import get_logger
from txmq.xa.database.dbapi import Connection, is_error, run, text
from txmq.xa.database.marker_table import MarkerTable, own_transaction
from txmq.xa.database.token_table import TokenTable

_KEY = re.compile(r"FOREIGN KEY \(`uuid`\) REFERENCES [^ ]*_identity` \(`uuid`\)")


def statements(table: MarkerTable) -> list[str]:
    """What creates the missing tables, in this order; the markers come last."""
    d, name = table.dialect, table.name
    identity = f"id {d.number} NOT NULL PRIMARY KEY, name {d.text} NOT NULL, uuid {d.text} NOT NULL, "
    identity += f"cluster {d.text} NOT NULL{d.identity_key}"
    return [
        f"CREATE TABLE IF NOT EXISTS {name}_identity ({identity}){d.table_options}",
        TokenTable(table).statement(),
        _markers(table, d.marker_key.format(table=name)),
    ]


def _markers(table: MarkerTable, key: str) -> str:
    d = table.dialect
    columns = f"txid {d.text} NOT NULL PRIMARY KEY, outcome {d.text} NOT NULL, deadline_ms {d.number} NOT NULL, "
    columns += f"written_ms {d.number} NOT NULL, seen {d.number} NOT NULL"
    return f"CREATE TABLE IF NOT EXISTS {table.name} ({columns}{key}){d.table_options}"


def create_tables(connection: Connection, table: MarkerTable) -> None:
    """Create missing tables. Databases commit that by themselves, or here."""
    *others, markers = statements(table)
    with own_transaction(connection, table.dialect):
        for statement in others:
            run(connection, statement)
        try:
            run(connection, markers)
        except Exception as error:
            if not (is_error(error) and table.dialect.marker_key):
                raise
            get_logger(table=table.name).warning("markers without their foreign key are slower", error=str(error))
            run(connection, _markers(table, ""))


def look_for_key(connection: Connection, table: MarkerTable) -> None:
    """See whether the markers have their foreign key. Outside any transaction."""
    if not table.dialect.marker_key:
        return
    try:
        ((_, definition),) = run(connection, f"SHOW CREATE TABLE {table.name}")[0]
        table.has_key = _KEY.search(text(definition)) is not None
    finally:
        with suppress(Exception):  # if this fails, the connection is lost: the next statement says so
            connection.rollback()
