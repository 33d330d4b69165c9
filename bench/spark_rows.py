"""The messages of the rows about Spark: written by the benchmark, and made in memory by ``bench.arrow_source``."""

from __future__ import annotations

TASKS, TOPIC = 2, "orders"
SIX = ("key", "value", "topic", "partition", "offset", "timestamp")
VALUE = bytes(range(100))
