"""What others do for the same need, on the same machine in the same run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import txmq
from bench.model import Measure, Row, Surroundings
from bench.rows.client import TOPIC
from bench.rows.transactions import create_tables, open_sqlite
from txmq.testing.bench.model import LATENCY_UNITS, latencies
from txmq.testing.broker_process import BrokerProcess

POLL_S = 1.0
COMMITS, PAUSE_S = 60, 0.05  # spread over several polls


def _relay(client: txmq.Client, database: Path, stop: threading.Event) -> None:
    """The usual relay: look each second, send what is there, delete it."""
    connection = open_sqlite(database)
    with client.producer() as producer:
        while not stop.wait(POLL_S):
            rows = connection.execute("SELECT id, key, content FROM outbox ORDER BY id LIMIT 1000").fetchall()
            if rows:
                producer.send_many(TOPIC, [(key, content) for _, key, content in rows])
                connection.execute("DELETE FROM outbox WHERE id <= ?", (rows[-1][0],))
                connection.commit()
    connection.close()


@contextmanager
def _outbox_relay(surroundings: Surroundings) -> Iterator[Measure]:
    path = surroundings.directory / "outbox.db"
    create_tables(path)
    with BrokerProcess(surroundings.directory / "data") as broker, txmq.connect(broker.address) as client:
        client.topics.create(TOPIC, partitions=1)
        stop = threading.Event()
        relay = threading.Thread(target=_relay, args=(client, path, stop))
        relay.start()
        try:
            yield lambda: _delays(client, path)
        finally:
            stop.set()
            relay.join()


def _delays(client: txmq.Client, path: Path) -> dict[str, float]:
    committed: list[float] = []
    delays: list[float] = []
    start = client.offsets(TOPIC, 0).end

    def read() -> None:
        offset = start
        while len(delays) < COMMITS:
            messages = client.fetch(TOPIC, 0, offset, timeout=10.0)
            now = time.perf_counter()
            delays.extend(now - at for at in committed[len(delays) : len(delays) + len(messages)])
            offset += len(messages)

    reader = threading.Thread(target=read)
    reader.start()
    connection = open_sqlite(path)
    for _ in range(COMMITS):
        connection.execute("INSERT INTO orders (content) VALUES (?)", (b"x" * 100,))
        connection.execute("INSERT INTO outbox (topic, key, content) VALUES (?, ?, ?)", (TOPIC, None, b"x" * 100))
        committed.append(time.perf_counter())
        connection.commit()
        time.sleep(PAUSE_S)
    reader.join()
    connection.close()
    return latencies(sorted(delays))


ROWS = (
    Row(
        "peer-outbox", "peer: outbox table, relay polling each second: visible", _outbox_relay,
        LATENCY_UNITS, repeats=2,
    ),
)  # fmt: skip
