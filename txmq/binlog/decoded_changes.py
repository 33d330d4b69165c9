"""What a binlog says, as values: tables, row changes, statements, and the parts in which transactions are handed out.

A value of a row is the text or number that its JSON form shows, so that nothing is lost on the way (``Column``):
None, int, float, str, or bytes for binary columns. Only ``event_json.py`` turns it into JSON. A generated
column's value may be ``ABSENT``: MariaDB 11.8 leaves it out of the rows of an UPDATE or DELETE.

A transaction comes in one part, or in several in order if it is large: ``first`` and ``last`` say which, ``number`` is
that of the part's first change in its transaction. A transaction of which nothing is captured is a part without
changes: its position counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property
from typing import Final, NamedTuple
from zlib import crc32

from txmq.binlog.position import Flavor, GtidSet, Position
from txmq.xid import Xid


class Absent(Enum):
    """The place of a value that the server did not write."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
Value = None | int | float | str | bytes | Absent
Row = tuple[Value, ...]


class TableName(NamedTuple):
    """A table's name in its database."""

    database: str
    name: str

    def __str__(self) -> str:
        return f"{self.database}.{self.name}"


class ColumnKind(StrEnum):
    """The form in which a column's values travel."""

    INTEGER = "integer"  # int: all integer types, YEAR, BIT
    FLOAT = "float"  # float: FLOAT, DOUBLE
    DECIMAL = "decimal"  # str with all digits of the scale
    TEXT = "text"  # str: CHAR, VARCHAR, TEXT, ENUM; SET as its members with commas; UUID, INET4, INET6
    JSON = "json"  # str: the document's text
    BINARY = "binary"  # bytes: BINARY (with its padding), VARBINARY, BLOB, GEOMETRY (as stored: SRID and WKB)
    DATE = "date"  # str YYYY-MM-DD, also 0000-00-00 and days that do not exist
    TIME = "time"  # str [-]HH:MM:SS[.ffffff], hours up to 838
    DATETIME = "datetime"  # str YYYY-MM-DDTHH:MM:SS[.ffffff], without a zone
    TIMESTAMP = "timestamp"  # str like DATETIME, in UTC with Z; the zero timestamp is 0000-00-00T00:00:00Z


@dataclass(frozen=True, slots=True)
class Column:
    """A column as the binlog describes it.

    Args:
        name: as the database spells it.
        kind: the form of its values.
        type: SQL type, as far as the binlog tells: ``bigint unsigned``, ``decimal(10,2)``, ``enum('a','b')``.
        is_generated: computed by the database from other columns: an applier leaves it out.
    """

    name: str
    kind: ColumnKind
    type: str
    is_generated: bool = False


@dataclass(frozen=True)
class TableSchema:
    """A table's columns at the time of a change.

    Args:
        table: its name.
        columns: in the order of the rows' values.
        key: places of the columns that name a row: primary key, else the first unique key without NULL, else none
            (the whole row names it).
    """

    table: TableName
    columns: tuple[Column, ...]
    key: tuple[int, ...] = ()

    @cached_property
    def tag(self) -> str:
        """Eight hexadecimal digits that change with names, types and key: the events' schema tag."""
        described = [f"{column.name} {column.type}" for column in self.columns] + [str(self.key)]
        return f"{crc32(chr(0).join(described).encode('utf-8', 'surrogateescape')):08x}"


class Op(StrEnum):
    """What a row change did, as Debezium names it."""

    CREATE = "c"
    UPDATE = "u"
    DELETE = "d"
    READ = "r"  # by a snapshot


class RowChange:
    """One row's change. A plain class: there are hundreds of thousands a second.

    Args:
        op: as ``Op``.
        schema: of the table, when the change was made.
        before: the row before it; None for ``c`` and ``r``.
        after: the row after it; None for ``d``.
    """

    __slots__ = ("after", "before", "op", "schema")

    def __init__(self, op: str, schema: TableSchema, before: Row | None, after: Row | None) -> None:
        self.op = op
        self.schema = schema
        self.before = before
        self.after = after

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowChange) and (self.op, self.schema, self.before, self.after) == (
            other.op, other.schema, other.before, other.after,
        )  # fmt: skip

    __hash__ = None  # type: ignore[assignment]  # rows are compared, never looked up

    def __repr__(self) -> str:
        return f"RowChange({self.op!r}, {self.schema.table}, before={self.before!r}, after={self.after!r})"


class DdlKind(StrEnum):
    """What a statement does to tables."""

    CREATE = "create"
    ALTER = "alter"
    DROP = "drop"
    RENAME = "rename"
    TRUNCATE = "truncate"
    SWAP = "swap"  # an online-alter tool has put its shadow table in a table's place: new columns, the same rows
    DATABASE = "database"  # CREATE, ALTER or DROP DATABASE
    UNSEEN = "unseen"  # moves rows into a table or out of it, and no event shows them
    OTHER = "other"  # changes no table's rows or columns: users, routines, views, indexes, statistics


