"""A service that takes orders, as a process: ``python -m tests.services.transaction.outbox_service JSON``.

JSON: address, path (of an SQLite file), keys, orders (for each key). It prints a line of JSON for each order, and lives
on until its standard input ends.
"""

from __future__ import annotations

import json
import sqlite3
import sys

import txmq
from txmq.xa import LastResource

NAME = "shop"


def main(text: str) -> None:
    """Take the orders, and stay."""
    given = json.loads(text)
    client = txmq.connect(given["address"], lazy=True)
    database = LastResource(
        NAME, connect=lambda: sqlite3.connect(given["path"], timeout=30.0, check_same_thread=False), outbox=True
    )
    database.install(client)
    producer = client.producer()
    for _ in range(given["orders"]):
        for key in given["keys"]:
            with producer.transaction(database) as tx:
                connection = tx.connection(database)
                connection.execute("UPDATE sold SET pieces = pieces + 1 WHERE item = ?", (key,))
                ((pieces,),) = connection.execute("SELECT pieces FROM sold WHERE item = ?", (key,)).fetchall()
                producer.send("orders", str(pieces).encode(), key=key.encode())
            outcome = client.outcome(tx.txid)
            print(json.dumps({"txid": tx.txid, "pending": tx.pending, "outcome": outcome.name}), flush=True)
    sys.stdin.read()
    client.close()


if __name__ == "__main__":
    main(sys.argv[1])
