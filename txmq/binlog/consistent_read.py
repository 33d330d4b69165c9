"""A consistent read of the database at a known position of its binlog, and its tables as such a read sees them.

Theory of operation. ``START TRANSACTION WITH CONSISTENT SNAPSHOT`` takes no lock. MariaDB tells the file and offset of
the binlog that it stands at, exactly: a transaction is seen if, and only if, it stands before. The server finds the
GTIDs for them.

A table that is read keeps others from altering it until the view ends: a view is short. A table that was altered after
the view began cannot be read in it (``ViewEndedError``). The one alteration that the server does not report, a column
that is added at once, is found by the table's description: taken before the view, and again when it is first read.

Each value has the form that the binlog's reader gives it. A SELECT converts the values itself, so that a row that it
gives is the row of an event. Text in another set than UTF-8 is read as its bytes and decoded as the stream's
(source/charsets.py): the server would show ``?`` for what it cannot convert. The schema, too, is that of the stream:
the events' schema tags are equal.

A table is read in chunks by its primary key, or its first unique key without NULL. It is read in one go if it has none,
or if the order of the key's columns cannot be written in SQL for a value alone: FLOAT, DOUBLE, ENUM, SET, TEXT, BLOB,
text in a set that has a character twice, and prefixes of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final

from txmq.binlog.decoded_changes import Column, ColumnKind, Row, TableName, TableSchema, Value
from txmq.binlog.errors import ColumnError, SourceError
from txmq.binlog.position import Position
from txmq.binlog.source import SourceOptions
from txmq.binlog.source.charsets import Charset, is_converted_exactly
from txmq.binlog.source.server import Server, refusal
from txmq.xa.database.mysql_server import mysql_driver

Ask = Callable[..., Sequence[Any]]
CharsetOf = Callable[[str], Charset]
KeyTypes = tuple[tuple[str, str], ...]

_INTEGERS: Final = ("tinyint", "smallint", "mediumint", "int", "bigint")
_BINARY: Final = ("tinyblob", "blob", "mediumblob", "longblob", "binary", "varbinary", "vector")
_GEOMETRIES: Final = (
    "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon", "geometrycollection",
)  # fmt: skip
_SPECIAL: Final = ("uuid", "inet4", "inet6")
_ORDERED: Final = (
    *_INTEGERS, *_SPECIAL, "year", "bit", "decimal", "date", "time", "datetime", "timestamp", "binary", "varbinary",
    "char", "varchar",
)  # fmt: skip
_KINDS: Final = {
    **dict.fromkeys((*_INTEGERS, "year", "bit"), ColumnKind.INTEGER),
    **dict.fromkeys(("float", "double"), ColumnKind.FLOAT),
    **dict.fromkeys((*_BINARY, *_GEOMETRIES), ColumnKind.BINARY),
    "decimal": ColumnKind.DECIMAL, "json": ColumnKind.JSON, "date": ColumnKind.DATE, "time": ColumnKind.TIME,
    "datetime": ColumnKind.DATETIME, "timestamp": ColumnKind.TIMESTAMP,
}  # fmt: skip
_SELECTED: Final = {
    "bit": "{0} + 0", "year": "{0} + 0", "float": "CAST({0} AS DOUBLE)", "double": "CAST({0} AS DOUBLE)",
    "datetime": "REPLACE(CAST({0} AS CHAR), ' ', 'T')",
    "timestamp": "CONCAT(REPLACE(CAST({0} AS CHAR), ' ', 'T'), 'Z')",
    **dict.fromkeys(("decimal", "date", "time", "json", *_SPECIAL), "CAST({0} AS CHAR)"),
    **dict.fromkeys(_GEOMETRIES, "CAST({0} AS BINARY)"),
}  # fmt: skip
_SESSION: Final = (
    "SET SESSION time_zone = '+00:00', sql_mode = 'ALLOW_INVALID_DATES', net_write_timeout = 600",
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
)
_BEGIN: Final = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
_CHANGED: Final = frozenset({1146, 1412, 1054, 1176, 1205, 1213})  # gone, altered, no such column or index, lock waits


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotTable:
    """A table, described.

    Args:
        schema: as the stream has it.
        selected: SQL of each column.
        charsets: of the columns that are read as bytes, by their places.
        key: name and type, with collation, of the columns by which it is read in chunks; none if it is read in one go.
        row_bytes: of a row, about.
        rows: how many it has, about.
    """

    schema: TableSchema
    selected: tuple[str, ...]
    charsets: tuple[tuple[int, Charset], ...]
    key: KeyTypes
    row_bytes: int
    rows: int

    @property
    def names(self) -> list[str]:
        """Of its columns."""
        return [column.name for column in self.schema.columns]

    def is_like(self, other: SnapshotTable | None) -> bool:
        """Whether both are read in the same way."""
        return other is not None and (self.schema, self.selected, self.key) == (
            other.schema, other.selected, other.key,
        )  # fmt: skip

    def decoded(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Rows of ``select``, as values.

        Raises:
            ColumnError: a value is no text in its character set.
        """
        return [self._decoded(row) for row in rows] if self.charsets else rows

    def _decoded(self, row: Row) -> Row:
        values = list(row)
        for place, charset in self.charsets:
            raw = values[place]
            if isinstance(raw, bytes):
                try:
                    values[place] = charset.decode(raw)
                except ValueError as error:
                    raise ColumnError(str(self.schema.table), self.names[place], str(error)) from error
        return tuple(values)

    def select(self, limit: int, after: Sequence[Value]) -> tuple[str, list[Value]]:
        """The SQL of the chunk after a key, and its parameters."""
        table = f"{_quoted(self.schema.table.database)}.{_quoted(self.schema.table.name)}"
        sql = f"SELECT {', '.join(self.selected)} FROM {table}"  # noqa: S608 - names are quoted
        if not self.key:
            return sql, []
        where, found = self._behind(after)
        order = ", ".join(_quoted(name) for name, _ in self.key)
        return f"{sql}{where} ORDER BY {order} LIMIT {limit}", found

    def _behind(self, after: Sequence[Value]) -> tuple[str, list[Value]]:
        """``a > x OR (a = x AND b > y)``: a comparison of rows would not use the index."""
        if not after:
            return "", []
        values = parameters(self.key, after)
        terms, found = [], list[Value]()
        for place, (name, kind) in enumerate(self.key):
            equal = [f"{_quoted(other)} = {literal(its)}" for other, its in self.key[:place]]
            terms.append("(" + " AND ".join([*equal, f"{_quoted(name)} > {literal(kind)}"]) + ")")
            found += values[: place + 1]
        return f" WHERE {' OR '.join(terms)}", found


