"""The ordered producer against the plain one while the partition is up, and its spool: filling and draining."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import txmq
from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.client import PARTITIONS, TOPIC, VALUE
from txmq.testing.bench.limits import SYNC
from txmq.testing.bench.loads import pairs_of
from txmq.testing.bench.timing import in_threads
from txmq.testing.processes.broker import BrokerProcess

THREADS = 64
ROUNDS = 4  # the two take turns: what else the machine does then befalls both
KEYS = [b"key-%d" % number for number in range(64)]
Either = txmq.Producer | txmq.OrderedMessageProducer


@contextmanager
def _beside(surroundings: Surroundings) -> Iterator[Measure]:
    singles, threaded, asynchronous = (surroundings.count(full) for full in (2000, 20_000, 50_000))
    with (
        BrokerProcess(surroundings.directory / "data") as broker,
        txmq.connect(broker.address, timeout=60) as client,
        client.producer(timeout=60) as plain,
        client.ordered_producer(
            txmq.KeyHashSelector(), str(surroundings.directory / "spool"), options=txmq.OrderedOptions(timeout=60)
        ) as ordered,
    ):
        client.topics.create(TOPIC, partitions=PARTITIONS)

        def measure() -> dict[str, float]:
            rates: dict[str, dict[str, float]] = {"plain": {}, "ordered": {}}
            for _ in range(ROUNDS):
                for name, producer in (("plain", plain), ("ordered", ordered)):
                    found = rates[name]
                    for work, seconds in (
                        ("send", singles / _rate(producer, 1, singles)),
                        (f"send, {THREADS} thr", threaded / _rate(producer, THREADS, threaded)),
                        ("send_async", _async_s(producer, asynchronous)),
                    ):
                        found[work] = found.get(work, 0.0) + seconds
            figures: dict[str, float] = {}
            for work, count in (("send", singles), (f"send, {THREADS} thr", threaded), ("send_async", asynchronous)):
                figures[f"{work}: share"] = 100 * rates["plain"][work] / rates["ordered"][work]
                figures[f"{work}: ordered"] = ROUNDS * count / rates["ordered"][work]
                figures[f"{work}: plain"] = ROUNDS * count / rates["plain"][work]
            return figures

        yield measure


def _rate(producer: Either, threads: int, count: int) -> float:
    numbers = iter(range(1 << 62))

    def work() -> None:
        producer.send(TOPIC, VALUE, KEYS[next(numbers) % len(KEYS)])

    return in_threads(lambda: work, threads, count)[0]


def _async_s(producer: Either, count: int) -> float:
    started = time.perf_counter()
    futures = [producer.send_async(TOPIC, VALUE, KEYS[number % len(KEYS)]) for number in range(count)]
    for future in futures:
        if not future.result().is_success:
            raise AssertionError("a message was not sent")
    return time.perf_counter() - started


@contextmanager
def _spool(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(20_000)
    options = txmq.OrderedOptions(timeout=60, partitions={TOPIC: PARTITIONS})
    with BrokerProcess(surroundings.directory / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create(TOPIC, partitions=PARTITIONS)
        with (
            txmq.connect(broker.address, timeout=60) as client,
            client.ordered_producer(
                txmq.KeyHashSelector(), str(surroundings.directory / "spool"), options=options
            ) as ordered,
        ):

            def measure() -> dict[str, float]:
                for key, value in pairs_of(PARTITIONS, VALUE):
                    ordered.send(TOPIC, value, key)
                broker.kill()
                spooling = _rate(ordered, THREADS, count)
                waiting = ordered.spooled
                broker.start()
                started = time.perf_counter()
                ordered.flush(timeout=600)
                return {"spool": spooling, "drain": waiting / (time.perf_counter() - started)}

            yield measure


def _units() -> dict[str, str]:
    works = ("send", f"send, {THREADS} thr", "send_async")
    figures = (("share", "%"), ("ordered", "msg/s"), ("plain", "msg/s"))
    return {f"{work}: {figure}": unit for work in works for figure, unit in figures}


ROWS = (
    Row(
        "ordered", "ordered producer against the plain one, its partitions up", _beside, _units(),
        tuple(Bound(figure, 90, "%") for figure in _units() if figure.endswith("share")),
    ),
    Row(
        "spool", f"spool of an ordered producer: filled by {THREADS} threads, then drained", _spool,
        {"spool": "msg/s", "drain": "msg/s"}, (), (SYNC,),
    ),
)  # fmt: skip
