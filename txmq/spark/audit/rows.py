"""Reads an audit's rows: a database by its URL, a table, and the part of it that lies in the window.

    sqlite:///orders.db                      a file; an absolute path is sqlite:/srv/orders.db or sqlite:////srv/orders.db
    mysql://user:password@host:3306/shop     MySQL, MariaDB; also ?unix_socket=..., ?read_default_file=...
    jdbc:postgresql://host/shop?user=app     through Java: the driver's jar must be with Spark (--jars)
    parquet:orders/                          a dataset

A password that is not in the URL is taken from ``password`` (the command passes AUDIT_DATABASE_PASSWORD).

JDBC gives a time without zone in Java's default zone, and Spark takes it for that: so Java must run in UTC.

Theory of operation, of SQLite, MySQL and MariaDB (``TableSource``). Spark reads a table in ranges of its primary key, a
bounded piece at a time. The driver asks the database for the columns' types (``columns_of``) and for the least and the
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
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from txmq.addresses import without_password
from txmq.errors import ConfigError
from txmq.spark.audit.match import MAYBE_NUMBER, committed_at, row_identities
from txmq.spark.audit.spec import AuditSpec, RowTime, checked_column
from txmq.xa.database.mysql_server import mysql_driver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

LOOKUPS_MAX = 2_000  # rows that are asked for one by one; more are found by reading the table
_LOOKED_UP = frozenset({"bigint", "string", "binary"})  # of others the database may read a text in its own way
_MYSQL_PORT = 3306
_ILLEGAL_MIX_OF_COLLATIONS = 1267
_JARS = 'PYSPARK_SUBMIT_ARGS="--jars DRIVER.jar pyspark-shell" names its jar'
_UTC = frozenset({"UTC", "Etc/UTC", "GMT", "Etc/GMT", "Z", "Zulu", "Universal"})
_EXPECTED = "expected sqlite:///FILE (or sqlite:/ABSOLUTE/FILE), mysql://USER@HOST/DATABASE, jdbc:... or parquet:PATH"
FETCH_ROWS = 20_000
ROWS_PER_RANGE = 250_000
ROWS_PER_RANGE_MIN = 10_000  # a task for fewer costs more than it saves, however many cores there are
RANGES_MAX = 1_000
FORMAT = "txmq-table"
_CONNECT_TIMEOUT_S = 10
_CASE_S = 30.0  # SQLite waits so long for a writer


@dataclass(frozen=True, slots=True)
class Rows:
    """A table, wherever it lies. ``table`` for those that Python's drivers reach; else ``url``.

    ``spark`` may be None if only ``primary_key`` and ``require`` are asked.
    """

    spark: SparkSession
    url: str
    name: str
    table: Table | None
    password: str | None = field(default=None, repr=False)  # where ``url`` is used as it is

    def primary_key(self) -> list[str]:
        """The columns of the primary key, in the table's order; empty if none is known."""
        return [] if self.table is None else [column.name for column in columns_of(self.table) if column.is_key]

    def require(self, spec: AuditSpec) -> None:
        """Check that the table has what a spec names; of what only Spark reaches nothing is known yet.

        Raises:
            ConfigError: a column is missing, or a time of numbers has no unit.
        """
        if self.table is None:
            return
        there = {column.name: column for column in columns_of(self.table)}
        if unknown := [name for name in spec.columns if name not in there]:
            raise ConfigError(f"the table has no column {unknown[0]!r}; it has {', '.join(there)}")
        if spec.row_time is not None and there[spec.row_time.column].is_number and spec.row_time.unit is None:
            name = spec.row_time.column
            raise ConfigError(f"{name} holds numbers: say of what, such as {name}:ms")

    def read(self, columns: Sequence[str], where: str = "") -> DataFrame:
        """These columns of the whole table, or of what ``where`` (SQL; not for datasets) leaves.

        Raises:
            ConfigError: a column is not there.
        """
        if self.table is None:
            return self._foreign(columns)
        there = {column.name: column for column in columns_of(self.table)}
        if unknown := [name for name in columns if name not in there]:
            raise ConfigError(f"the table has no column {unknown[0]!r}; it has {', '.join(there)}")
        self.spark.dataSource.register(TableSource)
        at_least = int(self.spark.sparkContext.defaultParallelism)
        reading = Reading(self.table, tuple(there[name] for name in columns), where, at_least)
        return self.spark.read.format(FORMAT).option("reading", reading.to_json()).load()

    def between(self, spec: AuditSpec, from_ms: int | None, to_ms: int | None) -> DataFrame:
        """The rows committed in [from, to); those whose time is not known are among them."""
        if spec.row_time is None or (from_ms is None and to_ms is None):
            return self.read(spec.columns)
        frame = self.read(spec.columns, self._where(spec.row_time, from_ms, to_ms))
        committed = committed_at(frame, spec.row_time)
        inside = F.lit(True)
        if from_ms is not None:
            inside = inside & (committed >= F.timestamp_millis(F.lit(from_ms)))
        if to_ms is not None:
            inside = inside & (committed < F.timestamp_millis(F.lit(to_ms)))
        return frame.filter(F.coalesce(inside, F.lit(True)))

    def with_row(self, spec: AuditSpec, wanted: DataFrame) -> DataFrame:
        """Of identities (one column ``id``), those that have a row anywhere in the table."""
        columns = [term.column for term in spec.match]
        values = [row["id"] for row in wanted.limit(LOOKUPS_MAX + 1).collect()]
        kinds = [] if self.table is None else [column for column in columns_of(self.table) if column.name == columns[0]]
        is_exact = len(columns) == 1 and all(kind.spark in _LOOKED_UP and not kind.may_be_number for kind in kinds)
        if self.table is None or not is_exact or len(values) > LOOKUPS_MAX:
            return wanted.join(row_identities(self.read(columns), spec), "id", "left_semi")
        (kind,) = kinds
        found = [(value,) for value in values if self._is_there(self.table, kind, value)]
        return self.spark.createDataFrame(found, "id string")

    @staticmethod
    def _is_there(table: Table, column: Column, value: str) -> bool:
        name = table.quoted(column.name)
        sql = f"SELECT 1 FROM {table.quoted(table.name)} WHERE {name} = ?"  # noqa: S608
        if table.kind == "mysql" and column.spark == "string":
            driver = mysql_driver()
            try:  # equal must mean equal, whatever the collation
                return bool(table.query(f"{sql} AND BINARY CONVERT({name} USING utf8mb4) = ? LIMIT 1", (value, value)))
            except driver.OperationalError as error:
                if error.args[0] != _ILLEGAL_MIX_OF_COLLATIONS:
                    raise
                return False  # the column's character set cannot write it
        parameter: object = bytes.fromhex(value) if column.spark == "binary" else value
        return bool(table.query(f"{sql} LIMIT 1", (parameter,)))

    def _where(self, row_time: RowTime, from_ms: int | None, to_ms: int | None) -> str:
        """The window as SQL, so that an index on the time can serve; empty if only Spark can tell."""
        if self.table is None:
            return ""
        kind = next(column for column in columns_of(self.table) if column.name == row_time.column)
        if kind.is_number and row_time.unit is not None:
            edges = [None if ms is None else str(ms * row_time.unit.value // 1000) for ms in (from_ms, to_ms)]
        elif kind.spark == "timestamp":
            edges = [None if ms is None else f"'{_sql_time(ms)}'" for ms in (from_ms, to_ms)]
        else:
            return ""
        name = self.table.quoted(row_time.column)
        # One unit more at the end: a fraction that was rounded away; Spark cuts exactly.
        parts = [f"{name} >= {edges[0]}"] * (edges[0] is not None) + [f"{name} <= {edges[1]}"] * (edges[1] is not None)
        return f"({' AND '.join(parts)} OR {name} IS NULL)"

    def _foreign(self, columns: Sequence[str]) -> DataFrame:
        is_parquet = self.url.startswith("parquet:")
        frame = self.spark.read.parquet(self.url.removeprefix("parquet:")) if is_parquet else self._jdbc()
        if unknown := [name for name in columns if name not in frame.columns]:
            raise ConfigError(f"the table has no column {unknown[0]!r}; it has {', '.join(frame.columns)}")
        chosen = frame.select(*columns)
        if not is_parquet and any(kind.startswith("timestamp") for _, kind in chosen.dtypes):
            self._require_utc()
        return chosen

    def _jdbc(self) -> DataFrame:
        reader = self.spark.read.format("jdbc").options(url=self.url, dbtable=self.name, fetchsize=FETCH_ROWS)
        if self.password is not None:
            reader = reader.option("password", self.password)
        try:
            return reader.load()
        except Py4JJavaError as error:
            if "No suitable driver" not in str(error):
                raise
            raise ConfigError(f"Java has no driver for {without_password(self.url)}: {_JARS}") from None

    def _require_utc(self) -> None:
        ((zone,),) = self.spark.sql("SELECT java_method('java.time.ZoneId', 'systemDefault')").collect()
        if zone not in _UTC:
            raise ConfigError(
                f"Java's time zone is {zone}, and JDBC would shift the table's times by it: start Spark with "
                "-Duser.timezone=UTC in spark.driver.extraJavaOptions and spark.executor.extraJavaOptions"
            )


def open_rows(spark: SparkSession | None, url: str, table: str | None, password: str | None = None) -> Rows:
    """The table that a URL names; asks the database for its columns, so that a mistake is found at once.

    Raises:
        ConfigError: no such URL, table or file.
        the driver's error: the database cannot be reached.
    """
    scheme = url.partition(":")[0]
    if scheme == "parquet":
        return Rows(spark, url, table or "", None)
    if table is None:
        raise ConfigError("which table? expected --table NAME")
    checked_column(table)
    if scheme == "jdbc":
        return Rows(spark, url, table, None, password)
    rows = Rows(spark, url, table, Table(*_connect_arguments(url, password), table))
    rows.primary_key()
    return rows


def _connect_arguments(url: str, password: str | None) -> tuple[str, dict[str, Any]]:
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and parts.path.startswith("/") and not parts.netloc:
        is_absolute = not url.startswith("sqlite:///")
        return "sqlite", {"database": unquote(parts.path if is_absolute else parts.path[1:])}
    if parts.scheme not in ("mysql", "mariadb") or not parts.path.strip("/"):
        raise ConfigError(f"database = {without_password(url)!r}: {_EXPECTED}")
    given = {
        "host": parts.hostname or "127.0.0.1", "port": parts.port or _MYSQL_PORT, "db": unquote(parts.path.strip("/")),
        "user": unquote(parts.username or ""), "passwd": unquote(parts.password or "") or password or "",
    }  # fmt: skip
    extra = dict(parse_qsl(parts.query))
    if unknown := extra.keys() - {"unix_socket", "read_default_file", "ssl_ca"}:
        raise ConfigError(f"database: {min(unknown)!r} is not known here; expected unix_socket or read_default_file")
    if "ssl_ca" in extra:
        extra = {**extra, "ssl": {"ca": extra.pop("ssl_ca")}}  # type: ignore[dict-item]
    return "mysql", {name: value for name, value in given.items() if value} | extra


def _sql_time(ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


# --- tables of SQLite, MySQL and MariaDB -----------------------------------------------------------------------------


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