SessionValue = str | int | float
SESSION_VARIABLES: Final = frozenset(  # of a statement's session, by the server's names; ``system_clock`` is ours
    {
        "timestamp", "time_zone", "system_clock", "sql_mode", "lc_time_names", "auto_increment_increment",
        "auto_increment_offset", "unique_checks", "sql_auto_is_null", "check_constraint_checks",
        "explicit_defaults_for_timestamp", "sql_if_exists", "sql_require_primary_key", "default_table_encryption",
        "collation_connection", "collation_server", "collation_database", "default_collation_for_utf8mb4",
        "character_set_collations",
    }
)  # fmt: skip
SYSTEM_CLOCK: Final = (  # what the time zone SYSTEM says at two moments
    "SELECT CONCAT(CONVERT_TZ('2026-01-01 00:00:00', '+00:00', 'SYSTEM'), ', ', "
    "CONVERT_TZ('2026-07-01 00:00:00', '+00:00', 'SYSTEM'))"
)


@dataclass(frozen=True, slots=True)
class Ddl:
    """A statement that the binlog holds as text, and what it does to each table that it names.

    A database is named by a table without a name, and stands for all its tables.

    Args:
        kind: what it does.
        statement: its text.
        database: the database it was run in: unqualified names are of it.
        emptied: tables that have no row after it: they were made, emptied or dropped.
        moved: old and new name of each table that was renamed, one after another.
        concerned: tables that were altered, or may have been.
        read: tables of which it has read the form only: CREATE TABLE ... LIKE.
        additive: rows and columns that there are stay what they are: consumers may go on.
        foreign: those of the tables that are not captured: no topic is theirs.
        session: the variables of the session in which it was run.
        collation: of CREATE: what the new table's database gives it; empty if it is not known.
    """

    kind: DdlKind
    statement: str
    database: str
    emptied: tuple[TableName, ...] = ()
    moved: tuple[tuple[TableName, TableName], ...] = ()
    concerned: tuple[TableName, ...] = ()
    read: tuple[TableName, ...] = ()
    additive: bool = False
    foreign: frozenset[TableName] = frozenset()
    session: Mapping[str, SessionValue] = field(default_factory=dict)
    collation: str = ""

    @property
    def sql_mode(self) -> frozenset[str]:
        """The modes of its session."""
        return frozenset(str(self.session.get("sql_mode", "")).split(","))

    @property
    def changed(self) -> tuple[TableName, ...]:
        """The tables that it changes, under their old and new names."""
        return tuple(dict.fromkeys((*self.emptied, *(name for pair in self.moved for name in pair), *self.concerned)))

    @property
    def tables(self) -> tuple[TableName, ...]:
        """All that it names."""
        return tuple(dict.fromkeys((*self.changed, *self.read)))

    @property
    def captured(self) -> tuple[TableName, ...]:
        """The tables whose topics have the statement."""
        return tuple(table for table in self.tables if table not in self.foreign)


@dataclass(frozen=True, slots=True)
class XaPrepare:
    """The part's rows are prepared under ``xid``: they count when its ``XaEnd`` says committed."""

    xid: Xid


@dataclass(frozen=True, slots=True)
class XaEnd:
    """The prepared transaction ``xid`` ended; the part has no changes."""

    xid: Xid
    committed: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """The server that is read."""

    flavor: Flavor
    server: str


@dataclass(slots=True)
class TransactionPart:
    """A transaction, or a part of a large one. If it has both, ``ddl`` was run before ``changes``.

    Args:
        gtid: the transaction's id; every part of it has the same.
        gtids: what is published when this part is: with the transaction only if it is its last part.
        origin: the server that was read.
        server_id: of the server that ran the transaction first.
        timestamp_ms: when it was run there.
        first: it begins the transaction.
        last: it ends the transaction.
        number: of its first change in the transaction, from 0.
        changes: in the order of the binlog.
        ddl: the statement, if it is one.
        xa: set if the changes are prepared only, or end what was prepared.
        file: the binlog file.
        offset: byte after the part's last event.
    """

    gtid: str
    gtids: GtidSet
    origin: Origin
    server_id: int
    timestamp_ms: int
    first: bool = True
    last: bool = True
    number: int = 0
    changes: list[RowChange] = field(default_factory=list)
    ddl: Ddl | None = None
    xa: XaPrepare | XaEnd | None = None
    file: str = ""
    offset: int = 0

    @property
    def after(self) -> Position:
        """The position to save with this part."""
        rows = 0 if self.last else self.number + len(self.changes)
        origin, partial = self.origin, self.gtid if rows else ""
        return Position(origin.flavor, str(self.gtids), rows, self.file, self.offset, origin.server, partial)


TRANSACTION_ROWS_MAX: Final = 10_000  # changes of a part
TRANSACTION_BYTES_MAX: Final = 8 << 20  # of a part's events