def parameters(key: KeyTypes, values: Sequence[Value]) -> list[Value]:
    """A key's values as parameters."""
    return [
        value.removesuffix("Z").replace("T", " ")
        if isinstance(value, str) and kind.startswith(("datetime", "timestamp"))
        else value
        for (_, kind), value in zip(key, values, strict=True)
    ]


def literal(kind: str) -> str:
    """SQL that makes a parameter a value of a key's column."""
    name = kind.partition("(")[0].partition(" ")[0]
    if name in ("char", "varchar"):
        collation = kind.rpartition(" ")[2]
        return f"CONVERT(%s USING {collation.partition('_')[0]}) COLLATE {collation}"
    if name == "timestamp":
        return f"CAST(%s AS {kind.replace('timestamp', 'datetime')})"
    if name in ("decimal", "date", "time", "datetime", *_SPECIAL):
        return f"CAST(%s AS {kind.removesuffix(' unsigned')})"
    if name in ("binary", "varbinary"):
        return "CAST(%s AS BINARY)"
    return "%s"


def describe(ask: Ask, table: TableName, charset_of: CharsetOf) -> SnapshotTable | None:
    """A table as it is now; None if there is no table of that name.

    Args:
        charset_of: the character set of a name.

    Raises:
        SourceError: its rows cannot be read consistently.
    """
    kinds = ask(
        "SELECT t.table_type, t.engine, e.transactions, t.avg_row_length, t.table_rows "
        "FROM information_schema.tables t LEFT JOIN information_schema.engines e ON e.engine = t.engine "
        "WHERE t.table_schema = %s AND t.table_name = %s",
        *table,
    )
    if not kinds or kinds[0][0] not in ("BASE TABLE", "SYSTEM VERSIONED"):
        return None
    if kinds[0][0] == "SYSTEM VERSIONED":
        raise SourceError(f"{table} is system-versioned: its history has rows of its own, which are not published")
    if kinds[0][2] != "YES":
        raise SourceError(
            f"{table} cannot be read consistently, its engine is {kinds[0][1]}: ALTER TABLE {table} ENGINE=InnoDB, or "
            "name it in source.exclude"
        )
    rows = ask(
        "SELECT column_name, data_type, column_type, numeric_precision, numeric_scale, character_maximum_length, "
        "datetime_precision, character_set_name, collation_name, generation_expression FROM information_schema.columns "
        "WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
        *table,
    )
    columns = [Column(row[0], _KINDS.get(row[1], ColumnKind.TEXT), _type(row), bool(row[9])) for row in rows]
    names = [column.name for column in columns]
    key, is_whole = _key(ask, table)
    charsets = {
        place: charset_of(row[7]) for place, row in enumerate(rows) if row[7] and not is_converted_exactly(row[7])
    }
    places = [names.index(name) for name in key]
    types = [_key_type(rows[place], charsets.get(place)) for place in places]
    cuts = tuple((name, kind) for name, kind in zip(key, types, strict=True) if is_whole and kind is not None)
    return SnapshotTable(
        TableSchema(table, tuple(columns), tuple(places)),
        tuple(_selected(row, as_bytes=place in charsets) for place, row in enumerate(rows)),
        tuple(charsets.items()),
        cuts if len(cuts) == len(key) else (), int(kinds[0][3] or 0), int(kinds[0][4] or 0),
    )  # fmt: skip


