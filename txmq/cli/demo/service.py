"""The order service that the demo kills: ``python -m txmq.cli.demo.service BOOTSTRAP DATABASE RUN``.

Three threads. Two take orders: a row into SQLite and a message into ``orders`` in one last-resource transaction; every
tenth order is declined in the middle, so that row and message must vanish. One takes payments: a local transaction
over the topics ``payments`` and ``audit``. What a block's normal return acknowledged is said on standard output, a
line at a time, so that the demo can hold txmq to it after a kill.

It ends on SIGTERM after the blocks in work; SIGKILL may strike anywhere.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable

import txmq
from txmq.xa import LastResource

CUSTOMERS = ("ada", "ben", "cleo", "dan", "eva", "fay")
ORDERS, PAYMENTS, AUDIT = "orders", "payments", "audit"
RESOURCE_NAME = "orders-db"
RETRY_AFTER_S = 0.05
DECLINED_EVERY = 10


class DeclinedError(Exception):
    """The service changes its mind in the middle of a transaction."""


def open_resource(database: str) -> LastResource:
    """The order database as a last resource."""
    return LastResource(RESOURCE_NAME, connect=lambda: sqlite3.connect(database, timeout=30.0))


def take_order(producer: txmq.Producer, orders_db: LastResource, reference: str, customer: str) -> None:
    """One row and one message, both or neither."""
    with producer.transaction(orders_db) as tx:
        cursor = tx.connection(orders_db).cursor()
        cursor.execute("INSERT INTO orders (reference, customer) VALUES (?, ?)", (reference, customer))
        tx.send(ORDERS, json.dumps({"reference": reference}).encode(), key=customer.encode())
        if int(reference.rpartition("-")[2]) % DECLINED_EVERY == 0:
            raise DeclinedError


def take_payment(producer: txmq.Producer, reference: str, customer: str) -> None:
    """Two messages in two topics, both or neither."""
    with producer.transaction() as tx:
        value = json.dumps({"reference": reference}).encode()
        tx.send(PAYMENTS, value, key=customer.encode())
        tx.send(AUDIT, value)


def say(word: str, reference: str) -> None:
    """One line, in one write: a kill cannot tear it."""
    os.write(sys.stdout.fileno(), f"{word} {reference}\n".encode())


def work(name: str, step: Callable[[str, str], None], word: str, stop: threading.Event) -> None:
    """Repeat ``step`` with fresh references; a failed block is said and the next reference taken."""
    number = 0
    while not stop.is_set():
        number += 1
        reference, customer = f"{name}-{number}", CUSTOMERS[number % len(CUSTOMERS)]
        try:
            step(reference, customer)
        except DeclinedError:
            say("declined", reference)
        except txmq.OutcomeUnknownError:
            say("unknown", reference)
        except txmq.TxmqError as error:
            say("refused", reference)
            sys.stderr.write(f"{reference}: {error!r}\n")
            stop.wait(RETRY_AFTER_S)
        else:
            say(word, reference)


def main(bootstrap: str, database: str, run: str) -> None:
    """Work until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with txmq.connect(bootstrap) as client, client.producer() as producer:
        orders_db = open_resource(database)

        def order(reference: str, customer: str) -> None:
            take_order(producer, orders_db, reference, customer)

        def pay(reference: str, customer: str) -> None:
            take_payment(producer, reference, customer)

        jobs = [(f"a-{run}", order, "order"), (f"b-{run}", order, "order"), (f"p-{run}", pay, "payment")]
        threads = [threading.Thread(target=work, args=(*job, stop), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
