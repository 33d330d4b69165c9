"""The rows that a table of a binlog sync has now, as Spark reads them: each as the event that a snapshot makes of it.

The database converts the values itself (``txmq.binlog.snapshot``), so that nothing of the binlog's decoder has part in
them. One consistent read, by one executor.

Columns: ``key`` and ``event``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from txmq.binlog.decoded_changes import Row, TableName
from txmq.binlog.event_json import EventEncoder
from txmq.binlog.snapshot.consistent_read import View
from txmq.binlog.snapshot.tables import SnapshotTable
from txmq.binlog.source.server import Server
from txmq.binlog.source_settings import source_options
from txmq.errors import ConfigError
from txmq.spark.audit.binlog_rows import LINES_MAX, Reading

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "txmq-binlog-table"
_SCHEMA = pa.schema([("key", pa.string()), ("event", pa.string())])


class TableRows(DataSource):  # type: ignore[misc]  # Any: mypy does not look into pyspark
    """The format; its options are ``reading`` (``Reading``), ``db`` and ``table``."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> str:
        """The columns."""
        return "key string, event string"

    def reader(self, schema: StructType) -> TableRowsReader:
        """The reader of one use."""
        del schema
        table = TableName(self.options["db"], self.options["table"])
        return TableRowsReader(Reading.from_json(self.options["reading"]), table)


class TableRowsReader(DataSourceReader):  # type: ignore[misc]
    """Reads the table in one go."""

    def __init__(self, reading: Reading, table: TableName) -> None:
        self.reading, self.table = reading, table

    def partitions(self) -> list[InputPartition]:
        """One."""
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows."""
        del partition
        settings = self.reading.settings
        options, encoder = source_options(settings), EventEncoder(settings.name)
        server = Server(options)
        server.check()
        with closing(View(options, [self.table], server)) as view:
            found = view.table(self.table)
            if found is None:
                raise ConfigError(f"the database has no table {self.table}")
            if not found.schema.key:
                raise ConfigError(f"{self.table} has no key: txmq binlog compare counts its rows")
            for rows in view.whole(found, LINES_MAX) if not found.key else _chunks(view, found):
                events = [encoder.snapshot_row(found.schema, row, view.position, 0) for row in rows]
                columns = [pa.array([event.key.decode() for event in events], pa.string()),
                           pa.array([event.value.decode() for event in events], pa.string())]  # fmt: skip
                yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _chunks(view: View, table: SnapshotTable) -> Iterator[Sequence[Row]]:
    places = [table.names.index(name) for name, _ in table.key]
    rows = view.chunk(table, LINES_MAX, ())
    while rows:
        yield rows
        rows = view.chunk(table, LINES_MAX, tuple(rows[-1][place] for place in places))
