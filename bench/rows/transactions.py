"""Local transactions: one thread, many threads, and a raw generator; last resource against a plain outbox commit."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import txmq
from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.client import PARTITIONS, TOPIC
from txmq.testing.bench import loads
from txmq.testing.bench.limits import cpu_seconds
from txmq.testing.bench.model import LATENCY_UNITS, Target, latencies
from txmq.testing.bench.raw import RawConnection, chunked, message_of
from txmq.testing.bench.timing import in_threads
from txmq.testing.broker_process import BrokerProcess
from txmq.xa import LastResource
from txmq.xid import TxId

IN_FLIGHT, THREADS = 64, 64
_VALUE = b"x" * 100


@contextmanager
def _client(surroundings: Surroundings) -> Iterator[txmq.Client]:
    with BrokerProcess(surroundings.directory / "data") as broker, txmq.connect(broker.address, timeout=30) as client:
        client.topics.create(TOPIC, partitions=PARTITIONS)
        yield client


# --- local -----------------------------------------------------------------------------------------------------------


@contextmanager
def _one_thread(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(5000)
    with BrokerProcess(surroundings.directory / "data") as broker, loads.tx_local(Target(broker.address)) as run:
        run(count // 10)
        yield lambda: run(count)


@contextmanager
def _many_threads(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(40_000)
    with (
        BrokerProcess(surroundings.directory / "data") as broker,
        loads.tx_threads(Target(broker.address, threads=THREADS)) as run,
    ):
        yield lambda: run(count)


@contextmanager
def _raw(surroundings: Surroundings) -> Iterator[Measure]:
    """Commit requests of a session of the generator's own, computed before the clock starts."""
    count = surroundings.count(100_000)
    batch = message_of(200)
    with BrokerProcess(surroundings.directory / "data") as broker:

        def measure() -> dict[str, float]:
            with RawConnection(broker.host, broker.port) as connection:
                if not measured:
                    connection.create_topic(TOPIC, PARTITIONS)
                measured.append(True)
                answer = connection.ask(b"hello 1 bench session=new 1\r\n")
                told = json.loads(answer.partition(b"\r\n")[2])
                who = (int(told["cluster"], 16), int(told["home"], 16), int(told["session"], 16))
                requests = (_commit(TxId(*who, number), batch) for number in range(1, count + 1))
                # An eighth a write: the generator waits for nobody's full window.
                chunks = chunked(requests, IN_FLIGHT // 8)
                used_s = cpu_seconds(broker.pid)
                took_s = connection.pipeline(chunks, IN_FLIGHT)
                return {"rate": count / took_s, "broker CPU": (cpu_seconds(broker.pid) - used_s) / count * 1e6}

        measured: list[bool] = []
        yield measure


def _commit(txid: TxId, batch: bytes) -> bytes:
    part = b"%b %d %d\r\n%b" % (TOPIC.encode(), txid.counter % PARTITIONS, len(batch), batch)
    floor = max(0, txid.counter - IN_FLIGHT - 1)
    return b"commit %b floor=%d %d %x\r\n%b" % (str(txid).encode(), floor, len(part), txid.counter, part)


# --- last resource ---------------------------------------------------------------------------------------------------


def open_sqlite(path: Path) -> sqlite3.Connection:
    """A connection that forces every commit."""
    connection = sqlite3.connect(path, timeout=60.0)
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def create_tables(path: Path) -> None:
    """Orders and outbox, in WAL mode."""
    connection = open_sqlite(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, content BLOB)")
    connection.execute("CREATE TABLE outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT, key BLOB, content BLOB)")
    connection.close()


def _outbox(path: Path) -> Callable[[], object]:
    """A row and an outbox row in one plain commit, on one connection of this thread."""
    connection = open_sqlite(path)
    connection.isolation_level = None

    def work() -> None:
        connection.execute("BEGIN IMMEDIATE")  # else two writers meet at the upgrade of their locks
        connection.execute("INSERT INTO orders (content) VALUES (?)", (_VALUE,))
        connection.execute("INSERT INTO outbox (topic, key, content) VALUES (?, ?, ?)", (TOPIC, b"key", _VALUE))
        connection.execute("COMMIT")

    return work


@contextmanager
def _last_resource(surroundings: Surroundings) -> Iterator[Measure]:
    path = (surroundings.directory / "orders.db").absolute()
    plain = (surroundings.directory / "outbox.db").absolute()
    create_tables(path)
    create_tables(plain)
    count = surroundings.count(2000)
    with _client(surroundings) as client, client.producer() as producer:
        resource = LastResource("orders", connect=lambda: open_sqlite(path))
        resource.install(client)

        def work() -> None:
            with producer.transaction(resource) as tx:
                tx.connection(resource).execute("INSERT INTO orders (content) VALUES (?)", (_VALUE,))
                producer.send(TOPIC, _VALUE, key=b"key")

        def measure() -> dict[str, float]:
            figures: dict[str, float] = {}
            for threads in (1, 8):
                outbox_rate, _ = in_threads(lambda: _outbox(plain), threads, count)
                rate, _ = in_threads(lambda: work, threads, count)
                figures |= {
                    f"share, {threads} thr": 100 * rate / outbox_rate,
                    f"rate, {threads} thr": rate,
                    f"outbox, {threads} thr": outbox_rate,
                }
            return figures

        yield measure


@contextmanager
def _visible(surroundings: Surroundings) -> Iterator[Measure]:
    """From the database's COMMIT (as its connection returns from it) to the message at a waiting reader."""
    path = (surroundings.directory / "orders.db").absolute()
    create_tables(path)
    count = surroundings.count(1000)
    committed: list[float] = []

    class Timed(sqlite3.Connection):
        def commit(self) -> None:
            super().commit()
            committed.append(time.perf_counter())

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=60.0, factory=Timed)
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    with _client(surroundings) as client, client.producer() as producer:
        resource = LastResource("orders", connect=connect)
        resource.install(client)

        def measure() -> dict[str, float]:
            delays: list[float] = []
            seen = threading.Event()
            start = client.offsets(TOPIC, 0).end

            def read() -> None:
                for offset in range(start, start + count):
                    while not client.fetch(TOPIC, 0, offset, timeout=10.0):
                        pass
                    delays.append(time.perf_counter() - committed[-1])
                    seen.set()

            reader = threading.Thread(target=read)
            reader.start()
            for _ in range(count):
                with producer.transaction(resource) as tx:
                    tx.connection(resource).execute("INSERT INTO orders (content) VALUES (?)", (_VALUE,))
                    producer.send(TOPIC, _VALUE, partition=0)
                seen.wait(10.0)
                seen.clear()
            reader.join()
            return latencies(sorted(delays))

        yield measure


