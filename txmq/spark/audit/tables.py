"""Tables of SQLite, MySQL and MariaDB as Spark reads them: in ranges of the primary key, a bounded piece at a time.

Theory of operation. The driver asks the database for the columns' types (``columns_of``) and for the least and the
greatest key (``key_range``); each executor opens a connection of its own and reads one range, ``FETCH_ROWS`` rows at a
time, through a cursor that the server keeps. MySQL's driver hands out bytes as they came; pyarrow reads whole columns
of them, which is several times faster than a Python object for each value.

Invariants:
    * nothing but SELECT is ever sent; SQLite files are opened for reading only;
    * names that stand in SQL were checked (``checked_column``); values travel as parameters or are numbers;
    * times are UTC: the session's time zone says so, and DATETIME columns are taken to be.

Source: MariaDB, "information_schema.COLUMNS"; SQLite, "Datatypes In SQLite", 3.1 (affinity).
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from txmq.errors import ConfigError
from txmq.spark.audit.match import MAYBE_NUMBER
from txmq.xa.database.mysql_server import mysql_driver

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FETCH_ROWS = 20_000
ROWS_PER_RANGE = 250_000
ROWS_PER_RANGE_MIN = 10_000  # a task for fewer costs more than it saves, however many cores there are
RANGES_MAX = 1_000
FORMAT = "txmq-table"
_CONNECT_TIMEOUT_S = 10
_CASE_S = 30.0  # SQLite waits so long for a writer


@dataclass(frozen=True, slots=True)
class Column:
    """A column; ``spark`` is its type in Spark's words; ``is_key``: of the primary key.

    ``may_be_number``: it is text in Spark, and numbers in it are compared as numbers.
    """

    name: str
    spark: str
    is_key: bool
    is_number: bool
    may_be_number: bool = False

    def read_by(self, table: Table) -> str:
        """What is selected. MySQL writes a FLOAT with six digits, and rounds: as a double it is exact."""
        name = table.quoted(self.name)
        return f"({name} + 0e0)" if table.kind == "mysql" and self.spark == "float" else name


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a database that Python's drivers reach. ``connect``: what the driver's ``connect`` takes."""

    kind: str  # sqlite or mysql
    connect: Mapping[str, Any]
    name: str

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one SELECT on a connection of its own; MySQL's values as Python objects."""
        if self.kind == "sqlite":
            with closing(self._sqlite()) as connection:
                return connection.execute(sql, tuple(parameters)).fetchall()
        with closing(self._mysql()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(sql.replace("?", "%s"), tuple(parameters) or None)
            return list(cursor.fetchall())

    def stream(self, sql: str) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of one SELECT, ``FETCH_ROWS`` at a time; MySQL's values as bytes."""
        if self.kind == "sqlite":
            with closing(self._sqlite()) as connection:
                cursor = connection.execute(sql)
                while rows := cursor.fetchmany(FETCH_ROWS):
                    yield rows
            return
        with (
            closing(self._mysql(conv={}, use_unicode=False)) as connection,
            closing(connection.cursor(mysql_driver().cursors.SSCursor)) as cursor,
        ):
            cursor.execute(sql)
            while rows := cursor.fetchmany(FETCH_ROWS):
                yield rows

    def quoted(self, name: str) -> str:
        """A name as the database writes it."""
        return f"`{name}`" if self.kind == "mysql" else f'"{name}"'

    def _sqlite(self) -> sqlite3.Connection:
        from urllib.parse import quote

        address = f"file:{quote(str(self.connect['database']))}?mode=ro"
        try:
            return sqlite3.connect(address, uri=True, timeout=_CASE_S)
        except sqlite3.Error as error:
            raise ConfigError(f"cannot open the SQLite file {self.connect['database']}: {error}") from None

    def _mysql(self, **more: Any) -> Any:
        options = {"connect_timeout": _CONNECT_TIMEOUT_S, "charset": "utf8mb4", "autocommit": True}
        options |= {"init_command": "SET time_zone = '+00:00'"}
        return mysql_driver().connect(**{**options, **self.connect, **more})


def columns_of(table: Table) -> list[Column]:
    """The columns of a table, in its order.

    Raises:
        ConfigError: there is no such table.
        the driver's error: the database cannot be reached.
    """
    found = _sqlite_columns(table) if table.kind == "sqlite" else _mysql_columns(table)
    if not found:
        raise ConfigError(f"the database has no table {table.name!r}")
    return found


def key_range(table: Table, columns: Sequence[Column], where: str) -> tuple[str, int, int] | None:
    """The key that reading can be divided by, with its least and greatest value; None: read in one piece."""
    keys = [column for column in columns if column.is_key]
    if len(keys) != 1 or keys[0].spark != "bigint":
        return None
    name = table.quoted(keys[0].name)
    condition = f" WHERE {where}" if where else ""
    if table.kind == "sqlite":
        condition = f"{condition or ' WHERE true'} AND typeof({name}) = 'integer'"
    ((low, high),) = table.query(f"SELECT MIN({name}), MAX({name}) FROM {table.quoted(table.name)}{condition}")  # noqa: S608
    return None if low is None else (keys[0].name, int(low), int(high))


def rows_about(table: Table) -> int:
    """How many rows a table has, about: keys may be sparse, and a range for each of their gaps would be waste."""
    if table.kind == "sqlite":
        ((count,),) = table.query(f"SELECT COUNT(*) FROM {table.quoted(table.name)}")  # noqa: S608
    else:
        ((count,),) = table.query(
            "SELECT table_rows FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ?",
            (table.name,),
        )
    return int(count or 0)


def ranges(low: int, high: int, at_least: int, rows: int = 0) -> list[tuple[int, int]]:
    """Ranges [from, to) that cover low to high.

    Args:
        at_least: as many ranges as there are cores, if the rows are enough for them.
        rows: how many there are, about; 0: not known.
    """
    span = high - low + 1
    worth = min(at_least, rows // ROWS_PER_RANGE_MIN + 1) if rows else at_least
    count = max(1, min(RANGES_MAX, span, max(worth, rows // ROWS_PER_RANGE)))
    edges = [low + span * number // count for number in range(count + 1)]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True, slots=True)
class Reading:
    """The table and columns of one use of the source; it travels in its options, as JSON."""

    table: Table
    columns: tuple[Column, ...]
    where: str
    at_least: int

    def to_json(self) -> str:
        """As an option."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Reading:
        """Read the option."""
        fields = json.loads(text)
        columns = tuple(Column(**column) for column in fields["columns"])
        return cls(Table(**fields["table"]), columns, fields["where"], fields["at_least"])


class TableSource(DataSource):  # type: ignore[misc]  # Any: mypy does not look into pyspark
    """The format ``txmq-table``; its one option ``reading`` is a ``Reading``."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Of the columns that are read."""
        from pyspark.sql.pandas.types import from_arrow_type
        from pyspark.sql.types import StructType

        found = StructType()
        for column in self._reading().columns:
            metadata = {MAYBE_NUMBER: True} if column.may_be_number else None
            found.add(column.name, from_arrow_type(arrow_type(column.spark)), metadata=metadata)
        return found

    def reader(self, schema: StructType) -> TableReader:
        """The reader of one use."""
        del schema
        return TableReader(self._reading())

    def _reading(self) -> Reading:
        return Reading.from_json(self.options["reading"])


class _Piece(InputPartition):  # type: ignore[misc]
    def __init__(self, condition: str) -> None:
        super().__init__(condition)


class TableReader(DataSourceReader):  # type: ignore[misc]
    """Reads a table in ranges of its key."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def partitions(self) -> list[_Piece]:
        """One for each range."""
        reading = self.reading
        keys = columns_of(reading.table)
        found = key_range(reading.table, keys, reading.where)
        if found is None:
            return [_Piece(reading.where)]
        key, low, high = found
        name = reading.table.quoted(key)
        also = f" AND {reading.where}" if reading.where else ""
        found_ranges = ranges(low, high, reading.at_least, rows_about(reading.table))
        edges = [start for start, _ in found_ranges[1:]]
        # Open at both ends: SQLite keeps NULL in a primary key, and text in a column of numbers; and rows may come.
        lower = [f"({name} < {edges[0]} OR {name} IS NULL)", *(f"{name} >= {edge}" for edge in edges)] if edges else []
        upper = ["", *(f" AND {name} < {edge}" for edge in edges[1:]), ""]
        if not edges:
            return [_Piece(reading.where)]
        return [_Piece(f"{low}{high}{also}") for low, high in zip(lower, upper, strict=True)]

    def read(self, partition: _Piece) -> Iterator[pa.RecordBatch]:
        """The rows of one range, in the columns' order."""
        reading = self.reading
        quoted = ", ".join(column.read_by(reading.table) for column in reading.columns)
        condition = f" WHERE {partition.value}" if partition.value else ""
        sql = f"SELECT {quoted} FROM {reading.table.quoted(reading.table.name)}{condition}"  # noqa: S608
        for rows in reading.table.stream(sql):
            columns = zip(reading.columns, zip(*rows, strict=True), strict=True)
            arrays = [_array(column, values, reading.table.kind) for column, values in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=[column.name for column in reading.columns])


def arrow_type(spark: str) -> pa.DataType:
    """The Arrow type of one of our Spark types."""
    if spark.startswith("decimal"):
        precision, scale = spark[len("decimal(") : -1].split(",")
        return pa.decimal128(int(precision), int(scale))
    return {
        "bigint": pa.int64(), "double": pa.float64(), "float": pa.float32(), "string": pa.string(),
        "binary": pa.binary(), "date": pa.date32(), "timestamp": pa.timestamp("us", tz="UTC"),
    }[spark]  # fmt: skip


def _array(column: Column, values: Sequence[Any], kind: str) -> pa.Array:
    try:
        return _sqlite_array(column, values) if kind == "sqlite" else _mysql_array(column, values)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"column {column.name} ({column.spark}): {error}") from None


def _mysql_array(column: Column, values: Sequence[bytes | None]) -> pa.Array:
    raw = pa.array(values, pa.binary())
    if column.spark == "binary":
        return raw
    text = raw.cast(pa.string())
    if column.spark == "float":
        return text.cast(pa.float64()).cast(pa.float32())
    if column.spark == "timestamp":
        zero = pc.starts_with(text, "0000-00-00")  # MySQL's "no date"
        naive = pc.if_else(zero, pa.scalar(None, pa.string()), text).cast(pa.timestamp("us"))
        return pc.assume_timezone(naive, "UTC")
    return text.cast(arrow_type(column.spark))


def _sqlite_array(column: Column, values: Sequence[Any]) -> pa.Array:
    if column.spark == "string":
        values = [value if value is None or isinstance(value, str) else _text(value) for value in values]
    return pa.array(values, arrow_type(column.spark))


def _text(value: object) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _sqlite_columns(table: Table) -> list[Column]:
    rows = table.query("SELECT name, type, pk FROM pragma_table_info(?)", (table.name,))
    return [_sqlite_column(*row) for row in rows]


def _sqlite_column(name: str, kind: str, key: int) -> Column:
    spark = _affinity(kind)
    is_text = any(word in kind.upper() for word in ("CHAR", "CLOB", "TEXT"))
    return Column(name, spark, bool(key), spark in ("bigint", "double"), spark == "string" and not is_text)


def _affinity(declared: str) -> str:
    """The affinity that SQLite gives a declared type; columns without one, and NUMERIC ones, are read as text."""
    words = declared.upper()
    if "INT" in words:
        return "bigint"
    if "BLOB" in words:
        return "binary"
    return "double" if any(word in words for word in ("REAL", "FLOA", "DOUB")) else "string"


_MYSQL_TYPES = {
    "tinyint": "bigint", "smallint": "bigint", "mediumint": "bigint", "int": "bigint", "bigint": "bigint",
    "year": "bigint",
    "float": "float", "double": "double", "date": "date", "datetime": "timestamp", "timestamp": "timestamp",
    "binary": "binary", "varbinary": "binary", "tinyblob": "binary", "blob": "binary", "mediumblob": "binary",
    "longblob": "binary", "bit": "binary",
}  # fmt: skip


def _mysql_columns(table: Table) -> list[Column]:
    rows = table.query(
        "SELECT column_name, data_type, column_type, numeric_precision, numeric_scale, column_key "
        "FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = ? ORDER BY ordinal_position",
        (table.name,),
    )
    return [_mysql_column(*row) for row in rows]


def _mysql_column(name: str, kind: str, full: str, precision: int | None, scale: int | None, key: str) -> Column:
    spark = _MYSQL_TYPES.get(kind.lower(), "string")
    if kind.lower() == "decimal":
        spark = f"decimal({min(precision or 10, 38)},{scale or 0})"
    if kind.lower() == "bigint" and "unsigned" in full.lower():
        spark = "decimal(20,0)"
    is_number = spark in ("bigint", "double", "float") or spark.startswith("decimal")
    return Column(name, spark, key.upper() == "PRI", is_number)
