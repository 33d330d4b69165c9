"""A row and its message: last resource against row + outbox row in one commit, and how soon the message is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import txmq
from bench.model import Bound, Measure, Medians, Row, Surroundings
from bench.rows.databases import ORDER, VALUE, Open, mariadb, row_and_outbox, sqlite
from bench.rows.steps import Make, bare_steps
from txmq.testing.bench.limits import SYNCED_ECHO, cpu_seconds
from txmq.testing.bench.model import LATENCY_UNITS, latencies
from txmq.testing.bench.timing import in_threads
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource, MySQLResource

TOPIC, PARTITIONS = "bench", 4
THREADS = (1, 8)
ARRIVAL_S_MAX = 10.0
WARM_UP = 300  # a database that has just started is slow for its first commits


@contextmanager
def client_of(surroundings: Surroundings) -> Iterator[txmq.Client]:
    """A client of a broker with the topic."""
    with broker_and_client(surroundings) as (_, client):
        yield client


@contextmanager
def broker_and_client(surroundings: Surroundings) -> Iterator[tuple[BrokerProcess, txmq.Client]]:
    """A broker with the topic, and a client of it."""
    with BrokerProcess(surroundings.directory / "data") as broker, txmq.connect(broker.address, timeout=30) as client:
        client.topics.create(TOPIC, partitions=PARTITIONS)
        yield broker, client


@contextmanager
def _rates(surroundings: Surroundings, *, opened: Open) -> Iterator[Measure]:
    with (
        opened(surroundings.directory) as database, bare_steps(database, surroundings.directory) as steps,
        broker_and_client(surroundings) as (broker, client), client.producer() as producer,
    ):  # fmt: skip
        resource = LastResource("orders", connect=database.connect)
        resource.install(client)
        work = row_and_message(producer, resource, database.sql(ORDER))
        pids = broker.pid, database.pid(), steps.pid

        def measure(count: int) -> dict[str, float]:
            others = {"outbox": lambda: row_and_outbox(database), "steps": steps.last_resource}
            return beside(work, others, count, pids)

        measure(WARM_UP)
        yield lambda: measure(surroundings.count(2000))


def row_and_message(producer: txmq.Producer, resource: LastResource | MySQLResource, insert: str) -> Callable[[], None]:
    """One transaction: a row and a message."""

    def work() -> None:
        with producer.transaction(resource) as tx:
            tx.connection(resource).cursor().execute(insert, (VALUE,))
            producer.send(TOPIC, VALUE, key=b"key")

    return work


def beside(
    work: Callable[[], object], others: dict[str, Make], count: int, pids: Sequence[int | None]
) -> dict[str, float]:
    """For 1 and 8 threads: rates of ``work`` and of the others, its share of the first of them, its latencies.

    And the processor time of one transaction of each, in this process and in those of ``pids``.
    """
    figures: dict[str, float] = {}
    for threads in THREADS:
        suffix, rates = f", {threads} thr", dict[str, float]()
        for name, make in others.items():
            before = _spent_s(pids)
            rates[name] = figures[name + suffix] = in_threads(make, threads, count)[0]
            figures[f"{name} CPU{suffix}"] = 1e6 * (_spent_s(pids) - before) / count
        before = _spent_s(pids)
        rate, taken = in_threads(lambda: work, threads, count)
        spread = latencies(taken)
        figures |= {
            f"share{suffix}": 100 * rate / next(iter(rates.values())),
            f"rate{suffix}": rate,
            f"p50{suffix}": spread["p50"],
            f"p99{suffix}": spread["p99"],
            f"CPU{suffix}": 1e6 * (_spent_s(pids) - before) / count,
        }
    return figures


def _spent_s(pids: Sequence[int | None]) -> float:
    return time.process_time() + sum(cpu_seconds(pid) for pid in pids if pid is not None)


def share_of_steps(name: str, threads: int) -> Callable[[Medians, Medians], float]:
    """The rate of the bare steps in percent of the rate ``name``."""
    return lambda _, figures: 100 * figures[f"steps, {threads} thr"] / figures[f"{name}, {threads} thr"]


def units_beside(name: str) -> dict[str, str]:
    """Units of what ``beside`` gives."""
    return {
        f"{figure}, {threads} thr": unit
        for threads in THREADS
        for figure, unit in (
            ("share", "%"), ("rate", "tx/s"), ("steps", "tx/s"), (name, "tx/s"), ("p50", "ms"), ("p99", "ms"),
            ("CPU", "us"), ("steps CPU", "us"), (f"{name} CPU", "us"),
        )
    }  # fmt: skip


@contextmanager
def visible(
    surroundings: Surroundings, *, opened: Open, made: Callable[..., LastResource | MySQLResource]
) -> Iterator[Measure]:
    """From the database's COMMIT (as its connection returns from it) to the message at a waiting reader."""
    committed: list[float] = []
    mine = threading.get_ident()  # a resolver commits too, in its own thread
    with opened(surroundings.directory) as database, client_of(surroundings) as client, client.producer() as producer:

        def connect() -> Any:
            return database.timed(committed if threading.get_ident() == mine else [])

        resource = made("orders", connect=connect)
        resource.opens_aside = False  # it would be another thread that connects
        resource.install(client)
        insert = database.sql(ORDER)

        def work() -> None:
            with producer.transaction(resource) as tx:
                tx.connection(resource).cursor().execute(insert, (VALUE,))
                producer.send(TOPIC, VALUE, partition=0)

        _arrivals(client, work, committed, WARM_UP)
        yield lambda: latencies(sorted(_arrivals(client, work, committed, surroundings.count(1000))))


def _arrivals(
    client: txmq.Client, work: Callable[[], None], committed: list[float], count: int
) -> list[float]:  # fmt: skip
    """Do it ``count`` times, each after the message of the one before has arrived; seconds from commit to arrival."""
    delays: list[float] = []
    arrived = threading.Event()
    start = client.offsets(TOPIC, 0).end
    committed.clear()
    stop = False

    def read() -> None:
        offset = start
        while offset < start + count and not stop:
            if client.fetch(TOPIC, 0, offset, timeout=1.0):
                delays.append(time.perf_counter() - committed[-1])
                offset += 1
                arrived.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(count):
            arrived.clear()
            work()
            if not arrived.wait(ARRIVAL_S_MAX):
                raise AssertionError(f"no message {ARRIVAL_S_MAX:.0f} s after its commit")
    finally:
        stop = True
        reader.join()
    if len(committed) < count:
        raise AssertionError(f"{len(committed)} commits were noted, {count} done: the delays are of something else")
    return delays


def _rows(suffix: str, name: str, opened: Open, shares: dict[int, float]) -> tuple[Row, ...]:
    bounds = tuple(
        Bound(f"share, {threads} thr", share, "%", best=share_of_steps("outbox", threads))
        for threads, share in shares.items()
    )
    return (
        Row(
            f"last-resource{suffix}", f"last resource ({name}) against row + outbox row in one commit",
            partial(_rates, opened=opened), units_beside("outbox"), bounds, (SYNCED_ECHO,),
        ),
        Row(
            f"visible{suffix}", f"from the commit of {name} to the message at a reader",
            partial(visible, opened=opened, made=LastResource), LATENCY_UNITS, (Bound("p99", 5, "ms", at_least=False),),
        ),
    )  # fmt: skip


ROWS = (*_rows("", "SQLite", sqlite, {1: 30}), *_rows("-mariadb", "MariaDB", mariadb, {1: 60, 8: 35}))
