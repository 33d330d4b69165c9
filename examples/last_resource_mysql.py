"""Last resource with MySQL or MariaDB: one database, and the recommended way.

The database's own COMMIT is the decision: it makes the row and txmq's marker durable in one step, no XA needed. Start a
broker with ``txmq broker``; then, with what ``MySQLdb.connect`` takes for your server, as JSON::

    python examples/last_resource_mysql.py '{"host": "127.0.0.1", "user": "shop", "passwd": "...", "db": "shop"}'

Kill it, the broker or the server, and start them again: rows and messages stay equal.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import MySQLdb

import txmq
from txmq import LastResource

CUSTOMERS = ("ada", "ben", "cleo")
ORDERS = "CREATE TABLE IF NOT EXISTS orders (id INT AUTO_INCREMENT PRIMARY KEY, customer VARCHAR(40)) ENGINE=InnoDB"


def prepare(arguments: dict[str, Any], client: txmq.Client) -> LastResource:
    """Create the tables and the topic, unless they exist."""
    connection = MySQLdb.connect(**arguments)
    connection.cursor().execute(ORDERS)
    connection.close()
    orders_db = LastResource("orders-db", connect=lambda: MySQLdb.connect(**arguments))
    client.topics.ensure("orders", partitions=4)
    orders_db.install(client)  # two small tables; harmless to repeat
    return orders_db


def take_order(producer: txmq.Producer, orders_db: LastResource, customer: str) -> int:
    """Write the row and publish the event; returns the order's number."""
    with producer.transaction(orders_db, timeout=10.0) as tx:
        cursor = tx.connection(orders_db).cursor()
        cursor.execute("INSERT INTO orders (customer) VALUES (%s)", (customer,))
        number = int(cursor.lastrowid)
        tx.send("orders", f"created {number}".encode(), key=customer.encode())
    return number


def main(arguments: str, count: str = "10", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Take ``count`` orders."""
    with txmq.connect(bootstrap) as client, client.producer() as producer:
        orders_db = prepare(json.loads(arguments), client)
        for number in range(int(count)):
            customer = CUSTOMERS[number % len(CUSTOMERS)]
            try:
                print(f"order {take_order(producer, orders_db, customer)} of {customer}")
            except txmq.RolledBackError as error:  # BrokerAwayError is one
                print(f"nothing happened, try again: {error}")
            except txmq.OutcomeUnknownError as error:
                print(f"ask later: client.outcome({error.txid!r})")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} MYSQLDB_ARGUMENTS_AS_JSON [COUNT [BOOTSTRAP]]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
    except (MySQLdb.OperationalError, json.JSONDecodeError) as error:
        sys.exit(f"cannot open the database: {error}")
