"""The usual way without txmq: an outbox table, and a relay that looks each second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import txmq
from bench.model import Measure, Row, Surroundings
from bench.rows.databases import Database, Open, mariadb, row_and_outbox, sqlite
from bench.rows.last_resource import TOPIC, client_of
from txmq.testing.bench.model import LATENCY_UNITS, latencies

POLL_S = 1.0
COMMITS, PAUSE_S = 60, 0.05  # spread over several polls
_READ = "SELECT id, message_key, content FROM outbox ORDER BY id LIMIT 1000"
_DELETE = "DELETE FROM outbox WHERE id <= ?"


def _relay(client: txmq.Client, database: Database, stop: threading.Event) -> None:
    """Look each second, send what is there, delete it."""
    with closing(database.connect()) as connection, client.producer() as producer:
        cursor = connection.cursor()
        while not stop.wait(POLL_S):
            cursor.execute(_READ)
            rows = cursor.fetchall()
            if rows:
                producer.send_many(TOPIC, [(key, content) for _, key, content in rows])
                cursor.execute(database.sql(_DELETE), (rows[-1][0],))
            connection.commit()  # also after a look at nothing: the next one is to see what came since


@contextmanager
def _outbox_relay(surroundings: Surroundings, *, opened: Open) -> Iterator[Measure]:
    with opened(surroundings.directory) as database, client_of(surroundings) as client:
        client.topics.delete(TOPIC)
        client.topics.create(TOPIC, partitions=1)
        stop = threading.Event()
        relay = threading.Thread(target=_relay, args=(client, database, stop))
        relay.start()
        try:
            yield lambda: _delays(client, database)
        finally:
            stop.set()
            relay.join()


def _delays(client: txmq.Client, database: Database) -> dict[str, float]:
    """From the return of each commit to the message at a reader."""
    committed: list[float] = []
    arrived: list[float] = []
    start = client.offsets(TOPIC, 0).end

    def read() -> None:
        offset = start
        while len(arrived) < COMMITS:
            messages = client.fetch(TOPIC, 0, offset, timeout=10.0)
            arrived.extend([time.perf_counter()] * len(messages))
            offset += len(messages)

    reader = threading.Thread(target=read)
    reader.start()
    work = row_and_outbox(database)
    for _ in range(COMMITS):
        work()
        committed.append(time.perf_counter())
        time.sleep(PAUSE_S)
    reader.join()
    return latencies(sorted(there - at for there, at in zip(arrived, committed, strict=True)))


def _row(suffix: str, name: str, opened: Open) -> Row:
    return Row(
        f"peer-outbox{suffix}", f"peer: outbox table in {name}, relay polling each second: visible",
        partial(_outbox_relay, opened=opened), LATENCY_UNITS, repeats=2,
    )  # fmt: skip


ROWS = (_row("", "SQLite", sqlite), _row("-mariadb", "MariaDB", mariadb))
