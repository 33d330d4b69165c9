"""A service of the campaign: ``python -m tools.crash.outbox.service DIRECTORY DATABASE NAME SEED``.

Its threads repeat, until SIGTERM: rows and messages in one transaction of the database, with no client and no broker.
A transaction changes the counters of its keys first, so that each key's transactions have an order. Messages are sent
in each of the ways that there are; some bodies change their mind, some take messages back with a savepoint.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import txmq
from tools.crash.directory import HistoryFile
from tools.crash.outbox.databases import Place
from tools.crash.outbox.directory import ALONE, BLOCK, JOINED, KEYS, KINDS, MANY, OutboxCampaignDirectory, topics_of
from tools.crash.processes import run_in_threads
from tools.crash.worker import ChangedMindError, Writer
from txmq.outbox.outbox import new_unit
from txmq.runtime.threads import until_terminated

THREADS: Final = 2
REST_S: Final = 0.05  # two cores are shared by a dozen processes
CHANGES_ITS_MIND: Final = 0.08
TAKES_BACK: Final = 0.2
LARGE: Final = 0.02
PADDING: Final = b" " * 30_000  # of a large unit, which the relay sends in parts


class Service(Writer):
    """One thread of it."""

    def __init__(
        self, name: str, place: Place, history: HistoryFile, rng: random.Random, stop: threading.Event
    ) -> None:
        super().__init__(history, stop)
        self._outbox, self._place, self._rng = txmq.Outbox(name), place, rng
        self._topics = list(topics_of(name))
        self._connection: Any = None
        self._is_committing = False
        self._ways: dict[str, Callable[[str, list[str], list[list[str]]], None]] = {
            ALONE: partial(self._in_own, self._alone), MANY: partial(self._in_own, self._many),
            JOINED: partial(self._in_own, self._joined), BLOCK: self._in_block,
        }  # fmt: skip

    def run(self) -> None:
        """Transactions, one at a time, until ``stop``."""
        while not self.stop.wait(REST_S):
            try:
                self._connection = self._connection or self._place.connect()
            except self._place.error as error:
                self.rest_after("connect", error)
            else:
                self._transact()

    def _transact(self) -> None:
        kind, count = self._rng.choice(KINDS), self._rng.randint(1, 5)
        keys = sorted(self._rng.sample(KEYS, self._rng.randint(1, 2)))  # in one order: no deadlock
        operation = self.next(f"{kind}{count}")
        planned = [
            ["send", self._rng.choice(self._topics), self._rng.choice(keys), f"{operation}.{number}"]
            for number in range(count)
        ]
        rows = [["row", self._outbox.name, f"{operation}/{number}"] for number in range(len(keys))]
        self.history.write("txn", "invoke", operation, [*rows, *planned])
        self._is_committing = False
        try:
            self._ways[kind](operation, keys, planned)
        except (self._place.error, txmq.TxmqError, ChangedMindError) as error:
            self._failed(operation, error)
        else:
            self.history.write("txn", "ok", operation, [*rows, *planned])

    def _failed(self, operation: str, error: Exception) -> None:
        if isinstance(error, ChangedMindError):
            self.history.write("txn", "fail", operation, [], err=repr(error))
            return
        with suppress(Exception):
            self._connection.close()
        self._connection = None
        self.history.write("txn", "info" if self._is_committing else "fail", operation, [], err=repr(error))
        if self._is_committing:
            self.rename()
        self.rest_after(operation, error)

    # --- ways to send ------------------------------------------------------------------------------------------------

    def _in_block(self, operation: str, keys: list[str], planned: list[list[str]]) -> None:
        """The outbox begins and commits."""
        with self._outbox.transaction(self._connection) as tx:
            padding = self._padding()
            for _, topic, key, value in planned:
                tx.send(topic, value.encode() + padding, key.encode())
            self._write_rows(operation, keys)
            self._may_change_its_mind()
            self._is_committing = True

    def _in_own(
        self, send: Callable[[list[list[str]]], None], operation: str, keys: list[str], planned: list[list[str]]
    ) -> None:
        """The service begins and commits."""
        try:
            self._write_rows(operation, keys)
            if self._rng.random() < TAKES_BACK:
                self._take_back(operation, keys[0])
            send(planned)
            self._may_change_its_mind()
        except ChangedMindError:
            self._connection.rollback()
            raise
        self._is_committing = True
        self._connection.commit()

    def _alone(self, planned: list[list[str]]) -> None:
        for _, topic, key, value in planned:
            self._outbox.send(self._connection, topic, value.encode(), key.encode())

    def _many(self, planned: list[list[str]]) -> None:
        padding = self._padding()
        messages = [(topic, value.encode() + padding, key.encode()) for _, topic, key, value in planned]
        self._outbox.send_many(self._connection, messages)

    def _joined(self, planned: list[list[str]]) -> None:
        unit = new_unit()
        for _, topic, key, value in planned:
            self._outbox.send(self._connection, topic, value.encode(), key.encode(), unit=unit)
            self._place.run(self._connection, "SELECT 1")  # others' messages may come between

    def _take_back(self, operation: str, key: str) -> None:
        """Messages that no reader may see."""
        self._place.run(self._connection, "SAVEPOINT taken")
        for topic in self._topics:
            self._outbox.send(self._connection, topic, f"{operation}.back".encode(), key.encode())
        self._place.run(self._connection, "ROLLBACK TO SAVEPOINT taken")

    def _write_rows(self, operation: str, keys: Sequence[str]) -> None:
        """A row for each key, numbered by its counter; the lock on the counter is held until the end."""
        for number, key in enumerate(keys):
            run = partial(self._place.run, self._connection)
            run("UPDATE counters SET version = version + 1 WHERE k = ?", (key,))
            ((version,),) = run("SELECT version FROM counters WHERE k = ?", (key,))
            row = (f"{operation}/{number}", key, version)
            run("INSERT INTO orders (rowid_text, k, version) VALUES (?, ?, ?)", row)

    def _may_change_its_mind(self) -> None:
        if self._rng.random() < CHANGES_ITS_MIND:
            raise ChangedMindError

    def _padding(self) -> bytes:
        return PADDING if self._rng.random() < LARGE else b""


def main(directory: str, database: str, name: str, seed: str) -> None:
    """Work until SIGTERM."""
    world, stop, rng = OutboxCampaignDirectory(Path(directory)), threading.Event(), random.Random(int(seed))
    history, place = HistoryFile(world.histories, name), world.places[database]
    with until_terminated(stop.set):
        threads = [
            Service(database, place, history.beside(f"{name}.t{number}"), random.Random(rng.random()), stop)
            for number in range(THREADS)
        ]
        run_in_threads(thread.run for thread in threads)
    history.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
