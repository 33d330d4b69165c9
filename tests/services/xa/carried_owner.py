"""A process of eight threads that dies while reports of committed branches are held for another thread's decision.

``python -m tests.services.xa.carried_owner JSON``; JSON: address, database (connect arguments), topic, count. It dies
where ``TXMQ_CRASH`` says, or ends when it has done so many transactions.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import MySQLdb

import txmq
from txmq.xa import MySQLResource

NAME, THREADS = "orders-db", 8


def resource(database: dict[str, object]) -> MySQLResource:
    """The database as an XA resource."""
    return MySQLResource(NAME, connect=lambda: MySQLdb.connect(**database))


def order(producer: txmq.Producer, orders: MySQLResource, topic: str, number: int) -> None:
    """A row and a message."""
    with producer.transaction(orders) as tx:
        tx.connection(orders).cursor().execute("INSERT INTO orders VALUES (%s, 'x')", (number,))
        producer.send(topic, b"%d" % number, key=b"%d" % (number % 3))


def main(text: str) -> None:
    """Transactions of all threads."""
    given = json.loads(text)
    orders = resource(given["database"])
    client = txmq.connect(given["address"])
    producer = client.producer()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda number: order(producer, orders, given["topic"], number), range(given["count"])))
    if given.get("closes"):
        client.close()


if __name__ == "__main__":
    main(sys.argv[1])
