"""The target database: its tables, and one connection over which changes are written with their partitions' offsets.

Theory of operation. Tables are as the target's information schema describes them; each is read when it is first met.

A partition's changes of a table become few statements: the net change of each row, by its key. Of all changes of a row
only two things count: whether the row was there before the first one, and what it is after the last one. So a batch
becomes two statements for a table: one deletes the rows that were there, one inserts what there is now. Deletion comes
first, so that a value of a unique key is free before it is taken.

The number of rows that the first statement deletes must be what the changes say, and the second one must meet no row
of the same key. A row that is inserted and deleted again must not be there: it is deleted, and none may be found. If
one of this fails, source and target differ, and the caller applies the changes one by one.

A table without a key has no net changes: its rows are deleted and inserted one by one, in order.

Invariants:
    * the offset is saved before the rows are written, under the generation of the queue: a process that has lost the
      partition writes nothing, and one whose COMMIT had no answer finds that its offset is saved;
    * a transaction is committed whole or not at all; after an error the connection is closed.

Source: MariaDB 10.11, "sql_mode", "SET TRANSACTION".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from txmq.binlog.config import ApplySettings, SourceSettings
from txmq.binlog.decoded_changes import Op, TableName
from txmq.binlog.errors import TargetAwayError, TargetError
from txmq.client import DatabaseOffsetStore, OffsetPosition
from txmq.errors import FencedError, TransactionStateError, TxmqError
from txmq.runtime.crashpoints import SimulatedCrash, crash_point
from txmq.xa.database.dbapi import Connection, is_error, run
from txmq.xa.database.dialects import MYSQL
from txmq.xa.database.mysql_server import mysql_driver, tls_arguments

STATEMENT_ROWS_MAX, STATEMENT_BYTES_MAX = 1000, 4 << 20  # below the least max_allowed_packet that is common
Item = TypeVar("Item")
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
_COLUMNS = (
    "SELECT column_name, data_type, column_type, character_set_name, generation_expression "
    "FROM information_schema.columns WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position"
)
_KEYS = (
    "SELECT s.index_name, s.column_name, s.nullable FROM information_schema.statistics s "
    "WHERE s.table_schema = %s AND s.table_name = %s AND s.non_unique = 0 "
    "ORDER BY s.index_name <> 'PRIMARY', s.index_name, s.seq_in_index"
)
_OPAQUE = frozenset(
    {
        "vector", "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon",
        "geometrycollection", "geomcollection",
    }
)  # fmt: skip
_MEMBER = re.compile("'((?:[^']|'')*)'")  # of an ENUM
Row = Mapping[str, Any]  # values by column, as ``event_json.read_event`` has them


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column.

    Args:
        type: without its size: ``int``, ``enum``, ``timestamp``.
        full_type: as it was declared: ``enum('a','b')``.
        is_text: it has a character set.
        is_generated: the database computes it.
    """

    name: str
    type: str
    full_type: str = ""
    is_text: bool = False
    is_generated: bool = False

    @property
    def is_opaque(self) -> bool:
        """Its values are bytes that are compared as such in hex alone: geometries, of whichever kind, and vectors."""
        return self.type in _OPAQUE

    @property
    def has_empty_member(self) -> bool:
        """Whether it declares an empty text."""
        return "" in _MEMBER.findall(self.full_type)

    def value(self, found: Any) -> Any:
        """The value of an event as SQL takes it, in a session whose time zone is UTC."""
        if self.type == "timestamp" and isinstance(found, str):
            return found.removesuffix("Z").replace("T", " ")
        return found


@dataclass(frozen=True)
class TargetTable:
    """A table.

    Args:
        key: the columns that name a row: of the primary key, else of the first unique key without NULL; none: all
            columns name it.
    """

    name: TableName
    columns: tuple[TargetColumn, ...]
    key: tuple[str, ...]

    @cached_property
    def stored(self) -> tuple[TargetColumn, ...]:
        """The columns that are written."""
        return tuple(column for column in self.columns if not column.is_generated)

    @cached_property
    def enums(self) -> tuple[TargetColumn, ...]:
        """The columns of type ENUM in which an empty text is the error value, and no member."""
        return tuple(column for column in self.stored if column.type == "enum" and not column.has_empty_member)

    @cached_property
    def sql(self) -> str:
        """Its name in a statement with parameters."""
        return f"{quoted(self.name.database)}.{quoted(self.name.name)}"

    @cached_property
    def _key_columns(self) -> tuple[TargetColumn, ...]:
        known = {column.name: column for column in self.columns}
        return tuple(known[name] for name in self.key)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(column.name for column in self.columns)

    def key_of(self, row: Row) -> tuple[Any, ...]:
        """The values that name a row."""
        return tuple([column.value(row[column.name]) for column in self._key_columns])

    def values_of(self, row: Row) -> tuple[Any, ...]:
        """The values to write, in the order of ``stored``."""
        return tuple([column.value(row[column.name]) for column in self.stored])

    def require_columns(self, row: Row) -> None:
        """Refuse a row that does not have this table's columns.

        Raises:
            TargetError: names the first one that is missing on either side.
        """
        if row.keys() == self._names:
            return
        for name in row:
            if name not in self._names:
                raise TargetError(f"{self.name}: the target has no column {name}: give it the source's columns")
        missing = next((column.name for column in self.stored if column.name not in row), None)
        if missing is not None:
            raise TargetError(f"{self.name}: the source's row has no column {missing}, which the target has")


