"""The shop that goes on while the broker is away: ``python -m txmq.cli.demo.shop DATABASE RUN``.

It has no client, and never speaks to the broker: each order is a row and a message in its own database, in one
transaction. What was committed is said on standard output, a line at a time. It ends on SIGTERM; SIGKILL may strike
anywhere.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import threading
from contextlib import closing

from txmq.cli.demo.service import CUSTOMERS
from txmq.outbox.outbox import Outbox

SHIPMENTS = "shipments"
OUTBOX_NAME = "shop-db"
PAUSE_S = 0.001


def open_database(path: str) -> sqlite3.Connection:
    """A connection to the shop's own database."""
    return sqlite3.connect(path, timeout=30.0)


def ship(connection: sqlite3.Connection, outbox: Outbox, reference: str, customer: str) -> None:
    """A row and its message, both or neither."""
    with outbox.transaction(connection) as tx:
        connection.execute("INSERT INTO shipments (reference, customer) VALUES (?, ?)", (reference, customer))
        tx.send(SHIPMENTS, json.dumps({"reference": reference}).encode(), customer.encode())


def main(database: str, run: str) -> None:
    """Ship until SIGTERM."""
    stop, outbox, number = threading.Event(), Outbox(OUTBOX_NAME), 0
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with closing(open_database(database)) as connection:
        while not stop.wait(PAUSE_S):
            number += 1
            reference = f"s-{run}-{number}"
            ship(connection, outbox, reference, CUSTOMERS[number % len(CUSTOMERS)])
            os.write(sys.stdout.fileno(), f"shipment {reference}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
