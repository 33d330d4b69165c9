"""The Python client in bulk: ``send_many``, and reading messages and raw batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.model import Bound, Measure, Row, Surroundings
from txmq.testing.bench import loads
from txmq.testing.bench.limits import LOOPBACK_BYTES, SYNCED_ECHO
from txmq.testing.bench.model import LATENCY_UNITS, Target, client_with_topic
from txmq.testing.processes.broker import BrokerProcess

TOPIC, PARTITIONS = "bench", 4
VALUE, LARGE_VALUE = b"x" * 100, b"x" * 1000


@contextmanager
def _send_many(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(500_000)
    with BrokerProcess(surroundings.directory / "data") as broker, loads.send_many(Target(broker.address)) as run:
        run(count // 10)
        yield lambda: run(count)


@contextmanager
def _consume(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(1_000_000)
    with BrokerProcess(surroundings.directory / "data") as broker, loads.consume(Target(broker.address)) as run:
        run(count // 10)
        yield lambda: run(count)


@contextmanager
def _consume_large(surroundings: Surroundings) -> Iterator[Measure]:
    """Each value looked at, and so made."""
    count = surroundings.count(300_000)
    with (
        BrokerProcess(surroundings.directory / "data") as broker,
        client_with_topic(Target(broker.address, TOPIC, partitions=PARTITIONS)) as client,
        client.producer(timeout=60) as producer,
    ):
        for first in range(0, count, loads.PER_CALL):
            producer.send_many(TOPIC, loads.pairs_of(min(loads.PER_CALL, count - first), LARGE_VALUE))

        def measure() -> dict[str, float]:
            started = time.perf_counter()
            size_bytes = sum(len(message.value or b"") for message in client.browse(TOPIC))
            return {"rate": size_bytes / (time.perf_counter() - started) / 1e6}

        measure()
        yield measure


@contextmanager
def _delivery(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(1000)
    with (
        BrokerProcess(surroundings.directory / "data", settings={"sync": "interval"}) as broker,
        loads.delivery(Target(broker.address)) as run,
    ):
        run(count // 10)
        yield lambda: run(count)


ROWS = (
    Row(
        "send-many", "send_many, 100 B with key, acknowledged after the sync", _send_many, {"rate": "msg/s"},
        (Bound("rate", 500_000, "msg/s"),),
    ),
    Row(
        "consume", "read 100 B messages, one process", _consume, {"rate": "msg/s", "raw": "GB/s"},
        (Bound("rate", 700_000, "msg/s"), Bound("raw", 1, "GB/s")), (LOOPBACK_BYTES,),
    ),
    Row(
        "consume-1k", "read 1 KB messages, one process, each value looked at", _consume_large, {"rate": "MB/s"},
        (Bound("rate", 500, "MB/s"),), (LOOPBACK_BYTES,),
    ),
    Row(
        "delivery-sync-interval", "from send to a reader that waits, sync interval", _delivery,
        {"rate": "msg/s"} | LATENCY_UNITS, (Bound("p50", 2, "ms", at_least=False),), (SYNCED_ECHO,),
    ),
)  # fmt: skip