class TargetTables:
    """The tables met so far. Thread safety: any thread; two may read one table at the same time, with one result.

    Args:
        database: the name of a database in the target, by a pattern with ``{database}``.
    """

    def __init__(self, database: str) -> None:
        self._database = database
        self._known: dict[TableName, TargetTable] = {}

    def name(self, table: TableName) -> TableName:
        """What a table of the source is called in the target."""
        return TableName(self.database(table.database), table.name)

    def database(self, name: str) -> str:
        """What a database of the source is called in the target."""
        return self._database.replace("{database}", name)

    def get(self, connection: Connection, table: TableName) -> TargetTable:
        """The target's table for one of the source.

        Raises:
            TargetError: it is not there.
        """
        found = self._known.get(table)
        if found is None:
            found = self._known[table] = read_table(connection, self.name(table))
        return found

    def forget(self) -> None:
        """Read every table again when it is met next: a statement may have changed it."""
        self._known.clear()


def read_table(connection: Connection, name: TableName) -> TargetTable:
    """Read a table's columns and key.

    Raises:
        TargetError: it is not there.
    """
    columns = tuple(_column(row) for row in run(connection, _COLUMNS, name)[0])
    if not columns:
        raise TargetError(f"{name}: the target has no such table: create it as it is at the source")
    return TargetTable(name, columns, _key(run(connection, _KEYS, name)[0]))


def _column(row: Sequence[Any]) -> TargetColumn:
    name, type_, full_type, character_set, generation = map(_text, row)
    return TargetColumn(name, type_.lower(), full_type, bool(character_set), bool(generation))


