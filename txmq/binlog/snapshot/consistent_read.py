"""A consistent read of the database, and the position of the binlog at which it stands.

``START TRANSACTION WITH CONSISTENT SNAPSHOT`` takes no lock. MariaDB tells the file and offset of the binlog that it
stands at, exactly: a transaction is seen if, and only if, it stands before. The server finds the GTIDs for them.

A table that is read keeps others from altering it until the view ends: a view is short. A table that was altered after
the view began cannot be read in it (``ViewEndedError``). The one alteration that the server does not report, a column
that is added at once, is found by the table's description: taken before the view, and again when it is first read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from txmq.binlog.decoded_changes import Row, TableName, Value
from txmq.binlog.errors import SourceError
from txmq.binlog.position import Position
from txmq.binlog.snapshot.tables import SnapshotTable, describe
from txmq.binlog.source import SourceOptions
from txmq.binlog.source.server import Server, refusal
from txmq.xa.database.mysql_driver import mysql_driver

_SESSION: Final = (
    "SET SESSION time_zone = '+00:00', sql_mode = 'ALLOW_INVALID_DATES', net_write_timeout = 600",
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
)
_BEGIN: Final = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
_CHANGED: Final = frozenset({1146, 1412, 1054, 1176, 1205, 1213})  # gone, altered, no such column or index, lock waits


class ViewEndedError(Exception):
    """A table was altered since: a new view shows it as it is."""


class View:
    """See the module's docstring. Used by one thread.

    Args:
        options: which server.
        tables: those that it may read.

    Raises:
        SourceError: the server cannot be read so.
        SourceAwayError: it cannot be reached.
    """

    def __init__(self, options: SourceOptions, tables: Sequence[TableName], server: Server) -> None:
        driver = mysql_driver()
        try:
            self._connection = driver.connect(**options.connect_arguments())
        except driver.Error as error:
            raise refusal(error) from error
        try:
            for statement in _SESSION:
                self.ask(statement)
            self._described = {table: describe(self.ask, table, server.charset_named) for table in tables}
            self._server = server
            self._seen: set[TableName] = set()
            self.ask(_BEGIN)
            self.position = self._position(server)
        except BaseException:
            self.close()
            raise

    def _position(self, server: Server) -> Position:
        status = {str(name).lower(): value for name, value in self.ask(r"SHOW STATUS LIKE 'binlog\_snapshot\_%%'")}
        file, offset = str(status.get("binlog_snapshot_file", "")), int(status.get("binlog_snapshot_position", 0))
        if not file:
            raise SourceError(
                "the server does not tell at which position a consistent read stands (binlog_snapshot_file): a "
                'snapshot needs MariaDB. For MySQL take a dump, and begin at its GTIDs: snapshot.mode = "never", '
                "source.start"
            )
        return Position("mariadb", str(server.gtids_at(file, offset)), 0, file, offset, server.origin.server)

    def ask(self, sql: str, *parameters: object) -> Sequence[Any]:
        """The rows of a statement.

        Raises:
            ViewEndedError: it is of a table that was altered since.
            SourceError, SourceAwayError: it was refused, or the connection ended.
        """
        driver = mysql_driver()
        try:
            with closing(self._connection.cursor()) as cursor:
                cursor.execute(sql, parameters)
                found: Sequence[Any] = cursor.fetchall()
                return found
        except driver.Error as error:
            raise _ended(error) from error

    def table(self, table: TableName) -> SnapshotTable | None:
        """A table as it is in this view; None if it is not there.

        Raises:
            ViewEndedError: it was not described when the view began.
        """
        if table not in self._described:
            raise ViewEndedError(f"{table} is for the next view")
        return self._described[table]

    def chunk(self, table: SnapshotTable, limit: int, after: Sequence[Value]) -> Sequence[Row]:
        """The rows after a key.

        Raises:
            ViewEndedError: it was altered since.
        """
        sql, parameters = table.select(limit, after)
        rows = self.ask(sql, *parameters)
        self._require_same(table)
        return table.decoded(rows)

    def whole(self, table: SnapshotTable, limit: int) -> Iterator[Sequence[Row]]:
        """All rows of a table, in chunks that come from one SELECT."""
        driver = mysql_driver()
        sql, _ = table.select(limit, ())
        self.ask(f"{sql} LIMIT 0")
        self._require_same(table)
        try:
            cursor = self._connection.cursor(driver.cursors.SSCursor)  # closed with the view: it would read to its end
            cursor.execute(sql, ())
            while rows := cursor.fetchmany(limit):
                yield table.decoded(rows)
        except driver.Error as error:
            raise _ended(error) from error

    def _require_same(self, table: SnapshotTable) -> None:
        """From the first read on nothing alters the table until the view ends."""
        name = table.schema.table
        if name not in self._seen:
            if not table.is_like(describe(self.ask, name, self._server.charset_named)):
                raise ViewEndedError(f"{name} was altered")
            self._seen.add(name)

    def close(self) -> None:
        """End the read."""
        with suppress(mysql_driver().Error):
            self._connection.close()


def _ended(error: Exception) -> Exception:
    if error.args and error.args[0] in _CHANGED:
        return ViewEndedError(str(error))
    return refusal(error)
