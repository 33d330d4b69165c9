"""All rows, in the order of the budget (DESIGN.md, section 10)."""

from __future__ import annotations

from bench.model import Row
from bench.rows import backlog, brokers, client, peers, process, put, transactions

ROWS: tuple[Row, ...] = (
    *put.ROWS, *client.ROWS, *transactions.ROWS, *process.ROWS, *backlog.ROWS, *peers.ROWS, *brokers.ROWS,
)  # fmt: skip
