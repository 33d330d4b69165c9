"""One of the aio campaign's workers: ``python -m tools.crash.aio.worker DIRECTORY ADDRESS NAME SEED``.

Tasks of one loop (asyncio's or uvloop's, as the seed says) take orders: a row in a SQLite file or in MariaDB (last
resource), or money moved between two servers (XA), with messages under its key. A part of them are cancelled at some
moment; SIGTERM cancels all. A task that was cancelled knows nothing of its order but the id: it goes on under a new
name, and asks for the outcome.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import MySQLdb
import uvloop

import txmq
import txmq.aio
from tools.crash.aio.directory import LAST_RESOURCES, AioCampaignDirectory, insert_order
from tools.crash.directory import KEYS, LAST_RESOURCE, ORDERS, RESOURCE, HistoryFile
from tools.crash.processes import CONNECT_AGAIN_S, CONNECT_S
from tools.crash.worker import (
    AFTER_FAILURE_S,
    ASK_AGAIN_S,
    CHANGES_ITS_MIND,
    OUTCOME_ASKED_FOR_S,
    TIMEOUT_S,
    TXID_ASKED_EARLY,
    ChangedMindError,
)
from tools.crash.xa.directory import RECEIPTS, RESOURCES, TRANSFER, TRANSFERS
from tools.crash.xa.worker import write_entry

TASKS = 16  # of each of four workers
REST_S = 0.05
CANCELLED = 0.25
CANCELLED_AFTER_S_MAX = 0.1
EXPECTED = (txmq.TxmqError, ChangedMindError, sqlite3.OperationalError, MySQLdb.Error)


class OrderTask:
    """One task's orders, one at a time."""

    def __init__(
        self, client: txmq.aio.Client, producer: txmq.aio.Producer, resources: dict[str, Any], history: HistoryFile,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self.client, self.producer, self.resources, self.history, self.rng = client, producer, resources, history, rng
        self._base, self._names, self._number = history.process, 0, 0

    async def run(self) -> None:
        """Orders, until it is cancelled."""
        while True:
            await asyncio.sleep(self.rng.uniform(0, 2 * REST_S))
            if self.rng.random() < CANCELLED:
                order = asyncio.create_task(self.order())
                try:
                    await asyncio.wait((order,), timeout=self.rng.uniform(0, CANCELLED_AFTER_S_MAX))
                finally:
                    order.cancel()
                    await asyncio.wait((order,))
                if not order.cancelled():
                    order.result()  # what it may not raise
            else:
                await self.order()

    async def order(self) -> None:
        """One transaction: its rows, and one to three messages under its key."""
        kind = self.rng.choice((*LAST_RESOURCES, TRANSFER))
        self._number += 1
        operation, key = f"{self.history.process}-{self._number}{kind}", self.rng.choice(KEYS)
        if kind == LAST_RESOURCE:
            topics = [ORDERS] * self.rng.randint(1, 3)
        else:
            topics = [TRANSFERS, RECEIPTS, TRANSFERS][: self.rng.randint(1, 3)]
        names = (RESOURCE,) if kind == LAST_RESOURCE else RESOURCES[kind]
        planned = [["send", topic, key, f"{operation}.{number}"] for number, topic in enumerate(topics)]
        rows = [["row", name, operation] for name in names]
        amounts = (-1, 1) if kind == TRANSFER else (0,)
        works: list[Callable[[Any], None]] = [
            partial(insert_order, operation=operation, key=key) if kind == LAST_RESOURCE
            else partial(write_entry, operation=operation, resource=name, key=key, amount=amount)
            for name, amount in zip(names, amounts, strict=True)
        ]  # fmt: skip
        tx = self.producer.transaction(*(self.resources[name] for name in names), timeout=TIMEOUT_S)
        await self._told(operation, rows, planned, tx, works)

    async def _told(
        self, operation: str, rows: Sequence[Sequence[str]], planned: Sequence[Sequence[str]],
        tx: txmq.aio.Transaction, works: Sequence[Callable[[Any], None]],
    ) -> None:  # fmt: skip
        is_invoked, is_early = False, self.rng.random() < TXID_ASKED_EARLY

        def invoke() -> bool:
            self.history.write("txn", "invoke", operation, [*rows, *planned], txid=tx.txid)
            return True

        try:
            async with tx:
                if is_early:
                    is_invoked = invoke()
                for (_, name, _), work in zip(rows, works, strict=True):
                    await tx.connection(self.resources[name]).run(work)
                for _, topic, key, value in planned:
                    await self.producer.send(topic, value.encode(), key=key.encode())
                if not is_early:
                    is_invoked = invoke()
                if self.rng.random() < CHANGES_ITS_MIND:
                    raise ChangedMindError
        except (*EXPECTED, asyncio.CancelledError) as error:
            if is_invoked:
                await self._failed(operation, tx.txid, error)
            sys.stderr.write(f"{operation}: {error!r}\n")
            if isinstance(error, asyncio.CancelledError):
                raise
            await asyncio.sleep(AFTER_FAILURE_S)
            return
        await self._committed(operation, rows, planned, tx)

    async def _committed(
        self, operation: str, rows: Sequence[Sequence[str]], planned: Sequence[Sequence[str]], tx: txmq.aio.Transaction
    ) -> None:
        places: list[tuple[int | None, int | None]] = [(None, None)] * len(planned)
        try:
            places = [(one.partition, one.offset) for one in await tx.results] or places
        except txmq.TxmqError as error:
            sys.stderr.write(f"{operation}: results: {error!r}\n")
        finally:  # cancelled or not
            sends = [[*send, *place] for send, place in zip(planned, places, strict=True)]
            more = {"pend": True} if any(offset is None for _, offset in places) else {}
            self.history.write("txn", "ok", operation, [*rows, *sends], txid=tx.txid, **more)

    async def _failed(self, operation: str, txid: str, error: BaseException) -> None:
        is_cancelled = isinstance(error, asyncio.CancelledError)  # told nothing, as a process that was killed
        is_unknown = is_cancelled or isinstance(error, txmq.OutcomeUnknownError | txmq.HeuristicError)
        if not is_cancelled:
            self.history.write("txn", "info" if is_unknown else "fail", operation, [], err=repr(error), txid=txid)
        if is_unknown:
            self._names += 1
            self.history.process = f"{self._base}.{self._names}"
            await self._ask(operation, txid)

    async def _ask(self, operation: str, txid: str) -> None:
        until = time.monotonic() + OUTCOME_ASKED_FOR_S
        while time.monotonic() < until:
            try:
                outcome = await self.client.outcome(txid)
            except txmq.TxmqError as error:
                sys.stderr.write(f"{operation}: outcome: {error!r}\n")
            else:
                if outcome is not txmq.Outcome.UNKNOWN:
                    self.history.write("outcome", "ok", operation, [outcome.value])
                    return
            await asyncio.sleep(ASK_AGAIN_S)


async def _connected(address: str, name: str) -> txmq.aio.Client:
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            return await txmq.aio.connect(address, name=name)
        except txmq.errors.ConnectionLostError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(CONNECT_AGAIN_S)


async def work(world: AioCampaignDirectory, address: str, name: str, rng: random.Random) -> None:
    """Work until SIGTERM."""
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    histories = HistoryFile(world.histories, name)
    resources: dict[str, Any] = {
        RESOURCE: world.resource(), "ledger": world.ledger(), "bank-a": world.xa("bank-a"), "bank-b": world.xa("bank-b")
    }  # fmt: skip
    try:
        async with (
            await _connected(address, name) as client,
            client.producer(timeout=TIMEOUT_S) as producer,
            asyncio.TaskGroup() as group,
        ):
            for number in range(TASKS):
                own, drawn = histories.beside(f"{name}-{number}"), random.Random(rng.getrandbits(32))
                group.create_task(OrderTask(client, producer, resources, own, drawn).run())
    except asyncio.CancelledError:
        """It was told to end."""
    finally:
        histories.close()


def main(directory: str, address: str, name: str, seed: str) -> None:
    """Work until SIGTERM, on one of the loops."""
    rng = random.Random(int(seed))
    run = rng.choice((asyncio.run, uvloop.run))
    run(work(AioCampaignDirectory(Path(directory)), address, name, rng))


if __name__ == "__main__":
    main(*sys.argv[1:])