ROWS = (
    Row(
        "tx-local", "local transactions of one message, one thread", _one_thread,
        {"rate": "tx/s"} | LATENCY_UNITS,
        (Bound("rate", 5000, "tx/s"), Bound("p50", 0.2, "ms", at_least=False)), ("echo after a sync p50 ms",),
    ),
    Row(
        "tx-raw", f"local transactions, {IN_FLIGHT} in flight, raw generator", _raw,
        {"rate": "tx/s", "broker CPU": "us/tx"},
        (Bound("rate", 60_000, "tx/s"),), ("sync 4 KiB p50 ms",),
    ),
    Row(
        "tx-threads", f"local transactions, {THREADS} threads of one process", _many_threads,
        {"rate": "tx/s"} | LATENCY_UNITS,
        (Bound("rate", 20_000, "tx/s"),), ("sync 4 KiB p50 ms",),
    ),
    Row(
        "last-resource", "last resource (SQLite) against row + outbox row in one commit", _last_resource,
        {
            "share, 1 thr": "%", "rate, 1 thr": "tx/s", "outbox, 1 thr": "tx/s",
            "share, 8 thr": "%", "rate, 8 thr": "tx/s", "outbox, 8 thr": "tx/s",
        },
        (Bound("share, 1 thr", 50, "%"), Bound("share, 8 thr", 60, "%")),
    ),
    Row(
        "visible", "from the database's commit to the message at a reader", _visible, LATENCY_UNITS,
        (Bound("p99", 5, "ms", at_least=False),),
    ),
)  # fmt: skip
