"""Findings, read from the pairs of ``match``, and holes in what was read.

Theory of operation. *Candidates* are the lines without partner that lie in the window; there are few unless everything
is wrong. They become findings only after what could excuse them was asked: rows outside the window (a message whose
row is there but older is *late*, not a *phantom*), messages that came after the window was read, transactions in doubt,
other messages of the row's transaction (then the transaction is *torn*). The rest comes from the pairs themselves.

One fault is one finding: a message that stands as duplicate does not count for the order of its key; the rows that a
torn transaction lacks are in its finding, not missing too.

A *hole* is made of offsets of a partition that cannot be read, though the log says that they exist. Offsets have no
holes (P2 of docs/promises.md), so a run of 65,536 offsets is whole when count, first and last fit and the offsets add
up. Spark counts the runs; the driver compares them with the ranges that should have been read. Only runs that do not
add up are looked at offset by offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.window import Window as Over

from txmq.spark.audit.match import TXID_COLUMN
from txmq.spark.audit.spec import AuditSpec, Kind

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SCHEMA = (
    "kind string, identity string, topic string, partition int, offset long, key string, txid string, "
    "row_time timestamp, message_time timestamp, detail string"
)
BUCKET_BITS = 16  # offsets are counted in runs of 65,536
IDENTITIES_NAMED = 5  # in the text of a torn transaction
HOLES_MAX = 10_000  # findings; more of them say nothing more
Ranges = Mapping[int, tuple[int, int]]  # by partition: first offset, and the one after the last


def candidates(pairs: DataFrame) -> DataFrame:
    """The lines of the window that have no partner: candidates for missing, phantom, duplicate, late or torn."""
    alone = (F.col("m_offset").isNull() & F.col("r_in")) | (F.col("r_here").isNull() & F.col("m_in"))
    return pairs.filter(alone)


def is_row(candidate: DataFrame) -> DataFrame:
    """Of the candidates, the rows without message."""
    return candidate.filter(F.col("m_offset").isNull())


def is_message(candidate: DataFrame) -> DataFrame:
    """Of the candidates, the messages without row."""
    return candidate.filter(F.col("m_offset").isNotNull())


def missing(rows: DataFrame, topic: str) -> DataFrame:
    """Rows without message."""
    return _finding(rows, Kind.MISSING, topic, F.lit("the row has no message"))


def unknown_messages(messages: DataFrame, older: DataFrame | None, spec: AuditSpec) -> DataFrame:
    """Messages without row: duplicates, and phantoms or late ones.

    Args:
        messages: candidates.
        older: one column ``id``: identities whose row was found outside the window; None: there is no outside.
    """
    first = F.format_string(
        "its row has the message of partition %d, offset %d", "m_first.m_partition", "m_first.m_offset"
    )
    doubled = _finding(messages.filter("copy > 1 and id is not null"), Kind.DUPLICATE, spec.topic, first)
    alone = messages.filter("copy = 1 or id is null")
    match = ", ".join(str(term) for term in spec.match)
    why = F.when(F.col("id").isNull(), F.lit(f"it cannot be matched: {match}")).otherwise(
        F.lit("no row has its identity")
    )
    if older is None:
        return doubled.unionByName(_finding(alone, Kind.PHANTOM, spec.topic, why))
    phantoms = _finding(alone.join(older, "id", "left_anti"), Kind.PHANTOM, spec.topic, why)
    text = F.lit("its row was committed outside the window and its margin: late, or sent again")
    late = _finding(alone.join(older, "id", "left_semi"), Kind.LATE, spec.topic, text)
    return doubled.unionByName(phantoms).unionByName(late)


def differing(pairs: DataFrame, spec: AuditSpec) -> DataFrame:
    """Pairs of which the compared values are not equal."""
    names = [*(term.column for term in spec.compare), *([TXID_COLUMN] if spec.row_txid else [])]
    # The newest state of a row that was changed within the margin may be on its way.
    is_judged = F.col("r_in") if spec.latest else F.col("m_in") | F.col("r_in")
    both = pairs.filter(F.col("m_offset").isNotNull() & F.col("r_here") & is_judged)
    parts = []
    for number, name in enumerate(names):
        row, message = F.col("r_values")[number], F.col("m_values")[number]
        text = F.concat(F.lit(f"{name}: row "), _shown(row), F.lit(", message "), _shown(message))
        parts.append(F.when(~row.eqNullSafe(message), text))
    different = both.filter(~F.col("r_values").eqNullSafe(F.col("m_values")))
    return _finding(different, Kind.DIFFERS, spec.topic, F.concat_ws("; ", *parts))


def disordered(pairs: DataFrame, spec: AuditSpec) -> DataFrame:
    """Messages that follow one of their key with a higher order value, or in another partition than it."""
    known = pairs.filter("m_offset is not null and r_order is not null and m_key is not null")
    before = Over.partitionBy("m_key").orderBy("m_partition", "m_offset")
    for name in ("m_partition", "m_offset", "r_order"):
        known = known.withColumn(f"p_{name}", F.lag(name).over(before))
    moved = F.col("p_m_partition") != F.col("m_partition")
    wrong = known.filter((moved | (F.col("r_order") < F.col("p_r_order"))) & F.col("m_in"))
    text = F.when(moved, F.format_string("its key has messages in partition %d too", "p_m_partition")).otherwise(
        F.concat(
            F.lit(f"{spec.order} "), F.col("r_order").cast("string"), F.lit(" stands behind "),
            F.col("p_r_order").cast("string"), F.format_string(" (offset %d)", "p_m_offset"),
        )
    )  # fmt: skip
    return _finding(wrong, Kind.OUT_OF_ORDER, spec.topic, text)


def torn_rows(absent: DataFrame, pairs: DataFrame, topic: str) -> tuple[DataFrame, DataFrame]:
    """Rows without message whose transaction has others: the torn transactions, and the rows that remain missing."""
    there = pairs.filter("m_txid is not null and r_here").select(F.col("m_txid").alias("r_txid"))
    wanted = F.broadcast(absent.filter("r_txid is not null").select("r_txid").distinct())
    seen = there.join(wanted, "r_txid", "left_semi").groupBy("r_txid").agg(F.count("*").alias("seen")).cache()
    lacking = absent.join(seen, "r_txid").groupBy("r_txid", "seen").agg(
        F.count("*").alias("lacking"), F.min("r_at").alias("r_at"), F.sort_array(F.collect_set("id")).alias("ids")
    )  # fmt: skip
    text = F.format_string(
        "%d of its rows have messages, %d have none: %s", "seen", "lacking",
        F.array_join(F.slice("ids", 1, IDENTITIES_NAMED), ", "),
    )  # fmt: skip
    torn = _by_transaction(lacking.withColumnRenamed("r_txid", "txid"), Kind.TORN, topic, text, F.col("r_at"))
    return torn, absent.join(seen, "r_txid", "left_anti")


def torn_by_size(pairs: DataFrame, topic: str) -> DataFrame:
    """Transactions with fewer or more messages than their messages say."""
    sent = pairs.filter("m_txid is not null and m_size is not null")
    counted = sent.groupBy(F.col("m_txid").alias("txid")).agg(
        F.count("*").alias("seen"), F.max("m_size").alias("size"), F.max("m_in").alias("inside"),
        F.min("m_at").alias("at"),
    )  # fmt: skip
    wrong = counted.filter("inside and seen != size")
    text = F.format_string("%d of its %d messages are visible", "seen", "size")
    return _by_transaction(wrong, Kind.TORN, topic, text, F.lit(None).cast("timestamp"), F.col("at"))


def torn_between(pairs: DataFrame, others: Mapping[str, DataFrame], topic: str) -> DataFrame | None:
    """Transactions that have messages in one topic of the set and none in another.

    Args:
        others: messages of the other topics, with ``txid`` and ``inside`` (in the window, not only in its margin).
    """
    sides = {
        topic: pairs.filter("m_txid is not null").select(F.col("m_txid").alias("txid"), F.col("m_in").alias("inside"))
    }
    sides |= {name: frame.filter("txid is not null").select("txid", "inside") for name, frame in others.items()}
    if len(sides) == 1:
        return None
    every = None
    for name, frame in sides.items():
        marked = frame.withColumn("topic", F.lit(name))
        every = marked if every is None else every.unionByName(marked)
    assert every is not None
    found = every.groupBy("txid").agg(F.max("inside").alias("inside"), F.collect_set("topic").alias("topics"))
    torn = found.filter(F.col("inside") & (F.size("topics") < len(sides)))
    lacks = F.array_except(F.array(*[F.lit(name) for name in sides]), F.col("topics"))
    text = F.concat(
        F.lit("it has messages in "), F.array_join(F.sort_array("topics"), ", "),
        F.lit(" and none in "), F.array_join(lacks, ", "),
    )  # fmt: skip
    return _by_transaction(torn, Kind.TORN, topic, text, F.lit(None).cast("timestamp"))


def in_doubt(frame: DataFrame, topic: str) -> DataFrame:
    """Transactions in doubt: ``frame`` has ``txid``, ``detail``, ``prepared`` (a timestamp)."""
    return _by_transaction(
        frame, Kind.IN_DOUBT, topic, F.col("detail"), F.lit(None).cast("timestamp"), F.col("prepared")
    )


def offset_buckets(pairs: DataFrame) -> DataFrame:
    """Messages by partition and run of 65,536 offsets, small enough for the driver (``between_runs``)."""
    bucket = F.shiftright("m_offset", BUCKET_BITS)
    within = F.col("m_offset").bitwiseAND(F.lit((1 << BUCKET_BITS) - 1))
    return (
        pairs.filter("m_offset is not null")
        .groupBy(F.col("m_partition").alias("partition"), bucket.alias("bucket"))
        .agg(F.count("*").alias("count"), F.min(within).alias("first"), F.max(within).alias("last"),
             F.sum(within).alias("total"))
    )  # fmt: skip


def holes_in(pairs: DataFrame, buckets: Iterable[tuple[int, int]]) -> DataFrame:
    """Holes inside these buckets (partition, bucket): partition, first and last offset."""
    chosen = pairs.sparkSession.createDataFrame(list(buckets), "m_partition int, bucket long")
    read = pairs.filter("m_offset is not null").select("m_partition", "m_offset")
    read = read.withColumn("bucket", F.shiftright("m_offset", BUCKET_BITS))
    before = Over.partitionBy("m_partition", "bucket").orderBy("m_offset")
    found = read.join(F.broadcast(chosen), ["m_partition", "bucket"]).withColumn(
        "previous", F.lag("m_offset").over(before)
    )
    return found.filter("m_offset != previous + 1").select(
        F.col("m_partition").alias("partition"), (F.col("previous") + 1).alias("first"),
        (F.col("m_offset") - 1).alias("last"),
    )  # fmt: skip


def _shown(value: Column) -> Column:
    return F.coalesce(value, F.lit("nothing"))


def _finding(frame: DataFrame, kind: Kind, topic: str, detail: Column) -> DataFrame:
    return frame.select(
        F.lit(kind.value).alias("kind"),
        F.col("id").alias("identity"),
        F.lit(topic).alias("topic"),
        F.col("m_partition").alias("partition"),
        F.col("m_offset").alias("offset"),
        F.coalesce(_text(F.col("m_key")), F.col("r_key")).alias("key"),
        F.coalesce("m_txid", "r_txid").alias("txid"),
        F.col("r_at").alias("row_time"),
        F.col("m_at").alias("message_time"),
        detail.alias("detail"),
    )


def _by_transaction(
    frame: DataFrame, kind: Kind, topic: str, detail: Column, row_time: Column, message_time: Column | None = None
) -> DataFrame:
    nothing: Sequence[Column] = [F.lit(None).cast("string")]
    return frame.select(
        F.lit(kind.value).alias("kind"), nothing[0].alias("identity"), F.lit(topic).alias("topic"),
        F.lit(None).cast("int").alias("partition"), F.lit(None).cast("long").alias("offset"), nothing[0].alias("key"),
        F.col("txid"), row_time.alias("row_time"),
        (F.lit(None).cast("timestamp") if message_time is None else message_time).alias("message_time"),
        detail.alias("detail"),
    )  # fmt: skip


def _text(key: Column) -> Column:
    """A key as text, or in hexadecimal if it is not UTF-8."""
    return F.coalesce(F.try_validate_utf8(key.cast("string")), F.concat(F.lit("0x"), F.hex(key)))


# --- holes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Hole:
    """Offsets ``first`` to ``last`` of a partition are not there; ``last < first``: ``first`` was read twice."""

    partition: int
    first: int
    last: int

    def __str__(self) -> str:
        if self.last < self.first:
            return f"offset {self.first} was read twice"
        count = self.last - self.first + 1
        return f"{count} offset{'s' if count > 1 else ''} cannot be read: {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class GapRun:
    """Figures of one run of offsets; ``first``, ``last`` and ``total`` count from the run's beginning."""

    partition: int
    bucket: int
    count: int
    first: int
    last: int
    total: int

    @property
    def adds_up(self) -> bool:
        """Whether every offset from first to last is there once."""
        is_dense = self.count == self.last - self.first + 1
        return is_dense and 2 * self.total == self.count * (self.first + self.last)

    @property
    def ends(self) -> tuple[int, int]:
        """First and last offset."""
        start = self.bucket << BUCKET_BITS
        return start + self.first, start + self.last


def between_runs(runs: Iterable[GapRun], ranges: Ranges | None) -> list[Hole]:
    """Holes before, between and after the runs.

    Args:
        ranges: what should have been read; None: what lies before the first and after the last offset is not judged.
    """
    by_partition: dict[int, list[GapRun]] = {partition: [] for partition in ranges or ()}
    for run in sorted(runs, key=lambda run: (run.partition, run.bucket)):
        by_partition.setdefault(run.partition, []).append(run)
    holes = []
    for partition, found in sorted(by_partition.items()):
        ends = [run.ends for run in found]
        start, end = (ranges or {}).get(partition, (ends[0][0], ends[-1][1] + 1) if ends else (0, 0))
        expected = start
        for first, last in ends:
            if first > expected:
                holes.append(Hole(partition, expected, first - 1))
            expected = last + 1
        if expected < end:
            holes.append(Hole(partition, expected, end - 1))
    return holes
