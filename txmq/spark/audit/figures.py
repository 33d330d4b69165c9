"""The figures of an audit: totals, by time, by partition. Collected from the pairs in three small jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from txmq.spark.audit.findings import GapRun, offset_buckets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BUCKETS_MAX = 1500  # of time: what the driver holds and a drawing shows
MINUTE_S = 60
SHORT_BUCKETS = 60
_SHORT_S = (1, 2, 5, 10)
_PERCENTILES = (0.5, 0.99)
_ACCURACY = 10_000


@dataclass(frozen=True, slots=True)
class Totals:
    """The contents of the window. Latencies are in ms, from the row's time to the message's; None: not measured.

    Attributes:
        ordered: messages that have a key, and a row with an order value.
        sized: messages that say how many their transaction has.
        timeless: rows whose time is not known, so that they are in no window.
        earlier: messages that a newer one of the same identity stands for (``latest``).
    """

    messages: int = 0
    rows: int = 0
    matched: int = 0
    messages_read: int = 0  # with the margins
    rows_read: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    latency_ms_p50: float | None = None
    latency_ms_p99: float | None = None
    latency_ms_max: float | None = None
    ordered: int = 0
    sized: int = 0
    timeless: int = 0
    earlier: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """One bucket of time, from ``at_ms``: rows and messages by their own times; latencies by the row's."""

    at_ms: int
    messages: int
    rows: int
    latency_ms_p50: float | None
    latency_ms_p99: float | None


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """Figures of one partition."""

    partition: int
    first: int
    last: int
    messages: int


def totals(pairs: DataFrame) -> Totals:
    """Counts and latencies of everything: the job that makes the pairs."""
    latency = _latency()
    row: dict[str, Any] = (
        pairs.agg(
            F.count_if(F.col("m_in")).alias("messages"),
            F.count_if(F.col("r_in")).alias("rows"),
            F.count_if(F.col("r_here") & F.col("m_offset").isNotNull() & (F.col("m_in") | F.col("r_in"))).alias(
                "matched"
            ),
            F.count("m_offset").alias("messages_read"),
            F.count("r_here").alias("rows_read"),
            F.unix_millis(
                F.least(F.min(F.when(F.col("m_in"), F.col("m_at"))), F.min(F.when(F.col("r_in"), F.col("r_at"))))
            ).alias("first_ms"),
            F.unix_millis(
                F.greatest(F.max(F.when(F.col("m_in"), F.col("m_at"))), F.max(F.when(F.col("r_in"), F.col("r_at"))))
            ).alias("last_ms"),
            F.count_if(F.col("m_in") & F.col("m_key").isNotNull() & F.col("r_order").isNotNull()).alias("ordered"),
            F.count_if(F.col("m_in") & F.col("m_txid").isNotNull() & F.col("m_size").isNotNull()).alias("sized"),
            F.count_if(F.col("r_here") & F.col("r_at").isNull() & ~F.col("r_in")).alias("timeless"),
            F.coalesce(F.sum(F.when(F.col("m_in"), F.col("m_earlier"))), F.lit(0)).alias("earlier"),
            F.percentile_approx(latency, list(_PERCENTILES), _ACCURACY).alias("latency"),
            F.max(latency).alias("latency_ms_max"),
        )
        .first()
        .asDict()
    )
    p50, p99 = row.pop("latency") or (None, None)
    return Totals(**row, latency_ms_p50=p50, latency_ms_p99=p99)


def moments(pairs: DataFrame, span: Totals) -> tuple[int, list[Moment]]:
    """Seconds of a bucket (a minute, or more if the window is long), and the buckets in order."""
    if span.first_ms is None or span.last_ms is None:
        return MINUTE_S, []
    bucket_ms = bucket_seconds((span.last_ms - span.first_ms) / 1000) * 1000

    def bucket(column: str) -> Any:
        return (F.floor(F.unix_millis(column) / bucket_ms) * bucket_ms).cast("long").alias("at_ms")

    none = F.lit(None).cast("double")
    sent = pairs.filter("m_in and m_at is not null").select(
        bucket("m_at"), F.lit(1).alias("m"), F.lit(0).alias("r"), none.alias("l")
    )
    kept = pairs.filter("r_in and r_at is not null").select(
        bucket("r_at"), F.lit(0).alias("m"), F.lit(1).alias("r"), _latency().cast("double").alias("l")
    )
    found = (
        sent.unionByName(kept)
        .groupBy("at_ms")
        .agg(
            F.sum("m").alias("m"),
            F.sum("r").alias("r"),
            F.percentile_approx("l", list(_PERCENTILES), _ACCURACY).alias("l"),
        )
        .orderBy("at_ms")
    )
    lines = [
        Moment(row["at_ms"], row["m"], row["r"], *(row["l"] or (None, None)))
        for row in found.limit(2 * BUCKETS_MAX).collect()
    ]
    return bucket_ms // 1000, lines


def bucket_seconds(span_s: float) -> int:
    """A minute; less for a short window, several minutes if there would be too many buckets."""
    short = next((seconds for seconds in _SHORT_S if span_s <= seconds * SHORT_BUCKETS), None)
    return short or max(1, math.ceil(span_s / (BUCKETS_MAX * MINUTE_S))) * MINUTE_S


def runs(pairs: DataFrame) -> list[GapRun]:
    """Messages by runs of offsets."""
    return [GapRun(**row.asDict()) for row in offset_buckets(pairs).collect()]


def by_partition(found: list[GapRun]) -> list[PartitionFigures]:
    """The runs put together."""
    lines: dict[int, PartitionFigures] = {}
    for run in found:
        first, last = run.ends
        old = lines.get(run.partition, PartitionFigures(run.partition, first, last, 0))
        lines[run.partition] = PartitionFigures(
            run.partition, min(old.first, first), max(old.last, last), old.messages + run.count
        )
    return [lines[partition] for partition in sorted(lines)]


def _latency() -> Any:
    """From the row's time to the message's, ms; null if one is not known or the pair is outside the window."""
    inside = F.col("r_in") & (F.col("copy") == 1)
    return F.when(inside, (F.unix_micros("m_at") - F.unix_micros("r_at")) / 1000)
