"""An order service: each order is a row in SQLite and a message in the topic ``orders``, both or neither.

Start a broker with ``txmq broker``, then ``python examples/order_service_sqlite.py /tmp/orders.db``. Kill it, kill the
broker, start them again: rows and messages stay equal. ``txmq consume --topic orders`` shows the messages.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import txmq
from txmq import LastResource

CUSTOMERS = (b"ada", b"ben", b"cleo")


def prepare(database: Path, client: txmq.Client) -> LastResource:
    """Create the tables and the topic, unless they exist."""
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY AUTOINCREMENT, customer TEXT)")
    connection.close()
    orders_db = LastResource("orders-db", connect=lambda: sqlite3.connect(database, timeout=30.0))
    orders_db.install(client)  # two small tables; harmless to repeat
    try:
        client.topics.create("orders", partitions=4)
    except txmq.errors.TopicExistsError:
        pass
    return orders_db


def take_order(producer: txmq.Producer, orders_db: LastResource, customer: bytes) -> int:
    """Write the row and publish the event; returns the order's number."""
    with producer.transaction(orders_db) as tx:
        cursor = tx.connection(orders_db).execute("INSERT INTO orders (customer) VALUES (?)", (customer.decode(),))
        number = int(cursor.lastrowid)
        tx.send("orders", f"created {number}".encode(), key=customer)
    return number


def main(database: str, count: str = "10", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Take ``count`` orders."""
    with txmq.connect(bootstrap) as client, client.producer() as producer:
        orders_db = prepare(Path(database).absolute(), client)
        for number in range(int(count)):
            customer = CUSTOMERS[number % len(CUSTOMERS)]
            try:
                print(f"order {take_order(producer, orders_db, customer)} of {customer.decode()}")
            except txmq.RolledBackError as error:  # BrokerAwayError is one
                print(f"nothing happened, try again: {error}")
            except txmq.OutcomeUnknownError as error:
                print(f"ask later: client.outcome({error.txid!r})")


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
