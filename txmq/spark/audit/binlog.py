"""The audits of a binlog sync: its row changes, or a table's rows, against the messages of a topic, one to one.

Theory of operation, of row changes (``BinlogAudit``). The binlog is read again, apart from the reader
(``binlog_rows``), from where both sides have everything up to what the reader has published: its newest position is
taken first, then the ends of the log. A message of a change between the two is held against the change of its GTID,
number and operation; all others are partners of nothing, and never a finding. The audit itself is that of rows and
messages (``audit``): a row is a row change.

The window begins after the first snapshot, which passes changes over, after what retention has removed from the
topic, and after what the server has purged. Changes of an XA transaction count if XA COMMIT lies in the window, with
their prepare.

Of a table's rows (``BinlogTableAudit``). Each is held against the last event of its key: what the events lead to is
there. The reader's newest position is taken, then the rows are read in one consistent read, then the reader is waited
for until it has published what the binlog held by then, then the log is read. A key that has an event after the first
position is on its way, and not judged. For every other key the row is the last event's, or there is neither. If the
table was altered since, the columns are compared that the row and the event both have: ALTER makes no events of the
rows that it fills or converts. TRUNCATE and DROP end the rows of their partition. An XA transaction that was prepared
at the first position is on its way as well.

Invariant: nothing that the reader has written is believed but its positions, and of those only how far it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.window import Window as Over
from pyspark.storagelevel import StorageLevel

from txmq.binlog.config import BinlogSettings
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import BinlogError
from txmq.binlog.position import MariadbGtids, MysqlGtids, Position
from txmq.binlog.publish.published import Published, read_published
from txmq.binlog.source import BinlogSource
from txmq.binlog.source.options import source_options
from txmq.binlog.status import newest_published
from txmq.client.client import Client
from txmq.errors import ConfigError
from txmq.runtime.clocks import OSClock
from txmq.runtime.ports import Clock
from txmq.spark.audit.audit import AuditResult, Surroundings, audit
from txmq.spark.audit.binlog_rows import FORMAT, TABLE_FORMAT, XA_COMMIT, BinlogRows, Reading, TableRows
from txmq.spark.audit.findings import Ranges
from txmq.spark.audit.match import Window, json_text
from txmq.spark.audit.rows import Rows
from txmq.spark.audit.spec import SETTLE_MS, AuditSpec, Kind, parse_terms
from txmq.spark.audit.topic import Notes, TopicAudit, ignore

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
_MATCH = ("gtid = json:$.source.gtid", "row = json:$.source.row", "op = json:$.op")
_COMPARE = (
    "key = key", "db = json:$.source.db", "table = json:$.source.table", "schema = json:$.source.schema",
    "before = json:$.before", "after = json:$.after",
)  # fmt: skip
_ROW_OPS = ("c", "u", "d")
LOOK_AGAIN_S = 0.2
_TORN = "a change without its message is missing, whatever else its transaction has"
UNORDERED = "the settings of publish leave a key's changes in no order"
Gtids = MariadbGtids | MysqlGtids
_UNMADE = dict.fromkeys((Kind.DUPLICATE, Kind.TORN, Kind.GAP, Kind.OUT_OF_ORDER), "the last event of each key counts")
_MOVING = "keys that have changed since the audit began"
_ALTERED = "rows whose last event is from before an ALTER: only the columns that both have were compared"
_REMOVED = "retention has removed messages of the topic"


@dataclass(frozen=True, slots=True)
class SyncAudit:
    """An audit of one topic of a sync.

    Attributes:
        bootstrap: the broker's address as the executors reach it; they reach the database as the settings say.
        settle_ms: how long what is on its way is waited for.
        say: told what is done, a line at a time.
    """

    spark: SparkSession
    client: Client
    bootstrap: str
    settings: BinlogSettings
    topic: str
    settle_ms: int = field(default=SETTLE_MS, kw_only=True)
    say: Notes = field(default=ignore, kw_only=True)
    clock: Clock = field(default_factory=OSClock, kw_only=True)

    def topic_audit(self, spec: AuditSpec) -> TopicAudit:
        """Of the topic; its rows are read elsewhere."""
        no_rows = Rows(self.spark, "", "", None)
        return TopicAudit(self.spark, self.client, self.bootstrap, no_rows, spec, clock=self.clock)


# --- row changes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GtidWindow(Window):
    """Of a binlog: the changes of transactions up to ``last`` that are not in ``before``, nor among ``parked``."""

    before: Gtids = field(default_factory=lambda: MariadbGtids({}))
    last: Gtids = field(default_factory=lambda: MariadbGtids({}))
    parked: tuple[str, ...] = ()

    def holds_message(self) -> Column:
        """Whether it is of a change of the window. Null if it is no change event at all: it is audited."""
        gtid, op = (json_text(F.col("value").cast("string"), path) for path in ("$.source.gtid", "$.op"))
        inside = holds(self.last, gtid) & ~holds(self.before, gtid) & ~gtid.isin(*self.parked)
        return inside & op.isin(*_ROW_OPS)


def sent(client: Client, settings: BinlogSettings, clock: Clock, wait_ms: int) -> Published:
    """The newest position, when everything up to it is in the topics and nothing waits in a spool.

    Raises:
        BinlogError: no reader of that name has begun, or its spool was not empty in time.
    """
    deadline = clock.monotonic() + wait_ms / 1000
    while not (newest := newest_published(client, settings)).is_sent and newest.spool is not None:
        if clock.monotonic() >= deadline:
            raise BinlogError(
                f"{newest.spool.messages} events wait in the spool {newest.spool.path} of {newest.spool.host}: audit "
                "when they are sent"
            )
        clock.sleep(LOOK_AGAIN_S)
    return newest


def wait_for_pending(read: TopicAudit, wait_ms: int) -> None:
    """Wait until what is in doubt now has its outcome: messages that belong to a position at another home may not
    be visible yet. What is in doubt for longer is found by the audit.
    """
    clock, left = read.clock, {doubt.txid for doubt in read.pending()}
    deadline = clock.monotonic() + wait_ms / 1000
    while left and clock.monotonic() < deadline:
        clock.sleep(LOOK_AGAIN_S)
        left &= {doubt.txid for doubt in read.pending()}


def refuse_removed(topic: str, held: Ranges) -> None:
    """Raise if retention has left nothing of a topic that could be audited.

    A partition that has lost all that it had does not tell where the window would begin.
    """
    cut = [partition for partition, (start, _) in held.items() if start]
    emptied = [partition for partition in cut if held[partition][0] == held[partition][1]]
    if cut:
        what = f"emptied partition {emptied[0]}" if emptied else f"removed messages of partition {cut[0]}"
        raise ConfigError(
            f"nothing to audit: retention has {what} of {topic}, up to the newest position or nearly so: audit again "
            "when more has been published"
        )


def is_ordered(settings: BinlogSettings) -> bool:
    """Whether the messages of a key are in one partition, and no other table's have that key."""
    publish = settings.publish
    return publish.by == "key" or (publish.by == "table" and "{table}" in publish.topic)


