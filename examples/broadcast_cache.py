"""A cache in every process, and a broadcast that tells all of them when a price has changed.

Start a broker with ``txmq broker``, then in two terminals ``python examples/broadcast_cache.py /tmp/prices.db``. Type
``tea 450`` in one: row and message are written both or neither. Type ``tea`` in either: the price, from its cache.

A message is visible only when the row it tells of can be read. So a process that forgets the cached price when the
message comes, and reads the row afterwards, has the new one. Two things are left to watch out for, both in
``price_of``.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path

import txmq
from txmq import LastResource

TOPIC = "price-changes"


class Prices:
    """Prices by name, cached."""

    def __init__(self, database: Path, client: txmq.Client) -> None:
        self._database = database
        with closing(self._connect()) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS prices (name TEXT PRIMARY KEY, price INTEGER)")
        self._rows = LastResource("prices-db", connect=self._connect)
        client.topics.ensure(TOPIC, partitions=2)
        self._rows.install(client)
        self._producer = client.producer()
        self._consumer = client.consumer("price-caches", [TOPIC], broadcast=True)
        self._cache: dict[str, int | None] = {}
        self._changes = 0
        self._lock = threading.Lock()
        threading.Thread(target=lambda: self._consumer.run(self._forget), daemon=True).start()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._database, timeout=30.0)

    def set_price(self, name: str, price: int) -> None:
        """The row, and the message for everybody."""
        with self._producer.transaction(self._rows) as tx:
            tx.connection(self._rows).execute("INSERT OR REPLACE INTO prices VALUES (?, ?)", (name, price))
            tx.send(TOPIC, b"changed", key=name.encode())

    def price_of(self, name: str) -> int | None:
        """The price, or None."""
        with self._lock:
            if name in self._cache:
                return self._cache[name]
            changes = self._changes
        with closing(self._connect()) as connection:
            row = connection.execute("SELECT price FROM prices WHERE name = ?", (name,)).fetchone()
        price = None if row is None else int(row[0])
        with self._lock:
            # Not kept if a change came while the row was read: the row may be the old one.
            # Nor before the consumer has its partitions: the message might be one that it never sees.
            if changes == self._changes and len(self._consumer.assignment) == 2:
                self._cache[name] = price
        return price

    def _forget(self, message: txmq.Message) -> None:
        assert message.key is not None
        with self._lock:
            self._changes += 1
            self._cache.pop(message.key.decode(), None)
        say(f"changed: {message.key.decode()}")


def say(line: str) -> None:
    """Print a line in one piece: two threads do."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(database: str, bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Answer what is typed, until end of file."""
    with txmq.connect(bootstrap) as client:
        prices = Prices(Path(database).absolute(), client)
        for line in sys.stdin:
            name, _, price = line.strip().partition(" ")
            if price:
                prices.set_price(name, int(price))
            else:
                say(f"{name}: {prices.price_of(name)}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} DATABASE [BOOTSTRAP]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
    except sqlite3.OperationalError as error:
        sys.exit(f"cannot open the database: {error}")
