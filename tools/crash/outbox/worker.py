"""One of the outbox campaign's workers: ``python -m tools.crash.outbox.worker DIRECTORY ADDRESS NAME SEED``.

Three threads take orders: a row in one of the two databases and one to three messages under its key, now and then one
without a key. The two that use MariaDB share a client. Some keys are this process's own, others belong to all workers.

Half of the processes use their outboxes always, by their seeds; but for those that are armed at a point to which only a
block comes that asks the broker.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import MySQLdb

import txmq
from tools.crash.directory import LAST_RESOURCE, ORDERS, RESOURCE, HistoryFile
from tools.crash.outbox.directory import (
    LEDGER_DB,
    NOTES,
    PARCELS,
    THREADS,
    OutboxCampaignDirectory,
    When,
    keys_of,
)
from tools.crash.processes import connect, run_in_threads
from tools.crash.worker import TransactingWorker
from tools.crash.xa.directory import LEDGER
from tools.crash.xa.worker import write_entry
from txmq.runtime.crashpoints import VARIABLE
from txmq.runtime.threads import until_terminated
from txmq.xa import LastResource

REST_S = 0.03  # twelve threads share two cores with all they kill
UNKEYED = 0.1
_OF_ALL_BLOCKS = "client.tx.db_committed"


class OutboxWorker(TransactingWorker):
    """The work of one thread."""

    expected = (*TransactingWorker.expected, sqlite3.OperationalError, MySQLdb.Error)

    def __init__(
        self, world: OutboxCampaignDirectory, client: txmq.Client, name: str, rng: random.Random,
        stop: threading.Event, resource: LastResource,
    ) -> None:  # fmt: skip
        super().__init__(client, HistoryFile(world.histories, name), rng, stop)
        self._world, self._resource, self._name = world, resource, name
        self._keys = keys_of(int(name[1:].partition(".")[0]))

    def run(self) -> None:
        """Orders, one at a time, until ``stop``."""
        self._meet_topics()
        while not self.stop.wait(REST_S):
            self._world.rest_while_told(self._name, self.stop.wait)
            self.take_order()
        self.history.close()

    def _meet_topics(self) -> None:
        """A client that was never told of a topic cannot choose a partition while the broker is away."""
        for topic in self._world.partitions:
            while not self.stop.is_set() and self.client.topics.held(topic) is None:
                try:
                    self.client.topics.known(topic)
                except txmq.TxmqError as error:
                    self.rest_after(topic, error)

    def take_order(self) -> None:
        """One row, its messages, and perhaps a note."""
        name = self._resource.name
        operation, key = self.next(LEDGER if name == LEDGER_DB else LAST_RESOURCE), self.rng.choice(self._keys)
        sent = [(ORDERS, key), (PARCELS, key), (ORDERS, key)][: self.rng.randint(1, 3)]
        if self.rng.random() < UNKEYED:
            sent.append((NOTES, ""))
        planned = [["send", topic, of, f"{operation}.{number}"] for number, (topic, of) in enumerate(sent)]
        self.transact(operation, planned, {name: self._resource}, partial(_write, operation, key))


def _write(operation: str, key: str, name: str, connection: Any) -> None:
    if name == RESOURCE:
        connection.execute("INSERT INTO orders (rowid_text, key) VALUES (?, ?)", (operation, key))
    else:
        write_entry(connection, operation, name, key, 0)


def _when(rng: random.Random, armed: str) -> When:
    drawn: When = "always" if rng.random() < 0.5 else "away"
    return "away" if armed.startswith("client.tx.") and not armed.startswith(_OF_ALL_BLOCKS) else drawn


def _end_with(raised: threading.ExceptHookArgs) -> None:
    """What no block may raise is a defect: it ends the process, whatever the other thread does."""
    sys.__excepthook__(raised.exc_type, raised.exc_value or raised.exc_type(), raised.exc_traceback)
    os._exit(1)


def main(directory: str, address: str, name: str, seed: str) -> None:
    """Work until SIGTERM."""
    world, stop = OutboxCampaignDirectory(Path(directory)), threading.Event()
    rng = random.Random(int(seed))
    when = _when(rng, os.environ.get(VARIABLE, ""))
    resources = {LAST_RESOURCE: world.resource(when), LEDGER: world.ledger(when)}
    threading.excepthook = _end_with
    with ExitStack() as stack:
        stack.enter_context(until_terminated(stop.set))
        clients = {kind: stack.enter_context(connect(address, name)) for kind in resources}
        run_in_threads(
            [
                OutboxWorker(
                    world, clients[kind], name + thread, random.Random(rng.getrandbits(32)), stop, resources[kind]
                ).run
                for thread, kind in THREADS.items()
            ]
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
