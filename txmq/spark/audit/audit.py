"""The audit: rows against messages, one to one, in order, whole. ``txmq audit`` is the command; this is the library.

    from txmq.spark.audit.audit import audit
    from txmq.spark.audit.spec import AuditSpec, parse_terms

    messages = spark.read.format("txmq").option("bootstrap", "127.0.0.1:8123").option("topic", "orders") \\
        .option("includeHeaders", "true").load()
    rows = spark.read.parquet("orders/")
    result = audit(messages, rows, AuditSpec("orders", parse_terms(["id = key"])))
    result.is_clean, result.counts, result.findings.show()

Theory of operation. ``match`` puts the two side by side; the pairs are kept on the executors' disks, because
everything else is read from them, several times. What has no partner is a candidate; the ``Surroundings`` are asked
what excuses it. Findings are rows of one DataFrame.

Invariants:
    * the log and the table are read once each;
    * nothing that grows with the number of messages is held by the driver: samples, runs of 65,536 offsets and buckets
      of time are;
    * the number of tasks follows the size of the data, whatever the cluster's defaults are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from txmq.spark.audit import figures as audit_figures
from txmq.spark.audit import findings as audit_findings
from txmq.spark.audit.figures import Moment, PartitionFigures, Totals
from txmq.spark.audit.findings import HOLES_MAX, GapRun, Hole, Ranges, between_runs
from txmq.spark.audit.match import Window, identities, pair
from txmq.spark.audit.spec import AuditSpec, Kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# How an audit is planned. Spark's default of 200 partitions a shuffle made 2,606 tasks of 2,000 rows: nearly all of
# them empty, and 129 s on a cluster of two cores.
_PLANNING = {
    # Times of messages, and of tables without a zone, are read and spelled in it: in another one the autumn's hour is
    # there twice, and two times look alike.
    "spark.sql.session.timeZone": "UTC",
    # Without this the join would shuffle by identity and number what is already shuffled by identity.
    "spark.sql.requireAllClusterKeysForCoPartition": "false",
    # Partitions that a shuffle left small are joined to at least 1 MiB each, also in what is persisted.
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.minPartitionSize": "1m",
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",
}


@dataclass(frozen=True, slots=True)
class InDoubt:
    """A transaction that waits for its outcome."""

    txid: str
    prepared_ms: int
    age_ms: int
    detail: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The partners that lie around the window, asked for only when something has no partner.

    Attributes:
        ranges: the offsets that should have been read, by partition.
        older_rows: of the identities (one column ``id``) those that have a row outside of what was read; None: there
            is no outside.
        later_messages: messages that came after the window was read; None: there are none.
        came_since: the ids (``txid``) of messages that came after the window and the other topics were read, asked
            after ``in_doubt``: of a transaction over several homes one part is visible before another; None: none.
        in_doubt: what the broker lists as in doubt; None: it cannot be asked.
        together: the messages of the other topics, by name, over the same window with its margins.
        unmade: checks that cannot be made, and why; what the spec leaves out is added.
        unjudged: how many things were left out of both sides, by what they are.
    """

    ranges: Ranges | None = None
    older_rows: Callable[[DataFrame], DataFrame] | None = None
    later_messages: Callable[[], DataFrame] | None = None
    came_since: Callable[[], DataFrame] | None = None
    in_doubt: Callable[[], Sequence[InDoubt]] | None = None
    together: Mapping[str, DataFrame] = field(default_factory=dict)
    unmade: Mapping[Kind, str] = field(default_factory=dict)
    unjudged: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The findings, and figures about them.

    Attributes:
        findings: one row a finding, columns of ``findings.SCHEMA``.
        counts: findings by kind; kinds that were not checked are not in it.
        unchecked: kinds that could not be checked, and why.
        bucket_s: seconds of each of ``moments``.
        unjudged: what lies in the window and was not judged: how many, by what it is.
        blind: why nothing can be said: the window is empty, or a check that was asked for has judged nothing.
    """

    spec: AuditSpec
    window: Window
    findings: DataFrame
    counts: Mapping[Kind, int]
    unchecked: Mapping[Kind, str]
    totals: Totals
    bucket_s: int
    moments: Sequence[Moment]
    partitions: Sequence[PartitionFigures]
    unjudged: Mapping[str, int] = field(default_factory=dict)
    blind: Sequence[str] = ()

    @property
    def has_findings(self) -> bool:
        """Whether anything was found."""
        return any(self.counts.values())

    @property
    def is_clean(self) -> bool:
        """Whether something was judged, and nothing found."""
        return not self.has_findings and not self.blind

    def sample(self, kind: Kind, limit: int) -> list[dict[str, object]]:
        """The first findings of a kind, in the order of the log."""
        chosen = self.findings.filter(F.col("kind") == kind.value)
        rows = chosen.orderBy("partition", "offset", "row_time", "identity", "txid").limit(limit).collect()
        return [row.asDict() for row in rows]


def audit(
    messages: DataFrame,
    rows: DataFrame,
    spec: AuditSpec,
    window: Window | None = None,
    around: Surroundings | None = None,
) -> AuditResult:
    """Compare the messages of a topic with the rows of a table.

    Args:
        messages: columns as ``spark.read.format("txmq")`` has them (key, value, partition, offset, timestamp, txid, and
            headers if the spec names one), of ``spec.topic``, of the window with its margins.
        rows: at least ``spec.columns``, of the window with its margins.
        window: default: everything.
        around: default: nothing lies around.

    Raises:
        ConfigError: a column is missing, or not of the type that the spec says.

    Thread safety: one audit at a time in a session.
    """
    with _planned(messages.sparkSession):
        return _audited(messages, rows, spec, window or Window(), around or Surroundings())


@contextmanager
def _planned(session: SparkSession) -> Iterator[None]:
    before = {name: session.conf.get(name, None) for name in _PLANNING}
    for name, value in _PLANNING.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, former in before.items():
            if former is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, former)


def _audited(
    messages: DataFrame, rows: DataFrame, spec: AuditSpec, window: Window, around: Surroundings
) -> AuditResult:
    pairs = pair(messages, rows, spec, window).persist(StorageLevel.DISK_ONLY)
    figures = audit_figures.totals(pairs)
    runs = audit_figures.runs(pairs)
    unchecked = _unchecked(spec, around)
    found = _Findings(pairs, messages, rows, spec, window, around).of(runs, unchecked)
    findings = found.persist(StorageLevel.MEMORY_AND_DISK)
    counted = {Kind(row["kind"]): row["count"] for row in findings.groupBy("kind").count().collect()}
    bucket_s, moments = audit_figures.moments(pairs, figures)
    counts = {kind: counted.get(kind, 0) for kind in Kind if kind not in unchecked}
    return AuditResult(
        spec, window, findings, counts, unchecked, figures, bucket_s, moments, audit_figures.by_partition(runs),
        unjudged=_unjudged(spec, figures, around), blind=_blind(spec, figures),
    )  # fmt: skip


def _unjudged(spec: AuditSpec, figures: Totals, around: Surroundings) -> dict[str, int]:
    found = {"rows without a time": figures.timeless, "earlier messages": figures.earlier, **around.unjudged}
    if spec.order is not None:
        found["messages without a key, or a row with an order value"] = figures.messages - figures.ordered
    if spec.transaction_size is not None:
        found["messages that do not say the size of their transaction"] = figures.messages - figures.sized
    return {what: count for what, count in found.items() if count}


def _blind(spec: AuditSpec, figures: Totals) -> list[str]:
    if not figures.rows and not figures.messages:
        return ["nothing was judged: the window has no rows and no messages"]
    found = []
    if spec.compare and not figures.matched:
        found.append("nothing was compared: no row has a message")
    if spec.order is not None and not figures.ordered:
        found.append("no order was judged: no message has a key, and a row with an order value")
    if spec.transaction_size is not None and not figures.sized:
        found.append("no transaction was judged: no message says the size of its own")
    return found


def _unchecked(spec: AuditSpec, around: Surroundings) -> dict[Kind, str]:
    why = dict(around.unmade)
    if spec.latest:
        why |= dict.fromkeys((Kind.DUPLICATE, Kind.GAP, Kind.OUT_OF_ORDER), "the newest message of each row counts")
    if spec.order is None:
        why.setdefault(Kind.OUT_OF_ORDER, "no order column is named")
    if not spec.compare and spec.row_txid is None:
        why.setdefault(Kind.DIFFERS, "nothing to compare is named")
    if spec.row_txid is None and spec.transaction_size is None and not spec.together:
        why.setdefault(Kind.TORN, "nothing says what belongs to a transaction: a column, a size or other topics")
    if around.in_doubt is None:
        why.setdefault(Kind.IN_DOUBT, "no broker was asked")
    if around.older_rows is None:
        why.setdefault(Kind.LATE, "all rows were read")
    return why


@dataclass(frozen=True, slots=True)
class _Findings:
    """The parts of the findings, put together."""

    pairs: DataFrame
    messages: DataFrame
    rows: DataFrame
    spec: AuditSpec
    window: Window
    around: Surroundings

    def of(self, runs: Sequence[GapRun], unchecked: Mapping[Kind, str]) -> DataFrame:
        doubts = list(self.around.in_doubt()) if self.around.in_doubt else []
        gaps = [] if Kind.GAP in unchecked else self._gaps(runs)
        parts = [*self._alone(unchecked, doubts), *self._torn(doubts), *gaps]
        if Kind.DIFFERS not in unchecked:
            parts.append(self._not_changed(audit_findings.differing(self.pairs, self.spec)))
        if Kind.OUT_OF_ORDER not in unchecked:
            parts.append(audit_findings.disordered(self.pairs, self.spec))
        if overdue := [doubt for doubt in doubts if doubt.age_ms >= self.spec.settle_ms]:
            parts.append(audit_findings.in_doubt(self._frame_of(overdue), self.spec.topic))
        return reduce(lambda left, right: left.unionByName(right), parts)

    def _alone(self, unchecked: Mapping[Kind, str], doubts: Sequence[InDoubt]) -> list[DataFrame]:
        """Rows and messages without partner, after everything that may excuse them was asked."""
        alone = audit_findings.candidates(self.pairs).persist(StorageLevel.DISK_ONLY)
        sent = audit_findings.is_message(alone)
        older = None
        if self.around.older_rows is not None:
            wanted = sent.filter("copy = 1 and id is not null").select("id").distinct()
            older = wanted.limit(0) if wanted.isEmpty() else self.around.older_rows(wanted)
        parts = [self._not_changed(audit_findings.unknown_messages(sent, older, self.spec))]
        if Kind.MISSING in unchecked:
            return parts
        absent = self._not_excused(audit_findings.is_row(alone), doubts)
        if self.spec.row_txid is not None:
            torn, absent = audit_findings.torn_rows(absent, self.pairs, self.spec.topic)
            parts.append(torn)
        return [*parts, audit_findings.missing(absent, self.spec.topic)]

    def _not_changed(self, found: DataFrame) -> DataFrame:
        """With ``latest``: without what has a newer message by now."""
        if not self.spec.latest or self.around.later_messages is None:
            return found
        found = found.persist(StorageLevel.DISK_ONLY)
        if found.isEmpty():
            return found
        came = identities(self.around.later_messages(), self.rows, self.spec).withColumnRenamed("id", "identity")
        return found.join(came, "identity", "left_anti").select(found.columns)

    def _not_excused(self, absent: DataFrame, doubts: Sequence[InDoubt]) -> DataFrame:
        if absent.isEmpty():
            return absent
        if doubts:
            pending = self._frame_of(doubts).select(F.col("txid").alias("r_txid"))
            absent = absent.join(F.broadcast(pending), "r_txid", "left_anti")
        if self.around.later_messages is not None:
            came = identities(self.around.later_messages(), self.rows, self.spec)
            absent = absent.join(came, "id", "left_anti")
        return absent.persist(StorageLevel.DISK_ONLY)

    def _torn(self, doubts: Sequence[InDoubt]) -> list[DataFrame]:
        parts = []
        if self.spec.transaction_size is not None:
            parts.append(audit_findings.torn_by_size(self.pairs, self.spec.topic))
        if self.around.together:
            inside = replace(self.window, offsets=None).holds_message()
            others = {
                name: frame.select("txid", F.coalesce(inside, F.lit(True)).alias("inside"))
                for name, frame in self.around.together.items()
            }
            parts.append(audit_findings.torn_between(self.pairs, others, self.spec.topic))
        return [self._not_under_way(part, doubts) for part in parts]

    def _not_under_way(self, torn: DataFrame, doubts: Sequence[InDoubt]) -> DataFrame:
        """Without the transactions whose other parts are in doubt, or have come since."""
        torn = torn.persist(StorageLevel.MEMORY_AND_DISK)
        if torn.isEmpty():
            return torn
        under_way = self._frame_of(doubts).select("txid")
        if self.around.came_since is not None:
            under_way = under_way.unionByName(self.around.came_since().select("txid"))
        return torn.join(F.broadcast(under_way.distinct()), "txid", "left_anti").select(torn.columns)

    def _gaps(self, runs: Sequence[GapRun]) -> list[DataFrame]:
        holes = between_runs(runs, self.around.ranges)
        if broken := [(run.partition, run.bucket) for run in runs if not run.adds_up]:
            inside = audit_findings.holes_in(self.pairs, broken).limit(HOLES_MAX).collect()
            holes += [Hole(**row.asDict()) for row in inside]
        holes = [hole for hole in holes if self._is_inside(hole)]
        lines = [
            (Kind.GAP.value, None, self.spec.topic, hole.partition, hole.first, None, None, None, None, str(hole))
            for hole in sorted(holes)[:HOLES_MAX]
        ]
        if not lines:
            return []
        return [self.pairs.sparkSession.createDataFrame(lines, audit_findings.SCHEMA)]

    def _is_inside(self, hole: Hole) -> bool:
        """Whether it lies after the offsets that were audited before."""
        return self.window.offsets is None or hole.last >= self.window.offsets.get(hole.partition, 0)

    def _frame_of(self, doubts: Sequence[InDoubt]) -> DataFrame:
        lines = [(doubt.txid, doubt.detail, doubt.prepared_ms) for doubt in doubts]
        frame = self.pairs.sparkSession.createDataFrame(lines, "txid string, detail string, prepared_ms long")
        return frame.withColumn("prepared", F.timestamp_millis("prepared_ms"))
