"""A database with a marker table, a client of several homes, and an owner that can die."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tests.unit.xa.support import NAME, Connection
from tools.simulated.cluster import SimulatedCluster
from txmq.client.transaction.block import Transaction
from txmq.xa import LastResource
from txmq.xa.resolver import Resolver


class Shop:
    """A database file, and a client of several homes.

    Attributes:
        opened: every connection that was given.
    """

    def __init__(self, path: Path, cluster: SimulatedCluster) -> None:
        self.path, self.cluster = path, cluster
        self.opened: list[Connection] = []
        self.resource = self.new_resource()
        self.resource.install(cluster)
        with self.connect() as connection:
            connection.execute("CREATE TABLE orders (value BLOB)")

    def new_resource(self) -> LastResource:
        """The same database as another process sees it."""
        return LastResource(NAME, connect=self.connect)

    def connect(self) -> Connection:
        """What the application gives as ``connect=``."""
        connection = sqlite3.connect(self.path, factory=Connection, timeout=0.05)
        self.opened.append(connection)
        return connection

    def order(self, value: bytes, *keys: bytes) -> Transaction:
        """A row, and a message for each key."""
        with Transaction(self.cluster, self.cluster, (self.resource,), 30.0) as tx:
            tx.connection(self.resource).execute("INSERT INTO orders (value) VALUES (?)", (value,))
            for key in keys:
                tx.send("orders", value, key=key)
        return tx

    def rows(self) -> list[bytes]:
        """The rows, in order of their insertion."""
        with self.connect() as connection:
            return [value for (value,) in connection.execute("SELECT value FROM orders ORDER BY rowid")]

    def markers(self) -> dict[str, str]:
        """The marker table."""
        with self.connect() as connection:
            return dict(connection.execute("SELECT txid, outcome FROM txmq_marker").fetchall())

    def die(self) -> None:
        """The owner's process ends: its connections are lost."""
        for connection in self.opened:
            connection.close()
        self.opened.clear()
        self.resource.close()
        self.resource.writers.renew()
        self.cluster.owner_dies()

    def resolve(self, resource: LastResource | None = None) -> set[str]:
        """A round of a resolver, of another process unless its resource is given."""
        resolver = Resolver(self.cluster, [resource or self.new_resource()], self.cluster.clock)
        resolved = resolver.round()
        resolver.close()
        return resolved

    def check(self) -> bool:
        """The row is there and the message at every home it was for, or none of them; whether they are."""
        found = [home.values("orders") for home in self.cluster.homes]
        assert all("prepared" not in home.states().values() for home in self.cluster.homes)
        assert all(values == self.rows() for values in found), (found, self.rows())
        return bool(self.rows())
