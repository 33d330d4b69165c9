"""A client of a real broker with an order database on a real MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import txmq
from tests.services.loop_client import Connect
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource

from .mysql_database import MySQLDatabase


class MySQLShop(MySQLDatabase):
    """One process of the shop."""

    def __init__(
        self, broker: BrokerProcess, server: MariaDB, database: str = "", connect: Connect = txmq.connect
    ) -> None:
        super().__init__(server, database)
        self.broker, self.topic = broker, self.database
        self.client = connect(broker.address)
        self.producer = self.client.producer()
        self.resource = LastResource("shop", connect=self.connect)

    @classmethod
    @contextmanager
    def installed(cls, broker: BrokerProcess, server: MariaDB, connect: Connect = txmq.connect) -> Iterator[Self]:
        """The first process, which makes topic and tables."""
        shop = cls(broker, server, connect=connect)
        try:
            shop.client.topics.create(shop.topic)
            shop.execute("CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, value VARBINARY(100)) ENGINE=InnoDB")
            shop.resource.install()
            yield shop
        finally:
            shop.die()

    def order(self, value: bytes, resource: Any = None, timeout: float = 30.0) -> txmq.Outcome:
        """Commit a row and its message."""
        with self.producer.transaction(resource or self.resource, timeout=timeout) as tx:
            self.insert(tx, value)
        return tx.outcome

    def insert(self, tx: Any, value: bytes) -> None:
        """Add a row and its message to a transaction."""
        tx.connection(self.resource).cursor().execute("INSERT INTO orders (value) VALUES (%s)", (value,))
        self.producer.send(self.topic, value, key=b"k")

    def session_of(self, tx: Any) -> int:
        """The transaction's session, as the server numbers them."""
        cursor = tx.connection(self.resource).cursor()
        cursor.execute("SELECT CONNECTION_ID()")
        return int(cursor.fetchall()[0][0])

    def rows(self) -> list[bytes]:
        """Return the committed rows in order."""
        return [value for (value,) in self.execute("SELECT value FROM orders ORDER BY id")]

    def messages(self) -> list[bytes | None]:
        """Return the visible messages in order."""
        return [message.value for message in self.client.browse(self.topic)]

    def lock_waits(self) -> int:
        """How many transactions wait for a row's lock now (``innodb_trx`` is not asked: looked at often, it is old)."""
        return int(self.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")[0][1])

    def is_resolved(self) -> bool:
        """Whether nothing is in doubt."""
        return list(self.client.transactions.list(state="in-doubt")) == []

    def die(self) -> None:
        """End as a process does: what it has opened is closed."""
        self.disconnect()
        self.client.close()
