"""A source for Spark whose rows lie in the workers' memory as Arrow batches: what a Python source can be at best.

A module of its own: Spark's workers import it by name, and only the row that needs it needs Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from bench.spark_rows import SIX, TASKS, TOPIC, VALUE
from txmq.spark.decode.arrow_columns import TYPES

ROWS_A_BATCH = 100_000


class InMemory(DataSource):  # type: ignore[misc]
    """The format ``arrow-in-memory``: option ``count`` rows, the same batch again and again."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "arrow-in-memory"

    def schema(self) -> str:
        """The six columns of the source."""
        return "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP"

    def reader(self, schema: Any) -> DataSourceReader:
        """One reader for all."""
        return _InMemoryReader(int(self.options["count"]) // TASKS)


class _InMemoryReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, count: int) -> None:
        self._count = count

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = pa.RecordBatch.from_arrays(
            [
                pa.array([b"%016d" % number for number in range(ROWS_A_BATCH)]),
                pa.repeat(pa.scalar(VALUE), ROWS_A_BATCH),
                pa.repeat(pa.scalar(TOPIC), ROWS_A_BATCH),
                pa.array([partition.value] * ROWS_A_BATCH, pa.int32()),
                pa.array(range(ROWS_A_BATCH)),
                pa.array(range(ROWS_A_BATCH)).view(TYPES["timestamp"]),
            ],
            schema=pa.schema([(name, TYPES[name]) for name in SIX]),
        )
        for left in range(self._count, 0, -ROWS_A_BATCH):
            yield rows.slice(0, min(left, ROWS_A_BATCH))
