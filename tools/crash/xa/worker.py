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
from tools.crash.worker import CHANGES_ITS_MIND, REST_S, TIMEOUT_S, ChangedMindError, Teller, text_of_txid
from tools.crash.xa.directory import LEDGER, RESOURCES, SINGLE, TRANSFER, TRANSFERS, XaCampaignDirectory
from txmq.runtime.threads import until_terminated

EXPECTED = (txmq.TxmqError, MySQLdb.Error, ChangedMindError)


class XAWorker(Teller):
    """The work of one process."""

    def __init__(
        self,
        world: XaCampaignDirectory,
        client: txmq.Client,
        history: HistoryFile,
        rng: random.Random,
        stop: threading.Event,
    ) -> None:
        super().__init__(client, history, stop)
        self.producer = client.producer(timeout=TIMEOUT_S)
        self.resources: dict[str, Any] = {
            "bank-a": world.xa("bank-a"),
            "bank-b": world.xa("bank-b"),
            "ledger": world.ledger(),
        }
        self.rng = rng

    def run(self) -> None:
        """Operations, one at a time, until ``stop``."""
        while not self.stop.wait(REST_S):
            self.transact(self.rng.choice((TRANSFER, TRANSFER, TRANSFER, SINGLE, LEDGER)))

    def transact(self, kind: str) -> None:
        """One transaction: its rows, and one to three messages under its key."""
        operation, key = self.next(kind), self.rng.choice(KEYS)
        names = RESOURCES[kind]
        amount = self.rng.randint(1, 50)
        rows = [["row", name, operation] for name in names]
        planned = [["send", TRANSFERS, key, f"{operation}.{number}"] for number in range(self.rng.randint(1, 3))]
        is_invoked = False
        try:
            with self.producer.transaction(*(self.resources[name] for name in names), timeout=TIMEOUT_S) as tx:
                self.history.write("txn", "invoke", operation, [*rows, *planned], txid=text_of_txid(tx.txid))
                is_invoked = True
                for name, sign in zip(names, (-1, 1), strict=False):
                    moved = sign * amount if kind == TRANSFER else 0
                    _write(tx.connection(self.resources[name]), operation, name, key, moved)
                for _, topic, of_key, value in planned:
                    self.producer.send(topic, value.encode(), key=of_key.encode())
                if self.rng.random() < CHANGES_ITS_MIND:
                    raise ChangedMindError
        except EXPECTED as error:  # what was raised is what was told; anything else is a defect, and ends the worker
            if is_invoked:
                self.told(operation, error)
            else:
                self.rest_after(operation, error)
        else:
            self.done(operation, rows, planned, tx)


def _write(connection: Any, operation: str, resource: str, key: str, amount: int) -> None:
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
