"""All rows, in the order of the budget (docs/benchmarks.md)."""

from __future__ import annotations

from bench.model import Row
from bench.rows import (
    aio,
    backlog,
    binlog,
    binlog_replica,
    brokers,
    client,
    cluster,
    groups,
    last_resource,
    ordered,
    outbox,
    peers,
    process,
    put,
    spark,
    tls,
    transactions,
    xa,
)

ROWS: tuple[Row, ...] = (
    *put.ROWS, *tls.ROWS, *client.ROWS, *groups.ROWS, *ordered.ROWS, *transactions.ROWS, *aio.ROWS,
    *last_resource.ROWS, *outbox.ROWS, *xa.ROWS, *process.ROWS, *backlog.ROWS, *cluster.ROWS, *binlog.ROWS,
    *binlog_replica.ROWS, *spark.ROWS, *peers.ROWS, *brokers.ROWS,
)  # fmt: skip
