"""The rows of a binlog sync as Spark reads them: row changes from the binlog, or what a table holds now.

Theory of operation. Of the binlog there is one line for each message that the reader makes of it. A stretch of it lies
between two sets of GTIDs, about one for each file. An executor reads one as a replica of its own, with the reader's
decoder and encoder, and without what follows them: no publisher, no broker. A prepared XA transaction's changes have
its ``xid``, and so has the line that ends it (``XA_COMMIT``). Columns: ``gtid``, ``op``, ``xid``, ``place`` (file and
byte, in the order of the binlog), ``key`` and ``event`` (of the message).

Of a table there is one line for each row: the event that a snapshot makes of it. The database converts the values
itself (``txmq.binlog.consistent_read``), so that nothing of the binlog's decoder has part in them. One consistent read,
by one executor. Columns: ``key`` and ``event``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from txmq.binlog.config import BinlogSettings, PublishSettings, SourceSettings, topic_of
from txmq.binlog.consistent_read import SnapshotTable, View
from txmq.binlog.decoded_changes import Row, TableName, TransactionPart, XaEnd
from txmq.binlog.errors import BinlogError, SourceAwayError
from txmq.binlog.event_json import OP_HEADER, EventEncoder
from txmq.binlog.position import Position, parse_gtids
from txmq.binlog.source import BinlogSource
from txmq.binlog.source.options import source_options
from txmq.binlog.source.server import Server
from txmq.errors import ConfigError
from txmq.xid import xid_sql

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "txmq-binlog"
XA_COMMIT, XA_ROLLBACK = "xa-commit", "xa-rollback"
LINES_MAX = 5_000  # of one Arrow batch
_READ_S, _SILENCE_S_MAX = 1.0, 60.0
_SERVER_ID_MIN, _SERVER_IDS = 1 << 30, 1 << 30  # below those that readers make of their names
_SCHEMA = pa.schema(
    [
        ("gtid", pa.string()), ("op", pa.string()), ("xid", pa.string()), ("place", pa.string()), ("key", pa.string()),
        ("event", pa.string()),
    ]
)  # fmt: skip
_Line = tuple[str, str, str | None, str, str | None, str | None]
TABLE_FORMAT = "txmq-binlog-table"
_TABLE_SCHEMA = pa.schema([("key", pa.string()), ("event", pa.string())])


@dataclass(frozen=True)
class Reading:
    """What is read; it travels in the format's one option, as JSON.

    Args:
        settings: of the reader.
        topic: whose tables.
        borders: between the stretches, GTIDs in the order of the binlog.
    """

    settings: BinlogSettings
    topic: str
    flavor: str
    borders: tuple[str, ...]

    def to_json(self) -> str:
        """As an option."""
        settings = self.settings
        tables = {"source": asdict(settings.source), "publish": asdict(settings.publish)}
        return json.dumps(
            {"name": settings.name, "topic": self.topic, "flavor": self.flavor, "borders": self.borders} | tables
        )

    @classmethod
    def from_json(cls, text: str) -> Reading:
        """Read the option."""
        found = json.loads(text)
        source, publish = SourceSettings(**_tuples(found["source"])), PublishSettings(**_tuples(found["publish"]))
        settings = BinlogSettings(name=found["name"], source=source, publish=publish)
        return cls(settings, found["topic"], found["flavor"], tuple(found["borders"]))

    @cached_property
    def _topics(self) -> dict[TableName, bool]:
        return {}

    def is_published(self, table: TableName) -> bool:
        """Whether a table's changes go to the topic."""
        known = self._topics.get(table)
        if known is None:
            try:
                known = topic_of(self.settings.publish.topic, self.settings.name, table) == self.topic
            except BinlogError:
                known = False  # the reader stops there
            self._topics[table] = known
        return known


class BinlogRows(DataSource):  # type: ignore[misc]  # Any: mypy does not look into pyspark
    """The format; its one option ``reading`` is a ``Reading``."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> str:
        """The columns."""
        return "gtid string, op string, xid string, place string, key string, event string"

    def reader(self, schema: StructType) -> BinlogRowsReader:
        """The reader of one use."""
        del schema
        return BinlogRowsReader(Reading.from_json(self.options["reading"]))


class _Stretch(InputPartition):  # type: ignore[misc]
    def __init__(self, number: int, start: str, end: str) -> None:
        super().__init__(number)
        self.number, self.start, self.end = number, start, end


class BinlogRowsReader(DataSourceReader):  # type: ignore[misc]
    """Reads a binlog in stretches."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def partitions(self) -> list[_Stretch]:
        """One for each stretch."""
        return [_Stretch(number, *ends) for number, ends in enumerate(pairwise(self.reading.borders))]

    def read(self, partition: _Stretch) -> Iterator[pa.RecordBatch]:
        """The lines of a stretch."""
        lines: list[_Line] = []
        for line in self._lines(partition):
            lines.append(line)
            if len(lines) >= LINES_MAX:
                yield _batch(lines)
                lines = []
        yield _batch(lines)

    def _lines(self, stretch: _Stretch) -> Iterator[_Line]:
        reading, encoder = self.reading, EventEncoder(self.reading.settings.name)
        for part in self._parts(stretch):
            place = f"{part.file}:{part.offset:011d}"
            if isinstance(part.xa, XaEnd):
                end = XA_COMMIT if part.xa.committed else XA_ROLLBACK
                yield part.gtid, end, xid_sql(part.xa.xid), place, None, None
                continue
            xid = None if part.xa is None else xid_sql(part.xa.xid)
            judged = [change if reading.is_published(change.schema.table) else None for change in part.changes]
            for event in encoder.changes(part, 0, judged):
                op = event.headers[OP_HEADER].decode()
                yield part.gtid, op, xid, place, event.key.decode(), event.value.decode()

    def _parts(self, stretch: _Stretch) -> Iterator[TransactionPart]:
        """The parts of a stretch."""
        reading = self.reading
        start = Position("mysql" if reading.flavor == "mysql" else "mariadb", stretch.start)
        end = parse_gtids(start.flavor, stretch.end)
        if start.gtid_set.covers(end):
            return
        name = f"{reading.settings.name}-audit"
        server_id = _SERVER_ID_MIN + (crc32(name.encode()) + stretch.number) % _SERVER_IDS
        with closing(BinlogSource(replace(source_options(reading.settings), name=name, server_id=server_id))) as source:
            source.open(start)
            silent_s, is_end = 0.0, False
            while not is_end:
                part = source.read(_READ_S)
                if part is None:
                    silent_s += _READ_S
                    if silent_s >= _SILENCE_S_MAX:
                        raise SourceAwayError(f"nothing came for {silent_s:g} s, {end} was expected")
                    continue
                silent_s = 0.0
                yield part
                is_end = part.last and part.gtids.covers(end)


def _batch(lines: list[_Line]) -> pa.RecordBatch:
    columns = list(zip(*lines, strict=True)) or [()] * len(_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


# --- the rows of a table ----------------------------------------------------------------------------------------------


class TableRows(DataSource):  # type: ignore[misc]  # Any: mypy does not look into pyspark
    """The format; its options are ``reading`` (``Reading``), ``db`` and ``table``."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return TABLE_FORMAT

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
                yield pa.RecordBatch.from_arrays(columns, schema=_TABLE_SCHEMA)


def _chunks(view: View, table: SnapshotTable) -> Iterator[Sequence[Row]]:
    places = [table.names.index(name) for name, _ in table.key]
    rows = view.chunk(table, LINES_MAX, ())
    while rows:
        yield rows
        rows = view.chunk(table, LINES_MAX, tuple(rows[-1][place] for place in places))
