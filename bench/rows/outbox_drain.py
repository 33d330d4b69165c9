"""After an outage: how fast messages that waited in a database go to the broker, alone and beside new orders."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count

import txmq
from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.databases import ORDER, VALUE, Database, mariadb
from bench.rows.last_resource import PARTITIONS, TOPIC
from txmq.client.transaction.last_resource.outboxing import keys_of
from txmq.client.transaction.messages import MessageBuffer
from txmq.protocol.parts import encode_part
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource
from txmq.xa.database.marker_table import own_transaction
from txmq.xa.last_resource.drainer import LEASE_MS
from txmq.xa.last_resource.resolving import ResolvingConnection
from txmq.xa.resolver import Resolver

ROWS_WAITING = 20_000
KEYS = 1000
IN_A_COMMIT = 500  # rows that are filled in at once
ORDERS_PER_S = 200
DRAIN_S_MAX = 120.0
_LOOK_S = 0.02


@contextmanager
def _drain(surroundings: Surroundings) -> Iterator[Measure]:
    with (
        mariadb(surroundings.directory) as database, BrokerProcess(surroundings.directory / "data") as broker,
        txmq.connect(broker.address, timeout=30) as client,
    ):  # fmt: skip
        client.topics.create(TOPIC, partitions=PARTITIONS)
        LastResource("orders", connect=database.connect, outbox=True).install(client)
        ids = count()

        def waiting(rows: int) -> LastResource:
            """A resource as a process has it that was just started, with so many rows in its outbox."""
            resource = LastResource("orders", connect=database.connect, outbox=True)
            with closing(resource.open_for_operator()) as opened:
                _fill(opened, rows, ids)
            return resource

        def measure(rows: int) -> dict[str, float]:
            time.sleep(LEASE_MS / 1000)  # until the turn of the drainer before has ended
            alone = _alone(client, waiting(rows), rows)
            time.sleep(LEASE_MS / 1000)
            with txmq.connect(broker.address, timeout=30) as service:
                return {"rate": alone, "rate, with orders": _with_orders(service, database, waiting(rows), rows)}

        measure(ROWS_WAITING // 20)
        yield lambda: measure(surroundings.count(ROWS_WAITING))


def _fill(opened: ResolvingConnection, rows: int, ids: Iterator[int]) -> None:
    """Rows as blocks leave them, each with a message."""
    assert opened.outbox is not None
    connection, outbox = opened.connection, opened.outbox
    while rows > 0:
        with own_transaction(connection, outbox.dialect):
            for number in (next(ids) for _ in range(min(rows, IN_A_COMMIT))):
                messages, row_id = MessageBuffer(None, lambda _: 0), f"row-{number}"
                messages.add(TOPIC, number % PARTITIONS, (b"key-%d" % (number % KEYS), VALUE, [], 0))
                parts = messages.take_parts(row_id, len(VALUE) * 2)
                body = b"".join(buffer for part in parts for buffer in encode_part(*part))
                outbox.add(connection, row_id, body, keys_of(parts))
        rows -= IN_A_COMMIT


def _alone(client: txmq.Client, resource: LastResource, rows: int) -> float:
    """Rows a second, by a process that does nothing else."""
    before, resolver = _messages(client), Resolver(client, [resource])
    with closing(resolver):
        began = time.perf_counter()
        resolver.round()
        while resolver.has_more:
            resolver.round()
        taken = time.perf_counter() - began
    if resolver.problems() or _messages(client) - before != rows:
        raise AssertionError(f"{_messages(client) - before} of {rows} messages arrived: {resolver.problems()}")
    return rows / taken


def _with_orders(client: txmq.Client, database: Database, resource: LastResource, rows: int) -> float:
    """Rows a second, by the resolver of a client that takes orders."""
    before, stop, taken, insert = _messages(client), threading.Event(), 0, database.sql(ORDER)

    def take_orders() -> None:
        nonlocal taken
        at = time.perf_counter()
        with client.producer() as producer:
            while not stop.wait(max(0.0, at - time.perf_counter())):
                with producer.transaction(resource) as tx:
                    tx.connection(resource).cursor().execute(insert, (VALUE,))
                    tx.send(TOPIC, VALUE, key=b"key-%d" % (taken % KEYS))
                taken += 1
                at += 1 / ORDERS_PER_S

    with closing(database.connect()) as connection:
        cursor = connection.cursor()
        began = time.perf_counter()
        orders = threading.Thread(target=take_orders)
        orders.start()
        try:
            while time.perf_counter() < began + DRAIN_S_MAX:
                cursor.execute("SELECT 1 FROM txmq_marker_outbox LIMIT 1")
                is_empty = not cursor.fetchall()
                connection.commit()
                if is_empty:
                    break
                time.sleep(_LOOK_S)
        finally:
            stop.set()
            orders.join()
        drained_s = time.perf_counter() - began
    if _messages(client) - before < rows:
        raise AssertionError(f"{_messages(client) - before} of {rows} messages arrived in {drained_s:.0f} s")
    return (rows + taken) / drained_s


def _messages(client: txmq.Client) -> int:
    return sum(client.offsets(TOPIC, partition).end for partition in range(PARTITIONS))


ROWS = (
    Row(
        "outbox-drain", "rows that waited in MariaDB's outbox, to the broker", _drain,
        {"rate": "rows/s", "rate, with orders": "rows/s"},
        (Bound("rate", 5000, "rows/s"), Bound("rate, with orders", 5000, "rows/s")),
    ),
)  # fmt: skip
"""After an outage (docs/benchmarks.md)."""