def holds(gtids: Gtids, gtid: Column) -> Column:
    """Whether a set has a transaction."""
    found = F.lit(False) & gtid.isNotNull()
    if isinstance(gtids, MariadbGtids):
        parts = F.split(gtid, "-")
        for domain, (_server, sequence) in gtids.last.items():
            found = found | ((parts[0] == str(domain)) & (parts[2].cast("decimal(20)") <= sequence))
        return found
    parts = F.split(gtid, ":")
    for uuid, intervals in gtids.intervals.items():
        for first, last in intervals:
            found = found | ((parts[0] == uuid) & parts[1].cast("decimal(20)").between(first, last))
    return found


@dataclass(frozen=True, slots=True)
class BinlogAudit(SyncAudit):
    """A topic's row changes. ``settle_ms``: how long a spool (``publish.mode``) is waited for until it is empty."""

    def run(self) -> AuditResult:
        """Audit all that both sides have.

        Raises:
            BinlogError: no reader of that name has begun, events wait in its spool, or the database cannot be read.
            ConfigError: there is nothing that both have.
        """
        newest = sent(self.client, self.settings, self.clock, self.settle_ms)
        spec, unmade = self._spec()
        read = self.topic_audit(spec)
        wait_for_pending(read, self.settle_ms)
        held = read.held(self.topic)
        source = BinlogSource(source_options(self.settings))
        source.current_position()
        before = self._begin(source, held)
        last = newest.position.gtid_set
        if before.covers(last):
            refuse_removed(self.topic, held)
        if not last.covers(before):
            raise ConfigError(f"nothing to audit: the window would begin at {before}, and {last} is published")
        window = GtidWindow(
            before=before, last=last, parked=tuple(rows.gtid for rows in newest.parked.values()), is_live=True
        )
        borders = (str(before), *self._between(source, before, last), str(last))
        self.say(f"row changes from {before or 'the first'} to {last}, in {len(borders) - 1} stretches of the binlog")
        changes = self._changes(Reading(self.settings, self.topic, newest.position.flavor, borders))
        around = Surroundings(
            ranges=held, later_messages=lambda: read.messages(self.topic, _behind(held, read.held(self.topic))),
            in_doubt=read.in_doubt, unmade=unmade,
        )  # fmt: skip
        return audit(read.messages(self.topic, held), changes, spec, window, around)

    def _spec(self) -> tuple[AuditSpec, Mapping[Kind, str]]:
        has_order = is_ordered(self.settings)
        unmade = {Kind.TORN: _TORN} | ({} if has_order else {Kind.OUT_OF_ORDER: UNORDERED})
        order = "place" if has_order else None
        return AuditSpec(self.topic, parse_terms(_MATCH), parse_terms(_COMPARE), order=order, row_key="key"), unmade

    # --- the window --------------------------------------------------------------------------------------------------

    def _begin(self, source: BinlogSource, held: Ranges) -> Gtids:
        """What is before the window: of the first snapshot, of what was removed here, and of what was purged there."""
        found = [self._behind_snapshot(), source.oldest_position()]
        removed = [self.client.fetch(self.topic, p, start)[0].timestamp_ms for p, (start, end) in held.items()
                   if 0 < start < end]  # fmt: skip
        if any(0 < start == end for start, end in held.values()):
            found.append(self._newest())
        elif removed:
            self.say("retention has removed messages of the topic: the audit begins behind them")
            positions = self.settings.position_topic
            # The first message that is left stands in the transaction of this position, or of the one after it.
            first = self.client.offset_for(positions, 0, max(removed)) + 1
            found.append(self._position(min(first, self.client.offsets(positions, 0).end - 1)) or self._newest())
        joined = found[0].gtid_set
        for position in found[1:]:
            joined = _joined(joined, position.gtid_set)
        return joined

    def _newest(self) -> Position:
        return newest_published(self.client, self.settings).position

    def _behind_snapshot(self) -> Position:
        """The first position at which the first snapshot has ended: that is the topic's beginning."""
        held = self.client.offsets(self.settings.position_topic, 0)
        low, high = held.start, held.end - 1
        while low < high:
            middle = (low + high) // 2
            found = self._published(middle)
            is_of_snapshot = found is None or (found.snapshot is not None and not found.snapshot.again)
            low, high = (middle + 1, high) if is_of_snapshot else (low, middle)
        found = self._published(low)
        if found is None or (found.snapshot is not None and not found.snapshot.again):
            raise ConfigError(
                f"nothing to audit: {self.settings.position_topic} has no position behind the first snapshot (in "
                "ordered mode each start of the reader writes one)"
            )
        return found.position

    def _position(self, offset: int) -> Position | None:
        found = self._published(offset)
        return None if found is None else found.position

    def _published(self, offset: int) -> Published | None:
        topic = self.settings.position_topic
        message = self.client.fetch(topic, 0, offset)[0]
        return read_published(message.value, f"message {offset} of {topic}")

    def _between(self, source: BinlogSource, before: Gtids, last: Gtids) -> list[str]:
        """The GTIDs with which files begin, within the window."""
        found: list[str] = []
        former: Gtids = before
        for gtids in source.file_borders():
            if gtids != former and gtids != last and gtids.covers(former) and last.covers(gtids):
                found.append(str(gtids))
                former = gtids
        return found

    # --- the changes -------------------------------------------------------------------------------------------------

    def _changes(self, reading: Reading) -> DataFrame:
        """The changes that count, with the columns of the terms."""
        self.spark.dataSource.register(BinlogRows)
        lines = self.spark.read.format(FORMAT).option("reading", reading.to_json()).load()
        lines = lines.persist(StorageLevel.DISK_ONLY)
        plain, prepared = lines.filter("xid is null"), lines.filter("xid is not null")
        if not prepared.isEmpty():
            plain = plain.unionByName(_committed(prepared))

        def said(path: str) -> Column:
            return json_text("event", path)

        number = said("$.source.row")
        return plain.select(
            "gtid", "op", "key", number.cast("bigint").alias("row"), said("$.source.db").alias("db"),
            said("$.source.table").alias("table"), said("$.source.schema").alias("schema"),
            said("$.before").alias("before"), said("$.after").alias("after"),
            F.concat("place", F.lit(":"), F.lpad(number, 9, "0")).alias("place"),
        )  # fmt: skip


