"""A client of a real broker with an order database in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

import txmq
from tests.services.loop_client import Connect, inside
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource

INSERT = "INSERT INTO orders (value) VALUES (?)"


class SQLiteShop:
    """One process of the shop."""

    def __init__(self, broker: BrokerProcess, path: Path, connect: Connect = txmq.connect) -> None:
        self.path = path
        self.client = connect(broker.address)
        self.producer = self.client.producer()
        self.opened: list[sqlite3.Connection] = []
        self.resource = LastResource("shop", connect=self.connect)

    @classmethod
    @contextmanager
    def installed(cls, broker: BrokerProcess, path: Path, connect: Connect = txmq.connect) -> Iterator[Self]:
        """The first process, which makes topic and tables."""
        shop = cls(broker, path, connect)
        try:
            shop.client.topics.create("orders")
            with closing(shop.connect()) as connection, connection:
                connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, value BLOB)")
            inside(shop.client, shop.resource.install)
            yield shop
        finally:
            shop.die()

    def connect(self) -> sqlite3.Connection:
        """Return a connection that any thread may use, one at a time."""
        self.opened.append(sqlite3.connect(self.path, timeout=30.0, check_same_thread=False))
        return self.opened[-1]

    def order(self, value: bytes) -> txmq.Outcome:
        """Commit a row and its message."""
        with self.producer.transaction(self.resource) as tx:
            tx.connection(self.resource).execute(INSERT, (value,))
            self.producer.send("orders", value, key=b"k")
        return tx.outcome

    def rows(self) -> list[bytes]:
        """Return the committed rows in order."""
        with closing(sqlite3.connect(self.path, timeout=30.0)) as connection:
            return [value for (value,) in connection.execute("SELECT value FROM orders ORDER BY id")]

    def messages(self) -> list[bytes | None]:
        """Return the visible messages in order."""
        return [message.value for message in self.client.browse("orders")]

    def die(self) -> None:
        """End as a process does: what it has opened is closed."""
        for connection in self.opened:
            connection.close()
        self.client.close()