def _key(ask: Ask, table: TableName) -> tuple[list[str], bool]:
    """The key's columns, and whether each is in it whole."""
    found: dict[str, list[tuple[str, bool]]] = {}
    unfit = set()
    for index, column, nullable, part in ask(
        "SELECT index_name, column_name, nullable, sub_part FROM information_schema.statistics "
        "WHERE table_schema = %s AND table_name = %s AND non_unique = 0 ORDER BY index_name, seq_in_index", *table,
    ):  # fmt: skip
        found.setdefault(index, []).append((column, part is None))
        if index != "PRIMARY" and (nullable == "YES" or part is not None or column is None):
            unfit.add(index)
    chosen = "PRIMARY" if "PRIMARY" in found else next((name for name in found if name not in unfit), None)
    columns = found[chosen] if chosen is not None else []
    return [name for name, _ in columns], all(is_whole for _, is_whole in columns)


def _type(row: Sequence[Any]) -> str:
    """SQL type, as the stream tells it."""
    data, declared, precision, scale, length, digits = row[1:7]
    if data in ("enum", "set"):
        return str(declared)
    if data in _GEOMETRIES:
        return "geometry"
    text = str(data)
    if data == "decimal":
        text = f"decimal({precision},{scale})"
    elif data == "vector":
        text = f"varbinary({length})"  # so MariaDB's binlog shows it
    elif data == "bit":
        text = f"bit({precision})"
    elif data in ("char", "varchar", "binary", "varbinary"):
        text = f"{data}({length})"
    elif data in ("time", "datetime", "timestamp") and digits:
        text = f"{data}({digits})"
    if data in (*_INTEGERS, "float", "double", "decimal") and "unsigned" in declared:
        text += " unsigned"
    return text + " compressed" if "COMPRESSED" in declared else text


def _selected(row: Sequence[Any], *, as_bytes: bool) -> str:
    """SQL of a column. A DECIMAL loses the zeros that ZEROFILL shows: the binlog does not tell of it."""
    if as_bytes:
        return f"CAST({_quoted(row[0])} AS BINARY)"
    if row[1] == "decimal" and "zerofill" in row[2]:
        return f"CAST(CAST({_quoted(row[0])} AS DECIMAL({row[3]},{row[4]})) AS CHAR)"
    return _SELECTED.get(row[1], "{0}").replace("{0}", _quoted(row[0]))


def _key_type(row: Sequence[Any], charset: Charset | None) -> str | None:
    """Type and collation; None if the order of its values cannot be told."""
    kind, collation = _type(row), row[8]
    if row[1] not in _ORDERED or "compressed" in kind or not (charset is None or charset.is_one_to_one):
        return None
    return kind if collation is None else f"{kind} {collation}"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"


# --- the view ---------------------------------------------------------------------------------------------------------


class ViewEndedError(Exception):
    """A table was altered since: a new view shows it as it is."""


class View:
    """One consistent read, until it is closed. Used by one thread.

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