def _committed(prepared: DataFrame) -> DataFrame:
    """The changes of XA transactions that were committed, at the place of their XA COMMIT."""
    following = Over.partitionBy("xid").orderBy("place").rowsBetween(0, Over.unboundedFollowing)
    is_end = F.col("op").startswith("xa-")
    end = F.first(F.when(is_end, F.struct("op", "place")), ignorenulls=True).over(following)
    marked = prepared.withColumn("end", end).filter(~is_end & (F.col("end.op") == XA_COMMIT))
    return marked.withColumn("place", F.col("end.place")).drop("end")


def _behind(read: Ranges, held: Ranges) -> Ranges:
    return {partition: (end, max(end, held[partition][1])) for partition, (_, end) in read.items()}


def _joined(one: Gtids, other: Gtids) -> Gtids:
    """Everything of both."""
    if one.covers(other):
        return one
    if other.covers(one) or not (isinstance(one, MariadbGtids) and isinstance(other, MariadbGtids)):
        return other
    return MariadbGtids({
        domain: max(one.last.get(domain, (0, 0)), other.last.get(domain, (0, 0)), key=lambda last: last[1])
        for domain in {*one.last, *other.last}
    })  # fmt: skip


# --- rows of a table --------------------------------------------------------------------------------------------------


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
        found = self.spark.read.format(TABLE_FORMAT).options(**options).load()
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
