"""The audit of a table's rows against the last event of each key in its topic: what the events lead to is there.

Theory of operation. The reader's newest position is taken, then the rows are read in one consistent read, then the
reader is waited for until it has published what the binlog held by then, then the log is read. A key that has an event
after the first position is on its way, and not judged. For every other key the row is the last event's, or there is
neither. If the table was altered since, the columns are compared that the row and the event both have: ALTER makes no
events of the rows that it fills or converts.

TRUNCATE and DROP end the rows of their partition. An XA transaction that was prepared at the first position is on its
way as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from txmq.binlog.decoded_changes import TableName
from txmq.binlog.position import Position
from txmq.binlog.publish.published import Published
from txmq.binlog.source import BinlogSource
from txmq.binlog.source_settings import source_options
from txmq.errors import ConfigError
from txmq.spark.audit.audit import AuditResult, Surroundings, audit
from txmq.spark.audit.binlog import LOOK_AGAIN_S, UNORDERED, holds, is_ordered, sent, wait_for_pending
from txmq.spark.audit.binlog_rows import Reading
from txmq.spark.audit.binlog_sync import SyncAudit
from txmq.spark.audit.binlog_table_rows import FORMAT, TableRows
from txmq.spark.audit.match import json_text
from txmq.spark.audit.spec import AuditSpec, Kind, parse_terms

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_UNMADE = dict.fromkeys((Kind.DUPLICATE, Kind.TORN, Kind.GAP, Kind.OUT_OF_ORDER), "the last event of each key counts")
_MOVING = "keys that have changed since the audit began"
_ALTERED = "rows whose last event is from before an ALTER: only the columns that both have were compared"
_REMOVED = "retention has removed messages of the topic"


@dataclass(frozen=True, slots=True)
class BinlogTableAudit(SyncAudit):
    """The rows of a table. ``settle_ms``: how long the reader is waited for."""

    table: TableName

    def run(self) -> AuditResult:
        """Audit the rows.

        Raises:
            BinlogError: no reader of that name has begun, or the database cannot be read.
            ConfigError: the rows cannot be audited.
        """
        if not is_ordered(self.settings):
            raise ConfigError(f"the last event of a key is not known: {UNORDERED}")
        newest = self._sent()
        if newest.snapshot is not None:
            raise ConfigError("nothing to audit: a snapshot is unfinished")
        spec = AuditSpec(
            self.topic, parse_terms(["key = key"]), parse_terms(["after = json:$.after"]), settle_ms=self.settle_ms
        )
        read = self.topic_audit(spec)
        rows = self._rows(newest.position)
        self.say(f"{rows.count()} rows; waiting until the reader has published what was committed meanwhile")
        self._wait()
        wait_for_pending(read, self.settle_ms)
        held = read.held(self.topic)
        last = self._last(read.messages(self.topic, held)).persist(StorageLevel.DISK_ONLY)
        judged = F.coalesce(_published(newest), F.lit(False))
        expected, moving = last.filter(judged & (F.col("op") != "d")), last.filter(~judged).select("key")
        is_whole = not any(start for start, _ in held.values())
        now = rows.select("schema", F.map_keys("after").alias("columns")).limit(1).collect()
        altered = expected.filter(F.col("schema") != now[0]["schema"]).count() if now else 0
        around = Surroundings(
            in_doubt=read.in_doubt, unmade=_UNMADE if is_whole else {**_UNMADE, Kind.MISSING: _REMOVED},
            unjudged={_MOVING: moving.count(), _ALTERED: altered},
        )  # fmt: skip
        known = expected.select("key", F.map_keys("after").alias("known"))
        left = rows.join(moving, "key", "left_anti").join(known, "key", "left")
        return audit(
            expected.select("message.*", _shared("after", F.lit(now[0]["columns"]) if now else None).alias("shared"))
            .withColumn("value", F.col("shared").cast("binary")).drop("shared"),
            left.select("key", json_text(_shared("after", F.col("known")), "$.after").alias("after")), spec,
            around=around,
        )  # fmt: skip

    def _rows(self, position: Position) -> DataFrame:
        self.spark.dataSource.register(TableRows)
        reading = Reading(self.settings, self.topic, position.flavor, ())
        options = {"reading": reading.to_json(), "db": self.table.database, "table": self.table.name}
        found = self.spark.read.format(FORMAT).options(**options).load()
        event = F.col("event")
        said = _columns(event).alias("after"), json_text(event, "$.source.schema").alias("schema")
        return found.select("key", *said).persist(StorageLevel.DISK_ONLY)

    def _wait(self) -> None:
        """Until the reader has published what the binlog holds now.

        Raises:
            ConfigError: it has not, in time.
        """
        end = BinlogSource(source_options(self.settings)).current_position().gtid_set
        deadline = self.clock.monotonic() + self.settle_ms / 1000
        while not (published := self._sent().position.gtid_set).covers(end):
            if self.clock.monotonic() >= deadline:
                raise ConfigError(
                    f"the reader is behind: the database is at {end}, {published} is published after "
                    f"{self.settle_ms / 1000:g} s: start it, or give it time with --settle"
                )
            self.clock.sleep(LOOK_AGAIN_S)

    def _sent(self) -> Published:
        return sent(self.client, self.settings, self.clock, self.settle_ms)

    @property
    def _emptied_by(self) -> tuple[TableName, TableName]:
        """What a statement names that leaves no row of the table."""
        return self.table, TableName(self.table.database, "")

    def _last(self, messages: DataFrame) -> DataFrame:
        """The last event of each key: ``message``, and of it ``key``, ``op``, ``gtid``, ``schema`` and ``after``."""
        events = messages.select(
            F.struct("*").alias("message"), F.col("key").cast("string").alias("key"), "partition", "offset",
            *(_said(path).alias(name) for name, path in (
                ("op", "$.op"), ("emptied", "$.emptied"), ("db", "$.source.db"),
                ("table", "$.source.table"), ("gtid", "$.source.gtid"), ("schema", "$.source.schema"),
            )),
        )  # fmt: skip
        names = [json.dumps(name, ensure_ascii=False, separators=(",", ":")) for name in self._emptied_by]
        ends = events.filter(F.col("emptied").contains(names[0]) | F.col("emptied").contains(names[1]))
        emptied = ends.groupBy("partition").agg(F.max("offset").alias("emptied_at"))
        of_rows = events.filter(
            F.col("op").isin("c", "u", "d", "r")
            & (F.col("db") == self.table.database) & (F.col("table") == self.table.name)
        )  # fmt: skip
        left = of_rows.join(F.broadcast(emptied), "partition", "left").filter(
            "emptied_at is null or offset > emptied_at"
        )
        newest = left.groupBy("key").agg(F.max_by(F.struct("message", "op", "gtid", "schema"), "offset").alias("last"))
        found = newest.select("last.*", "key")
        return found.withColumn("after", _columns(F.col("message.value").cast("string")))


def _columns(event: Column) -> Column:
    """The row of an event, its values as text."""
    return F.try_variant_get(F.try_parse_json(event), "$.after", "map<string,string>")


def _shared(row: str, others: Column | None) -> Column:
    """A row as the JSON of an event, with the columns that the other side has too; null: it has no such row."""

    def is_there(name: Column, _value: Column) -> Column:
        return F.lit(True) if others is None else F.coalesce(F.array_contains(others, name), F.lit(True))

    return F.to_json(F.struct(F.map_filter(row, is_there).alias("after")))


def _said(path: str) -> Column:
    return json_text(F.col("value").cast("string"), path)


def _published(newest: Published) -> Column:
    """Whether an event was published at a position, by its GTID; a snapshot's has several."""
    gtid, parked = F.col("gtid"), [rows.gtid for rows in newest.parked.values()]
    is_known = F.forall(F.split(gtid, ","), lambda one: holds(newest.position.gtid_set, one))
    return is_known & ~gtid.isin(*parked)
