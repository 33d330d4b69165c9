"""One of the workers over homes: ``python -m tools.crash.homes.worker DIRECTORY ADDRESS NAME SEED KINDS``.

Each transaction writes to both homes. The broker that ADDRESS names first decides, as long as it is there. KINDS are
letters of ``directory``.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import MySQLdb

import txmq
from tools.crash.directory import KEYS, LAST_RESOURCE, LOCAL, ORDERS, PAYMENTS, RESOURCE, HistoryFile
from tools.crash.homes.directory import (
    ACKED,
    BANK,
    CHECKERS,
    COMMIT,
    DONE,
    EXTERNAL,
    GROUP,
    HALF,
    INBOX,
    ROLLBACK,
    XA,
    HomesCampaignDirectory,
)
from tools.crash.processes import connect
from tools.crash.worker import CHANGES_ITS_MIND, REST_S, TIMEOUT_S, TransactingWorker
from tools.crash.xa.worker import write_entry
from txmq import Xid
from txmq.client.consumer.consumer import Consumer
from txmq.client.partitioner import KeyHashSelector
from txmq.runtime.threads import until_terminated
from txmq.xa import XACode

FORMAT_ID = 4711
MEMBER = txmq.ConsumerOptions(heartbeat_interval=0.2, session_timeout=2.0)
WAIT_S = 0.05
_PARTITION_OF = KeyHashSelector().partition_of


class HomesWorker(TransactingWorker):
    """The work of one process."""

    expected = (*TransactingWorker.expected, sqlite3.OperationalError, MySQLdb.Error)

    def __init__(
        self, directory: HomesCampaignDirectory, client: txmq.Client, history: HistoryFile, rng: random.Random,
        stop: threading.Event,
    ) -> None:  # fmt: skip
        super().__init__(client, history, rng, stop)
        self.world, self.shop, self.bank = directory, directory.resource(), directory.bank()
        self.producer = client.producer(timeout=TIMEOUT_S, group=CHECKERS, checker=self._check)
        self.manager = client.xa_resource()
        self._consumer: Consumer | None = None

    def run(self, kinds: str) -> None:
        """Operations, one at a time, until ``stop``."""
        steps: dict[str, Callable[[], None]] = {
            LOCAL: self.pay, LAST_RESOURCE: self.take_order, XA: self.move, EXTERNAL: self.take_part,
            ACKED: self.bill, HALF: self.promise,
        }  # fmt: skip
        while not self.stop.wait(REST_S):
            steps[self.rng.choice(kinds)]()
        self._leave_group()

    def _planned(self, operation: str) -> list[list[str]]:
        """Messages for both homes."""
        keys = [
            self.rng.choice([key for key in KEYS if _PARTITION_OF(key.encode(), 2) == partition])
            for partition in (0, 1)
        ]
        self.rng.shuffle(keys)
        sent = [(ORDERS, keys[0]), (ORDERS, keys[1]), (PAYMENTS, keys[0])]
        return [["send", topic, key, f"{operation}.{number}"] for number, (topic, key) in enumerate(sent)]

    # --- blocks ------------------------------------------------------------------------------------------------------

    def pay(self) -> None:
        """Messages alone."""
        operation = self.next(LOCAL)
        self.transact(operation, self._planned(operation), {})

    def take_order(self) -> None:
        """A row in the last resource."""
        operation = self.next(LAST_RESOURCE)
        planned = self._planned(operation)

        def write(_name: str, connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO orders (rowid_text, key) VALUES (?, ?)", (operation, planned[0][2]))

        self.transact(operation, planned, {RESOURCE: self.shop}, write)

    def move(self) -> None:
        """A row by XA."""
        operation = self.next(XA)
        planned = self._planned(operation)

        def write(name: str, connection: Any) -> None:
            write_entry(connection, operation, name, planned[0][2], 0)

        self.transact(operation, planned, {BANK: self.bank}, write)

    def bill(self) -> None:
        """Outputs, and the acknowledgement of their input."""
        if self._consumer is None:
            self._consumer = self.client.consumer(GROUP, [INBOX], start="earliest", options=MEMBER)
        try:
            messages = self._consumer.poll(1, WAIT_S)
        except txmq.TxmqError as error:
            self.rest_after("poll", error)
            self._leave_group()
            messages = []
        for message in messages:
            operation = self.next(ACKED)
            done = ["send", DONE, (message.value or b"").decode(), f"{operation}.3"]
            if not self.transact(operation, [*self._planned(operation), done], {}, acked=message):
                self._leave_group()  # it is delivered again, to any member
                break

    def _leave_group(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with suppress(txmq.TxmqError):
                consumer.close()

    # --- decided elsewhere -------------------------------------------------------------------------------------------

    def take_part(self) -> None:
        """A branch of a transaction manager, whose decision is a row."""
        operation = self.next(EXTERNAL)
        planned, rows = self._planned(operation), self.world.rows_of(operation)
        xid = Xid(FORMAT_ID, operation.encode(), b"messages")
        self.history.write("txn", "invoke", operation, [*rows, *planned])
        outcome = ROLLBACK
        try:
            self.manager.start(xid)
            try:
                self._send(planned)
            finally:
                self.manager.end(xid)
            self.manager.prepare(xid)
            if self.rng.random() >= CHANGES_ITS_MIND:
                outcome = self.world.decide(operation, COMMIT)
        except (txmq.TxmqError, sqlite3.OperationalError) as error:
            self.rest_after(operation, error)
        self._resolve(xid, outcome)
        if outcome == COMMIT:
            self.history.write("txn", "ok", operation, [*rows, *planned], pend=True)
        else:
            self.history.write("txn", "fail", operation, [])

    def _resolve(self, xid: Xid, outcome: str) -> None:
        """The manager's decision is carried out, however long it takes."""
        resolve = self.manager.commit if outcome == COMMIT else self.manager.rollback
        while True:
            try:
                resolve(xid)
            except txmq.errors.XAError as error:
                if error.xa_code == XACode.XAER_NOTA:  # nothing was prepared, or an attempt before had no answer
                    return
                if error.xa_code != XACode.XAER_RMFAIL:
                    raise
                self.rest_after(str(xid), error)
            else:
                return

    def promise(self) -> None:
        """A half message, and the row that its checker looks for."""
        operation, key = self.next(HALF), self.rng.choice(KEYS)
        planned, rows = ["send", ORDERS, key, f"{operation}.0"], self.world.rows_of(operation)
        self.history.write("txn", "invoke", operation, [*rows, planned])
        try:
            half = self.producer.half(ORDERS, planned[3].encode(), key=key.encode(), timeout=TIMEOUT_S)
            if self.world.decide(operation, COMMIT) == COMMIT:
                half.commit()
                self.history.write("txn", "ok", operation, [*rows, planned], txid=half.txid, pend=True)
            else:
                half.rollback()
                self.history.write("txn", "fail", operation, [], txid=half.txid)
        except txmq.TxmqError as error:
            self.told(operation, error)

    def _check(self, request: txmq.CheckRequest) -> txmq.Resolution:
        """Asked about a half message that may be another worker's."""
        operation = (request.message.value or b"").decode().rpartition(".")[0]
        outcome = self.world.decide(operation, ROLLBACK)
        return txmq.Resolution.COMMIT if outcome == COMMIT else txmq.Resolution.ROLLBACK

    def _send(self, planned: Sequence[Sequence[str]]) -> None:
        for _, topic, key, value in planned:
            self.producer.send(topic, value.encode(), key=key.encode())


def main(directory: str, address: str, name: str, seed: str, kinds: str) -> None:
    """Work until SIGTERM."""
    world, stop = HomesCampaignDirectory(Path(directory)), threading.Event()
    history = HistoryFile(world.histories, name)
    with until_terminated(stop.set), connect(address, name) as client:
        HomesWorker(world, client, history, random.Random(int(seed)), stop).run(kinds)
    history.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
