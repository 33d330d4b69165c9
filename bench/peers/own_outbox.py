"""txmq's outbox: the row and its message in the service's transaction, and a relay, in a process of its own or here.

A relay in a process of its own looks by itself for what is committed; one of the service's process is woken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import txmq
from bench.peers.helpers import arrivals, helper
from bench.peers.model import TOPICS, Peer, Running, value_of
from bench.peers.orders import LastCommit, Order, Service, moved, pids_with, server
from bench.peers.own import TIMEOUT_S
from bench.peers.relay import MOVE
from bench.rows.databases import ORDER, VALUE, Connect, Database
from txmq.outbox.tables import NewRow

NAME = "orders"
_PER_INSERT = 10_000
DRAIN_S_MAX = 600.0


def own_outbox(peer: Peer, running: Running, database: Database, stack: ExitStack) -> Service:
    """With the relay in a process of its own, as ``txmq outbox run`` is."""
    outbox = installed(database)
    arrived = stack.enter_context(arrivals(peer, running.address))
    moving = stack.enter_context(helper(own_relay, database.connect, running.address))

    pids = pids_with(database, running, moving)
    return Service(lambda: _order(database, outbox), arrived, pids, partial(moved, moving))


def woken_outbox(peer: Peer, running: Running, database: Database, stack: ExitStack) -> Service:
    """With the relay in the service's process, which wakes it after each COMMIT."""
    outbox = installed(database)
    arrived = stack.enter_context(arrivals(peer, running.address))
    client = stack.enter_context(txmq.connect(running.address, timeout=TIMEOUT_S))

    @contextmanager
    def around() -> Iterator[None]:
        with client.relay(outbox, connect=database.connect) as relay:
            relay.drain(TIMEOUT_S)
            yield

    return Service(
        lambda: _order(database, outbox), arrived, lambda: {**server(database), "CPU: broker": running.pids()}, around
    )


def installed(database: Database) -> txmq.Outbox:
    """The outbox, and its tables in the database."""
    outbox = txmq.Outbox(NAME)
    with closing(database.connect()) as connection:
        outbox.install(connection)
    return outbox


def _order(database: Database, outbox: txmq.Outbox) -> Order:
    last = LastCommit()
    connection = database.timed(last)
    cursor = connection.cursor()
    row = database.sql(ORDER)

    def order(number: int) -> float:
        if database.begin:
            cursor.execute(database.begin)
        cursor.execute(row, (VALUE,))
        outbox.send(connection, TOPICS[0], value_of(number), b"key")
        connection.commit()
        outbox.wake()
        return last.moment

    return order


def own_relay(connection: Connection, connect: Connect, address: str) -> None:
    """The work of a helper process, which takes the words of ``relay.relay``."""
    outbox = txmq.Outbox(NAME)
    with txmq.connect(address, timeout=TIMEOUT_S) as client:
        connection.send("ready")
        with suppress(EOFError):
            while word := connection.recv():
                if word == MOVE:
                    with client.relay(outbox, connect=connect) as relay:
                        relay.drain(TIMEOUT_S)
                        connection.send("ready")
                        connection.recv()
                    connection.send("ready")
                else:
                    connection.send(drained(client, outbox, connect))


def drained(client: txmq.Client, outbox: txmq.Outbox, connect: Callable[[], Any]) -> tuple[int, float]:
    """Run a relay until nothing waits; how many messages it has sent, and how long that took."""
    started = time.perf_counter()
    with client.relay(outbox, connect=connect) as relay:
        relay.drain(DRAIN_S_MAX)
        return relay.sent, time.perf_counter() - started


def fill(outbox: txmq.Outbox, connect: Callable[[], Any], count: int) -> None:
    """So many messages, each a unit of its own, in few commits."""
    row = NewRow(TOPICS[0], b"key", value_of(0))
    with closing(connect()) as connection:
        tables = outbox.tables(connection)
        for first in range(0, count, _PER_INSERT):
            tables.insert(connection, [row] * min(_PER_INSERT, count - first), None)
            connection.commit()
