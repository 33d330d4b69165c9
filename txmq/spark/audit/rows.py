"""Reads an audit's rows: a database by its URL, a table, and the part of it that lies in the window.

    sqlite:///orders.db                      a file; an absolute path is sqlite:/srv/orders.db or sqlite:////srv/orders.db
    mysql://user:password@host:3306/shop     MySQL, MariaDB; also ?unix_socket=..., ?read_default_file=...
    jdbc:postgresql://host/shop?user=app     through Java: the driver's jar must be with Spark (--jars)
    parquet:orders/                          a dataset

A password that is not in the URL is taken from ``password`` (the command passes AUDIT_DATABASE_PASSWORD).

JDBC gives a time without zone in Java's default zone, and Spark takes it for that: so Java must run in UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from py4j.protocol import Py4JJavaError
from pyspark.sql import functions as F

from txmq.addresses import without_password
from txmq.errors import ConfigError
from txmq.spark.audit.match import committed_at, row_identities
from txmq.spark.audit.spec import AuditSpec, RowTime, checked_column
from txmq.spark.audit.tables import FETCH_ROWS, FORMAT, Column, Reading, Table, TableSource, columns_of
from txmq.xa.database.mysql_server import mysql_driver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOOKUPS_MAX = 2_000  # rows that are asked for one by one; more are found by reading the table
_LOOKED_UP = frozenset({"bigint", "string", "binary"})  # of others the database may read a text in its own way
_MYSQL_PORT = 3306
_ILLEGAL_MIX_OF_COLLATIONS = 1267
_JARS = 'PYSPARK_SUBMIT_ARGS="--jars DRIVER.jar pyspark-shell" names its jar'
_UTC = frozenset({"UTC", "Etc/UTC", "GMT", "Etc/GMT", "Z", "Zulu", "Universal"})
_EXPECTED = "expected sqlite:///FILE (or sqlite:/ABSOLUTE/FILE), mysql://USER@HOST/DATABASE, jdbc:... or parquet:PATH"


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
