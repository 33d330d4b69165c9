"""A shop to be audited: orders in SQLite, their messages in a topic, and the command that compares them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import txmq
from txmq.cli.audit_run import Request
from txmq.testing.processes.broker import BrokerProcess


class Shop:
    """A table in SQLite and a topic, side by side."""

    def __init__(self, client: txmq.Client, path: Path, topic: str) -> None:
        self.client, self.path, self.topic = client, path, topic
        client.topics.ensure(topic, partitions=2)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, created INTEGER NOT NULL)")

    def order(self, number: int, at_ms: int, *, row: bool = True, message: bool = True) -> None:
        if row:
            with closing(sqlite3.connect(self.path)) as connection, connection:
                connection.execute("INSERT INTO orders VALUES (?, ?)", (number, at_ms))
        if message:
            with self.client.producer() as producer:
                producer.send(self.topic, b"", key=str(number).encode())

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"


def asked(shop: Shop, broker: BrokerProcess, **changes: Any) -> Request:
    """``txmq audit`` of the shop."""
    directory = shop.path.with_name("audit")
    plain = Request(
        topic=shop.topic, database=shop.url, table="orders", match=(), compare=(), order=None, row_time="created:ms",
        row_txid=None, transaction_size=None, together=(), since=None, until=None, from_offsets=None, to_offsets=None,
        settle="1s", interval=None, directory=directory, master="local[2]", memory="1g", bootstrap=broker.address,
    )  # fmt: skip
    return replace(plain, **changes)
