"""One of the processes that are killed: ``python -m tools.crash.worker DIRECTORY ADDRESS NAME SEED``.

It repeats, until SIGTERM: a row and a message in one transaction (last resource), messages to three topics in one
transaction (local), or plain sends; some bodies change their mind. Each operation is written to the history before it
begins and after it ends, with what the library told. After "unknown" the process goes on under a new name, because
what it left may still take effect, and asks for the outcome.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import txmq
from tools.crash.directory import (
    AUDIT,
    KEYS,
    LAST_RESOURCE,
    LOCAL,
    ORDERS,
    PAYMENTS,
    PLAIN,
    RESOURCE,
    SCRAP,
    CampaignDirectory,
    HistoryFile,
)
from tools.crash.processes import connect
from txmq.client.transaction.block import Transaction
from txmq.runtime.threads import until_terminated
from txmq.xa import LastResource

TIMEOUT_S = 10.0
OUTCOME_ASKED_FOR_S = 20.0
ASK_AGAIN_S = 0.1
REST_S = 0.004  # two cores are shared by seven processes
AFTER_FAILURE_S = 0.05
CHANGES_ITS_MIND = 0.05
TXID_ASKED_EARLY = 0.5
REFUSED = (  # plain sends: the library promises that nothing was written
    txmq.errors.DiskFullError, txmq.errors.OverloadedError, txmq.errors.UnknownTopicError, txmq.errors.TopicClosedError,
)  # fmt: skip


class ChangedMindError(Exception):
    """A body that does not want its transaction any more."""


class Writer:
    """Has the names of a process and of its operations in the history."""

    def __init__(self, history: HistoryFile, stop: threading.Event) -> None:
        self.history, self.stop = history, stop
        self._base, self._names, self._number = history.process, 0, 0

    def next(self, kind: str) -> str:
        """The id of the next operation."""
        self._number += 1
        return f"{self.history.process}-{self._number}{kind}"

    def rest_after(self, operation: str, error: Exception) -> None:
        """Do not turn in circles while something is away."""
        sys.stderr.write(f"{operation}: {error!r}\n")
        self.stop.wait(AFTER_FAILURE_S)

    def rename(self) -> None:
        """What this process left may still take effect: it goes on as another one."""
        self._names += 1
        self.history.process = f"{self._base}.{self._names}"


class Teller(Writer):
    """Writes a process's operations to the history, and what the library told of them."""

    def __init__(self, client: txmq.Client, history: HistoryFile, stop: threading.Event) -> None:
        super().__init__(history, stop)
        self.client = client

    def done(
        self, operation: str, rows: Sequence[Sequence[str]], planned: Sequence[Sequence[str]], tx: Transaction
    ) -> None:
        """The block returned: committed."""
        places: list[tuple[int | None, int | None]] = [(item.partition, item.offset) for item in tx.results]
        places = places or [(None, None)] * len(planned)
        sends = [[*send, *place] for send, place in zip(planned, places, strict=True)]
        # A message without an offset waits for its place after branches that other homes decide about.
        more = {"pend": True} if tx.pending or any(offset is None for _, offset in places) else {}
        self.history.write("txn", "ok", operation, [*rows, *sends], txid=text_of_txid(tx.txid), **more)

    def told(self, operation: str, error: Exception) -> None:
        """An error out of a block: rolled back, unless the library says that it does not know."""
        unknown = isinstance(error, txmq.OutcomeUnknownError | txmq.HeuristicError)
        txid = text_of_txid(getattr(error, "txid", None))
        self.history.write("txn", "info" if unknown else "fail", operation, [], err=repr(error), txid=txid)
        if unknown:
            self.rename()
            self._ask(operation, txid)
        if not isinstance(error, ChangedMindError):
            self.rest_after(operation, error)

    def _ask(self, operation: str, txid: str | None) -> None:
        deadline = time.monotonic() + OUTCOME_ASKED_FOR_S
        while txid is not None and time.monotonic() < deadline:
            try:
                outcome = self.client.outcome(txid)
            except txmq.TxmqError as error:
                sys.stderr.write(f"{operation}: outcome: {error!r}\n")
            else:
                if outcome is not txmq.Outcome.UNKNOWN:
                    self.history.write("outcome", "ok", operation, [outcome.value])
                    return
            if self.stop.wait(ASK_AGAIN_S):
                return


