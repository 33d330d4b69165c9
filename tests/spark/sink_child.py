"""A driver and its task in a process of their own, without Spark: writes one batch over all homes, and may die."""

from __future__ import annotations

import sys

import pyarrow as pa

from txmq.spark.sink import queries, task
from txmq.spark.sink.digest import Attempt
from txmq.spark.sink.options import parse_options


def main(bootstrap: str, topic: str, query: str, partitions: str) -> None:
    """A row for each partition, in batch 0 of the query."""
    options = parse_options({"bootstrap": bootstrap, "topic": topic, "timeout": "20"}, is_streaming=False)
    client = task.client_of(options)
    at = Attempt(query, queries.new_epoch(client), 0, 0, 0)
    opened = queries.open_query(client, topic, query, at.epoch, 0)
    places = range(int(partitions))
    columns = {"value": pa.array([b"%d" % place for place in places]), "partition": pa.array(places, pa.int32())}
    written = task.write(client, options, at, iter([pa.record_batch(columns)]), opened.home)
    queries.commit(client, opened.home, at, written.transactions)


if __name__ == "__main__":
    main(*sys.argv[1:])
