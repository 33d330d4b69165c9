"""Half messages: for work that txmq cannot take part in (a store without a DB-API driver, another team's service).

The message is stored first, invisible; then the work is done; then readers see it. If a process dies in between,
the checker of the producer group is asked what became of the work. Start a broker with ``txmq broker``, then
``python examples/half_message.py /tmp/orders.db``; kill it anywhere, start it again: rows and messages are equal.

The checker must never answer ROLLBACK about work that may still come. So the work and the checker write to the same
row of ``told``, named by the half message's transaction id, and the primary key lets in only the first of them.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import txmq
from txmq import CheckRequest, Resolution

TABLES = """
CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY AUTOINCREMENT, customer TEXT);
CREATE TABLE IF NOT EXISTS told (txid TEXT PRIMARY KEY, is_done INTEGER NOT NULL);
"""


class Shop:
    """The application: it knows nothing of txmq but a transaction id."""

    def __init__(self, database: str) -> None:
        self._database = database
        with closing(self._connect()) as connection:
            connection.executescript(TABLES)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._database, timeout=30.0)

    def save_order(self, customer: str, txid: str) -> None:
        """The work: an order, and that it was done. Fails if ``is_done`` was asked first and said no."""
        with closing(self._connect()) as connection, connection:
            connection.execute("INSERT INTO orders (customer) VALUES (?)", (customer,))
            connection.execute("INSERT INTO told VALUES (?, 1)", (txid,))

    def is_done(self, txid: str) -> bool:
        """Whether the work was done; if not, it never will be."""
        with closing(self._connect()) as connection, connection:
            connection.execute("INSERT OR IGNORE INTO told VALUES (?, 0)", (txid,))
            return bool(connection.execute("SELECT is_done FROM told WHERE txid = ?", (txid,)).fetchone()[0])

    def check(self, half: CheckRequest) -> Resolution:
        """The checker. What it raises (a database that is away) counts as UNKNOWN: it is asked again."""
        resolution = Resolution.COMMIT if self.is_done(half.txid) else Resolution.ROLLBACK
        print(f"checked {half.txid}: {resolution.value}")
        return resolution


def main(database: str, count: str = "10", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Take ``count`` orders."""
    shop = Shop(str(Path(database).absolute()))
    with txmq.connect(bootstrap) as client:
        client.topics.ensure("orders", partitions=4)
        producer = client.producer(group="order-service", checker=shop.check)
        for number in range(int(count)):
            customer = f"customer-{number}"
            try:
                with producer.half("orders", b"created", key=customer.encode()) as half:
                    shop.save_order(customer, half.txid)
                print(f"order of {customer}: {half.outcome.value}")
            except txmq.RolledBackError as error:  # BrokerAwayError is one
                print(f"nothing happened, try again: {error}")
            except txmq.HeuristicError as error:
                print(f"somebody decided otherwise: {error}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} DATABASE [COUNT [BOOTSTRAP]]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
    except sqlite3.OperationalError as error:
        sys.exit(f"cannot open the database: {error}")
