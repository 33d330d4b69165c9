"""One connection to the target, and what is written over it: changes with their partitions' offsets, in a transaction.

Invariants:
    * the offset is saved before the rows are written, under the generation of the queue: a process that has lost the
      partition writes nothing, and one whose COMMIT had no answer finds that its offset is saved;
    * a transaction is committed whole or not at all; after an error the connection is closed.

Source: MariaDB 10.11, "sql_mode", "SET TRANSACTION".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

from txmq.binlog.apply.net_changes import OutOfStepError, RowEvent, Statement, statements
from txmq.binlog.apply.tables import TargetTables
from txmq.binlog.config import ApplySettings, SourceSettings
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import TargetAwayError, TargetError
from txmq.client import DatabaseOffsetStore, OffsetPosition
from txmq.errors import FencedError, TransactionStateError, TxmqError
from txmq.runtime.crashpoints import SimulatedCrash, crash_point
from txmq.xa.database.dbapi import is_error, run
from txmq.xa.database.dialects import MYSQL
from txmq.xa.database.mysql_driver import mysql_driver, tls_arguments

# Values that do not fit are refused, and dates that do not exist are written as they are.
STRICT = "STRICT_ALL_TABLES,ALLOW_INVALID_DATES,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION"
LENIENT = "ALLOW_INVALID_DATES,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION"
TARGET = "the target"
_DUPLICATE = 1062  # ER_DUP_ENTRY
_TRUNCATED = 1265  # WARN_DATA_TRUNCATED
_SESSION = (
    "SET NAMES utf8mb4",
    # The source's rows are written, whatever it has checked; MySQL has no such switch.
    "SET SESSION time_zone = '+00:00', foreign_key_checks = 0, autocommit = 0 /*M! , check_constraint_checks = 0 */",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",  # fewer locks between rows
)
Changes = Mapping[TableName, Sequence[RowEvent]]


class Written(NamedTuple):
    """What is written of a partition: from the offset ``first`` to ``position``, which is after the last message."""

    position: OffsetPosition
    first: int


class DuplicateError(OutOfStepError):
    """Another row has a value that must be unique."""


class AppliedError(Exception):
    """The messages below ``offset`` are in the target already."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def connector(settings: ApplySettings | SourceSettings, *, is_patient: bool = False) -> Callable[[], Any]:
    """What makes a connection to a database.

    Args:
        is_patient: an answer may take however long; else the connection is lost after ``silence_ms_max``.
    """
    place = (
        {"unix_socket": settings.unix_socket}
        if settings.unix_socket
        else {"host": settings.host, "port": settings.port} | tls_arguments(settings.tls)
    )
    named = {
        "user": settings.user, "passwd": settings.password, "charset": "utf8mb4", "binary_prefix": True,
        "multi_statements": False,
    }  # fmt: skip
    timeouts = {"connect_timeout": settings.connect_timeout_ms // 1000}
    if not is_patient:
        timeouts |= dict.fromkeys(("read_timeout", "write_timeout"), settings.silence_ms_max // 1000)
    return lambda: mysql_driver().connect(**place, **named, **timeouts)


def open_session(connect: Callable[[], Any], sql_mode: str, side: str = TARGET) -> Any:
    """A connection whose session writes values as the source has them.

    Raises:
        TargetAwayError, TargetError: it cannot be made.
    """
    try:
        connection = connect()
        for statement in (*_SESSION, f"SET SESSION sql_mode = '{sql_mode}'"):
            run(connection, statement)
    except Exception as error:
        raise as_binlog_error(error, side) from error
    return connection


def as_binlog_error(error: BaseException, side: str = TARGET) -> BaseException:
    """A driver's error as one of ours; others stay as they are."""
    if isinstance(error, TxmqError) or not is_error(error):
        return error
    if MYSQL.may_pass(error):
        return TargetAwayError(f"{side}: {error}")
    return TargetError(f"{side} refuses: {error}")


class Target:
    """See the module's docstring. Used by one thread.

    Args:
        connect: makes a connection.
    """

    def __init__(
        self, connect: Callable[[], Any], tables: TargetTables, store: DatabaseOffsetStore, group: str
    ) -> None:
        self._connect, self._tables, self._store, self._group = connect, tables, store, group
        self._connection: Any = None

    def write(self, offsets: Sequence[Written], changes: Changes, *, overwrites: bool = False) -> None:
        """Write changes, and save the offset after them of each partition.

        Raises:
            AppliedError: some are written already.
            OutOfStepError: source and target differ; nothing was written.
            FencedError: the partition is another process's.
            TargetAwayError: nothing was written, or its COMMIT had no answer: the next call finds out.
            TargetError: the target refuses a change.
        """
        try:
            connection = self._opened()
            for position, first in offsets:
                self._save_offset(connection, position, first)
            for name, events in changes.items():
                table = self._tables.get(connection, name)
                for statement in statements(table, events, overwrites=overwrites):
                    _run(connection, statement)
            crash_point("binlog.apply.filled")
            connection.commit()
            crash_point("binlog.apply.committed")
        except SimulatedCrash:
            raise
        except BaseException as error:
            self.close()
            if is_error(error) and error.args[:1] == (_DUPLICATE,):
                raise DuplicateError(str(error.args[1])) from error
            known = as_binlog_error(error)
            if known is error:
                raise
            raise known from error

    def _save_offset(self, connection: Any, position: OffsetPosition, first: int) -> None:
        try:
            self._store.save_in(connection, self._group, position, None, most=first)
        except FencedError:
            raise
        except TransactionStateError:
            found = self._store.saved(self._group, position.slot)
            if found is None or found.offset <= first:
                raise
            raise AppliedError(found.offset) from None

    def _opened(self) -> Any:
        if self._connection is None:
            self._connection = open_session(self._connect, STRICT)
        return self._connection

    def close(self) -> None:
        """Undo what is not committed, and end the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()


def _run(connection: Any, statement: Statement) -> None:
    if statement.is_lenient:
        run(connection, f"SET SESSION sql_mode = '{LENIENT}'")
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement.sql, statement.parameters)
        changed = cursor.rowcount
    if statement.is_lenient:
        _refuse_other_warnings(connection)
        run(connection, f"SET SESSION sql_mode = '{STRICT}'")
    if statement.rows is not None and changed != statement.rows:
        raise OutOfStepError(f"{changed} of {statement.rows} rows are there")


def _refuse_other_warnings(connection: Any) -> None:
    for level, number, text in run(connection, "SHOW WARNINGS")[0]:
        if int(number) != _TRUNCATED:
            raise TargetError(f"the target changes a value: {level} {number}: {text}")
