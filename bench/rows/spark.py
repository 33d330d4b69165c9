"""Spark on 5 million messages of 100 B: segment files, the broker, a stream, a sink; and Spark's own limit.

The query reads every column (count and sum over six), so that nothing is saved by not reading. The bare limits are the
same rows as Arrow batches that lie in the workers' memory, and as Parquet files. The session is warm: every query has
run once before it is measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import txmq
from bench.model import Bound, Measure, NotInstalledError, Row, Surroundings
from bench.spark_rows import SIX, TASKS, TOPIC, VALUE
from txmq.testing.bench.loads import pairs_of
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.spark import SparkMissingError, start_session

MESSAGES, PER_CALL, PARTITIONS = 5_000_000, 250_000, 4
SINK_SHARE = 5  # of the messages are written in one batch: it must fit prepared_bytes_max
OFFSETS_A_TRIGGER = 1_000_000
_SUMS = (
    "count(*)", "sum(length(key))", "sum(length(value))", "sum(length(topic))", "sum(partition)", "sum(offset)",
    "max(timestamp)",
)  # fmt: skip


def _sums(frame: Any, expected: int) -> float:
    """Run the query; seconds."""
    started = time.perf_counter()
    (found,) = frame.selectExpr(*_SUMS).collect()
    taken = time.perf_counter() - started
    if found[0] != expected:
        raise AssertionError(f"{found[0]} rows of {expected}")
    return taken


class _Bench:
    """A loaded broker and a session."""

    def __init__(self, broker: BrokerProcess, surroundings: Surroundings) -> None:
        self.broker, self.directory, self.count = broker, surroundings.directory, surroundings.count(MESSAGES)
        try:
            self.spark = start_session("bench", settings={"spark.driver.memory": "2g"}, is_quick_start=False)
        except SparkMissingError as error:
            raise NotInstalledError(str(error)) from error
        from bench.arrow_source import InMemory

        self.spark.dataSource.register(InMemory)
        self._numbers = itertools.count()

    def load(self) -> None:
        """Fill the topic: batches as ``send_many`` makes them, of 100 messages and more."""
        pairs = pairs_of(min(PER_CALL, self.count), VALUE)
        with txmq.connect(self.broker.address) as client, client.producer(timeout=60) as producer:
            client.topics.create(TOPIC, partitions=PARTITIONS)
            for _ in range(self.count // len(pairs)):
                producer.send_many(TOPIC, pairs)
        self._source().write.parquet(str(self.directory / "parquet"))

    def _source(self, **options: str) -> Any:
        options = options or {"bootstrap": self.broker.address}
        return self.spark.read.format("txmq").options(topic=TOPIC, columns=",".join(SIX), **options).load()

    def stopped(self) -> dict[str, float]:
        """Figures that need no broker; it is stopped meanwhile."""
        self.broker.stop()
        arrow = self.spark.read.format("arrow-in-memory").option("count", self.count).load()
        queries: dict[str, Callable[[], float]] = {
            "Arrow in memory": lambda: _sums(arrow, self.count),
            "Parquet": lambda: _sums(self.spark.read.parquet(str(self.directory / "parquet")), self.count),
            "path": lambda: _sums(self._source(path=str(self.broker.data_dir)), self.count),
        }
        figures = {name: self.count / query() for name, query in queries.items()}
        self.broker.start()
        return figures

    def served(self) -> dict[str, float]:
        """Figures through the broker, on the same cores."""
        return {
            "broker": self.count / _sums(self._source(), self.count), "stream": self.count / self._drain(),
            "sink": self._written(),
        }  # fmt: skip

    def _written(self) -> float:
        """Rows a second into a topic of their own, in one batch: durable, and visible all at once."""
        from pyspark.sql import functions

        topic, count = f"sink-{next(self._numbers)}", self.count // SINK_SHARE
        frame = self.spark.range(0, count, numPartitions=TASKS).select(
            functions.lpad(functions.col("id").cast("string"), 16, "0").cast("binary").alias("key"),
            functions.lit(VALUE).alias("value"),
        )
        with txmq.connect(self.broker.address, timeout=60.0) as client:
            client.topics.create(topic, partitions=PARTITIONS)
            started = time.perf_counter()
            frame.write.format("txmq").options(bootstrap=self.broker.address, topic=topic).mode("append").save()
            taken = time.perf_counter() - started
            rows = sum(held["end"] - held["start"] for held in client.topics.watermarks(topic))
            client.topics.delete(topic)
        if rows != count:
            raise AssertionError(f"{rows} rows of {count}")
        return count / taken

    def _drain(self) -> float:
        """Seconds to stream everything into nothing, the query's start included."""
        checkpoint = str(self.directory / f"checkpoint-{next(self._numbers)}")
        stream = self.spark.readStream.format("txmq").options(
            bootstrap=self.broker.address, topic=TOPIC, columns=",".join(SIX), startingOffsets="earliest",
            maxOffsetsPerTrigger=str(OFFSETS_A_TRIGGER),
        )  # fmt: skip
        started = time.perf_counter()
        query = stream.load().writeStream.format("noop").option("checkpointLocation", checkpoint)
        running = query.trigger(availableNow=True).start()
        running.awaitTermination()
        taken = time.perf_counter() - started
        rows = sum(progress["numInputRows"] for progress in running.recentProgress)
        if rows != self.count:
            raise AssertionError(f"{rows} rows of {self.count}")
        return taken


@contextmanager
def _spark(surroundings: Surroundings) -> Iterator[Measure]:
    with BrokerProcess(surroundings.directory / "data") as broker:
        bench = _Bench(broker, surroundings)
        bench.load()
        bench.stopped(), bench.served()

        def measure() -> dict[str, float]:
            figures = bench.stopped() | bench.served()
            figures["path / Arrow"] = 100 * figures["path"] / figures["Arrow in memory"]
            return figures

        yield measure
        bench.spark.stop()


ROWS = (
    Row(
        "spark", f"Spark: count and sum over six columns of {MESSAGES // 1_000_000} million messages of 100 B", _spark,
        {
            "path": "rows/s", "broker": "rows/s", "stream": "rows/s", "sink": "rows/s",
            "Arrow in memory": "rows/s", "Parquet": "rows/s", "path / Arrow": "%",
        },
        (
            Bound("path", 1_000_000, "rows/s"), Bound("path / Arrow", 50, "%"),
            Bound("broker", 500_000, "rows/s"), Bound("stream", 400_000, "rows/s"), Bound("sink", 150_000, "rows/s"),
        ),
        repeats=3,
    ),
)  # fmt: skip