def _key(rows: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    keys: dict[str, list[tuple[str, bool]]] = {}
    for index, column, nullable in rows:
        # MySQL lists the parts of an index that are expressions without a column.
        keys.setdefault(_text(index), []).append((_text(column), column is None or _text(nullable) == "YES"))
    usable = [columns for columns in keys.values() if not any(nullable for _, nullable in columns)]
    return tuple(column for column, _ in usable[0]) if usable else ()


def _text(value: Any) -> str:
    return "" if value is None else value.decode("utf-8") if isinstance(value, bytes) else str(value)


def json_as_text(sql: str) -> str:
    """SQL of what JSON's text tells of a document. MySQL stores more: which numbers are DECIMAL, which texts dates."""
    return f"CAST(CAST(CAST({sql} AS CHAR) AS JSON) AS CHAR)"


def quoted(name: str) -> str:
    """A name in a statement with parameters: ``%`` is doubled for the driver."""
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"


# --- net changes ------------------------------------------------------------------------------------------------------


class RowEvent(NamedTuple):
    """A change of a row, as its event says."""

    op: str
    before: Row | None
    after: Row | None


class OutOfStepError(Exception):
    """The changes contradict each other, or the target's rows: they are applied one by one, to find the row."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement.

    Args:
        rows: how many it must change; None: any number.
        is_lenient: it writes a value that strict mode refuses though the source has it: an ENUM's error value.
    """

    sql: str
    parameters: tuple[Any, ...]
    rows: int | None = None
    is_lenient: bool = False


@dataclass(slots=True)
class _Net:
    was_there: bool | None  # None: not known, of a snapshot's row
    row: Row | None


def statements(table: TargetTable, events: Sequence[RowEvent], *, overwrites: bool = False) -> Iterator[Statement]:
    """The statements that bring a table from before the first event to after the last one.

    Args:
        overwrites: rows are deleted if they are there, and replace what has their keys.

    Raises:
        OutOfStepError: the events cannot follow one another.
    """
    for event in events:
        for row in (event.before, event.after):
            if row is not None:
                table.require_columns(row)
    if not table.key:
        yield from _one_by_one(table, events, rows=None if overwrites else 1)
        return
    nets = _nets(table, events, overwrites=overwrites)
    yield from _deletes(table, nets, is_counted=not overwrites)
    rows = [net.row for net in nets.values() if net.row is not None]
    yield from _inserts(table, rows, "REPLACE" if overwrites else "INSERT")


def _nets(table: TargetTable, events: Iterable[RowEvent], *, overwrites: bool) -> dict[tuple[Any, ...], _Net]:
    nets: dict[tuple[Any, ...], _Net] = {}
    for event in events:
        old = None if event.before is None else table.key_of(event.before)
        new = None if event.after is None else table.key_of(event.after)
        if old is not None and old != new:
            _change(nets, old, None, was_there=True, overwrites=overwrites)
        if new is not None:
            was_there = None if event.op == Op.READ else old == new
            _change(nets, new, event.after, was_there=was_there, overwrites=overwrites)
    return nets


def _change(
    nets: dict[tuple[Any, ...], _Net], key: tuple[Any, ...], row: Row | None, *, was_there: bool | None,
    overwrites: bool,
) -> None:  # fmt: skip
    net = nets.get(key)
    if net is None:
        nets[key] = _Net(was_there, row)
        return
    if was_there is not None and was_there != (net.row is not None) and not overwrites:
        raise OutOfStepError(f"{key}: two changes that cannot follow one another")
    net.row = row


def _deletes(table: TargetTable, nets: dict[tuple[Any, ...], _Net], *, is_counted: bool) -> Iterator[Statement]:
    there = [key for key, net in nets.items() if net.was_there]
    perhaps = [key for key, net in nets.items() if net.was_there is None]
    passing = [key for key, net in nets.items() if net.was_there is False and net.row is None]
    for keys, rows in ((there, len(there)), (perhaps, None), (passing, 0)):
        for some in _chunks(keys, lambda key: sum(map(_size, key))):
            where, parameters = key_condition(table, some)
            sql = f"DELETE FROM {table.sql} WHERE {where}"  # noqa: S608 - names are quoted, values are parameters
            wanted = None if rows is None or not is_counted else min(rows, len(some))
            yield Statement(sql, parameters, wanted)


def key_condition(table: TargetTable, keys: Sequence[tuple[Any, ...]]) -> tuple[str, tuple[Any, ...]]:
    """A condition that holds for the rows of these keys, and its parameters."""
    names = [quoted(name) for name in table.key]
    parameters = tuple([value for key in keys for value in key])
    if len(names) == 1:
        return f"{names[0]} IN ({_marks(len(keys))})", parameters
    one = "(" + " AND ".join(f"{name} = %s" for name in names) + ")"
    return " OR ".join([one] * len(keys)), parameters


def _inserts(table: TargetTable, rows: Sequence[Row], verb: str = "INSERT") -> Iterator[Statement]:
    strict = [row for row in rows if not _has_error_value(table, row)]
    for group, is_lenient in ((strict, False), ([row for row in rows if _has_error_value(table, row)], True)):
        for some in _chunks([table.values_of(row) for row in group], lambda values: sum(map(_size, values))):
            names = ",".join(quoted(column.name) for column in table.stored)
            one = f"({_marks(len(table.stored))})"
            sql = f"{verb} INTO {table.sql} ({names}) VALUES {','.join([one] * len(some))}"
            yield Statement(sql, tuple([value for values in some for value in values]), is_lenient=is_lenient)


def _chunks(values: Sequence[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """As much as fits a statement each."""
    chunk, size = list[Item](), 0
    for one in values:
        more = size_of(one)
        if chunk and (len(chunk) >= STATEMENT_ROWS_MAX or size + more > STATEMENT_BYTES_MAX):
            yield chunk
            chunk, size = [], 0
        chunk.append(one)
        size += more
    if chunk:
        yield chunk


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (bytes, str)) else 0


def _has_error_value(table: TargetTable, row: Row) -> bool:
    return any(row[column.name] == "" for column in table.enums)


def _one_by_one(table: TargetTable, events: Iterable[RowEvent], rows: int | None) -> Iterator[Statement]:
    inserts: list[Row] = []
    for event in events:
        if event.before is not None:
            yield from _inserts(table, inserts)
            inserts = []
            yield _delete_whole(table, event.before, rows)
        if event.after is not None:
            inserts.append(event.after)
    yield from _inserts(table, inserts)


def _delete_whole(table: TargetTable, row: Row, rows: int | None) -> Statement:
    conditions = " AND ".join(_is_value(column) for column in table.stored)
    sql = f"DELETE FROM {table.sql} WHERE {conditions} LIMIT 1"  # noqa: S608 - as above
    return Statement(sql, table.values_of(row), rows)


def _is_value(column: TargetColumn) -> str:
    """A comparison by bytes: collations take different texts for equal."""
    name = quoted(column.name)
    if column.is_text:
        return f"CAST(CONVERT({name} USING utf8mb4) AS BINARY) <=> CAST(%s AS BINARY)"
    if column.type == "json":  # of MySQL; MariaDB's is text
        return f"{json_as_text(name)} <=> {json_as_text('%s')}"
    return f"HEX({name}) <=> HEX(%s)" if column.is_opaque else f"{name} <=> %s"


def _marks(count: int) -> str:
    return ",".join(["%s"] * count)


Changes = Mapping[TableName, Sequence[RowEvent]]


# --- the connection ---------------------------------------------------------------------------------------------------


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