class TransactingWorker(Teller):
    """A process that commits rows and messages together.

    Attributes:
        expected: what a block may raise. Anything else is a defect, and ends the worker.
    """

    expected: tuple[type[Exception], ...] = (txmq.TxmqError, ChangedMindError)

    def __init__(self, client: txmq.Client, history: HistoryFile, rng: random.Random, stop: threading.Event) -> None:
        super().__init__(client, history, stop)
        self.producer, self.rng = client.producer(timeout=TIMEOUT_S), rng

    def transact(
        self,
        operation: str,
        planned: Sequence[Sequence[str]],
        resources: Mapping[str, Any],
        write: Callable[[str, Any], None] = lambda _name, _connection: None,
        acked: txmq.Message | None = None,
    ) -> bool:
        """Send what is planned in one transaction with a row in each resource.

        Args:
            operation: its id.
            planned: the messages, as the history has them; an empty key is none.
            resources: by name.
            write: writes the row of the resource of that name on a connection.
            acked: a consumer's, acknowledged with it.

        Returns:
            Whether it is committed.
        """
        rows = [["row", name, operation] for name in resources]
        is_invoked, is_early = False, self.rng.random() < TXID_ASKED_EARLY
        try:
            with self.producer.transaction(*resources.values(), timeout=TIMEOUT_S) as tx:
                if is_early:
                    is_invoked = self._invoked(operation, [*rows, *planned], tx)
                for name, resource in resources.items():
                    write(name, tx.connection(resource))
                for _, topic, key, value in planned:
                    self.producer.send(topic, value.encode(), key=key.encode() or None)
                if acked is not None:
                    tx.ack(acked)
                if not is_early:  # drawn after the body, from a home that takes part
                    is_invoked = self._invoked(operation, [*rows, *planned], tx)
                if self.rng.random() < CHANGES_ITS_MIND:
                    raise ChangedMindError
        except self.expected as error:
            if is_invoked:
                self.told(operation, error)
            else:  # the block was not entered, or undone before anything was sent in the name of an id
                self.rest_after(operation, error)
            return False
        self.done(operation, rows, planned, tx)
        return True

    def _invoked(self, operation: str, parts: Sequence[Sequence[str]], tx: Transaction) -> bool:
        self.history.write("txn", "invoke", operation, parts, txid=text_of_txid(tx.txid))
        return True


class Worker(TransactingWorker):
    """The work of one process."""

    expected = (*TransactingWorker.expected, sqlite3.OperationalError)

    def __init__(
        self, directory: CampaignDirectory, client: txmq.Client, history: HistoryFile, rng: random.Random,
        stop: threading.Event,
    ) -> None:  # fmt: skip
        super().__init__(client, history, rng, stop)
        self.database: LastResource = directory.resource()

    def run(self) -> None:
        """Operations, one at a time, until ``stop``."""
        steps: Sequence[Callable[[], None]] = (self.take_order, self.take_order, self.pay, self.pay, self.send)
        while not self.stop.wait(REST_S):
            self.rng.choice(steps)()

    def take_order(self) -> None:
        """One row, one or two messages under its key."""
        key, count = self.rng.choice(KEYS), self.rng.randint(1, 2)
        operation = self.next(LAST_RESOURCE)

        def write(_name: str, connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO orders (rowid_text, key) VALUES (?, ?)", (operation, key))

        self.transact(operation, _planned(operation, [ORDERS] * count, key), {RESOURCE: self.database}, write)

    def pay(self) -> None:
        """Messages to three topics."""
        operation, key = self.next(LOCAL), self.rng.choice(KEYS)
        planned = _planned(operation, [PAYMENTS, AUDIT, ORDERS, PAYMENTS], key)
        self.transact(operation, planned, {})

    def send(self) -> None:
        """A plain send: acknowledged, refused or unknown."""
        operation = self.next(PLAIN)
        topic, key = self.rng.choice((PAYMENTS, SCRAP, AUDIT)), self.rng.choice(KEYS)
        value = f"{operation}.0"
        planned = ["send", topic, key, value]
        self.history.write("send", "invoke", operation, [planned])
        padding = b" " * (500 if topic == SCRAP else 0)
        try:
            result = self.producer.send(topic, value.encode() + padding, key=key.encode(), timeout=TIMEOUT_S)
        except txmq.TxmqError as error:
            refused = isinstance(error, REFUSED)
            self.history.write("send", "fail" if refused else "info", operation, [], err=repr(error))
            if not refused:
                self.rename()
            self.rest_after(operation, error)
        else:
            self.history.write("send", "ok", operation, [[*planned, result.partition, result.offset]])


def _planned(operation: str, topics: Sequence[str], key: str) -> list[list[str]]:
    return [["send", topic, key, f"{operation}.{number}"] for number, topic in enumerate(topics)]


def text_of_txid(txid: object) -> str | None:
    """As the history has it."""
    return None if txid is None else str(txid)


def main(directory: str, address: str, name: str, seed: str) -> None:
    """Work until SIGTERM."""
    world, stop = CampaignDirectory(Path(directory)), threading.Event()
    history = HistoryFile(world.histories, name)
    with until_terminated(stop.set), connect(address, name) as client:
        Worker(world, client, history, random.Random(int(seed)), stop).run()
    history.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
