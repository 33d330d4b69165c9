"""One of the XA campaign's workers: ``python -m tools.crash.xa.worker DIRECTORY ADDRESS NAME SEED``.

It repeats, until SIGTERM: money moved from one server to the other with a message about it (XA over both), a row and a
message (XA with one branch), a row and a message with the server's own COMMIT as the decision (last resource).
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import MySQLdb

import txmq
from tools.crash.directory import KEYS, HistoryFile
from tools.crash.processes import connect
from tools.crash.worker import REST_S, TransactingWorker
from tools.crash.xa.directory import LEDGER, RECEIPTS, RESOURCES, SINGLE, TRANSFER, TRANSFERS, XaCampaignDirectory
from txmq.runtime.threads import until_terminated


class XAWorker(TransactingWorker):
    """The work of one process."""

    expected = (*TransactingWorker.expected, MySQLdb.Error)

    def __init__(
        self, directory: XaCampaignDirectory, client: txmq.Client, history: HistoryFile, rng: random.Random,
        stop: threading.Event,
    ) -> None:  # fmt: skip
        super().__init__(client, history, rng, stop)
        self.resources: dict[str, Any] = {
            "bank-a": directory.xa("bank-a"),
            "bank-b": directory.xa("bank-b"),
            "ledger": directory.ledger(),
        }

    def run(self) -> None:
        """Operations, one at a time, until ``stop``."""
        while not self.stop.wait(REST_S):
            self.move(self.rng.choice((TRANSFER, TRANSFER, TRANSFER, SINGLE, LEDGER)))

    def move(self, kind: str) -> None:
        """One transaction: its rows, one to three messages under its key, and a receipt for every second one."""
        operation, key = self.next(kind), self.rng.choice(KEYS)
        amount = self.rng.randint(1, 50)
        topics = [TRANSFERS] * self.rng.randint(1, 3) + [RECEIPTS] * self.rng.randint(0, 1)
        planned = [["send", topic, key, f"{operation}.{number}"] for number, topic in enumerate(topics)]
        names = RESOURCES[kind]

        def write(name: str, connection: Any) -> None:
            sign = -1 if name == names[0] else 1
            write_entry(connection, operation, name, key, sign * amount if kind == TRANSFER else 0)

        self.transact(operation, planned, {name: self.resources[name] for name in names}, write)


def write_entry(connection: Any, operation: str, resource: str, key: str, amount: int) -> None:
    """One row, numbered by its key's counter; the lock on the counter is held until the end."""
    cursor = connection.cursor()
    cursor.execute("UPDATE accounts SET balance = balance + %s, version = version + 1 WHERE k = %s", (amount, key))
    cursor.execute("SELECT version FROM accounts WHERE k = %s", (key,))
    ((version,),) = cursor.fetchall()
    statement: Sequence[Any] = (operation, resource, key, version)
    cursor.execute("INSERT INTO entries VALUES (%s, %s, %s, %s)", statement)
    cursor.close()


def main(directory: str, address: str, name: str, seed: str) -> None:
    """Work until SIGTERM."""
    world, stop = XaCampaignDirectory(Path(directory)), threading.Event()
    history = HistoryFile(world.histories, name)
    with until_terminated(stop.set), connect(address, name) as client:
        XAWorker(world, client, history, random.Random(int(seed)), stop).run()
    history.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
