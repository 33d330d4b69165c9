"""A backlog of 20 million unread messages: does it cost anything but disk? And how fast is it caught up with?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import txmq
from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.client import PARTITIONS, TOPIC, VALUE
from bench.rows.process import IDLE_S, logged_seconds
from txmq.testing.bench.limits import rss_mib
from txmq.testing.bench.loads import pairs_of, read_raw
from txmq.testing.bench.raw import RawConnection, message_of, percentile, put_requests
from txmq.testing.processes.broker import BrokerProcess

MESSAGES, PER_CALL, DECODED_MAX = 20_000_000, 500_000, 4_000_000
PUTS, SIDE_TOPIC = 3000, "side"


def _state(broker: BrokerProcess, when: str) -> dict[str, float]:
    """Put latency of another topic, then a clean restart, and memory after it."""
    (request, _), *_ = put_requests(SIDE_TOPIC, message_of(200), 1, (0,), 1)
    with RawConnection(broker.host, broker.port) as connection:
        taken = connection.one_by_one(request, PUTS)
    broker.stop()
    broker.start()
    time.sleep(IDLE_S)
    return {
        f"put p50 {when}": percentile(taken, 50) * 1000,
        f"restart {when}": logged_seconds(broker),
        f"RSS {when}": rss_mib(broker.pid),
    }


def _load(address: str, count: int) -> float:
    """Fill the topic; messages a second."""
    pairs = pairs_of(min(PER_CALL, count), VALUE)
    with txmq.connect(address) as client, client.producer(timeout=60) as producer:
        started = time.perf_counter()
        for _ in range(count // len(pairs)):
            producer.send_many(TOPIC, pairs)
        return count / (time.perf_counter() - started)


def _catch_up(address: str) -> dict[str, float]:
    with txmq.connect(address) as client:
        started = time.perf_counter()
        decoded = sum(1 for _ in islice(client.browse(TOPIC), DECODED_MAX))
        decoded_s = time.perf_counter() - started
        started = time.perf_counter()
        size = read_raw(client, TOPIC, PARTITIONS)
        return {"catch-up": decoded / decoded_s, "catch-up raw": size / (time.perf_counter() - started) / 1e9}


@contextmanager
def _backlog(surroundings: Surroundings) -> Iterator[Measure]:
    with BrokerProcess(surroundings.directory / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create(TOPIC, partitions=PARTITIONS)
            client.topics.create(SIDE_TOPIC)

        def measure() -> dict[str, float]:
            figures = _state(broker, "before")
            figures["loading"] = _load(broker.address, surroundings.count(MESSAGES))
            broker.kill()
            broker.start()
            figures["restart after kill"] = logged_seconds(broker)
            figures |= _state(broker, "after") | _catch_up(broker.address)
            figures["put p50 growth"] = figures["put p50 after"] / figures["put p50 before"]
            figures["RSS growth"] = figures["RSS after"] - figures["RSS before"]
            return figures

        yield measure


ROWS = (
    Row(
        "backlog", f"backlog of {MESSAGES // 1_000_000} million messages (a tenth with --quick)", _backlog,
        {
            "put p50 before": "ms", "put p50 after": "ms", "put p50 growth": "times",
            "RSS before": "MiB", "RSS after": "MiB", "RSS growth": "MiB",
            "restart before": "s", "restart after": "s", "restart after kill": "s",
            "loading": "msg/s", "catch-up": "msg/s", "catch-up raw": "GB/s",
        },
        (
            Bound("put p50 growth", 1.2, "times", at_least=False),
            Bound("RSS growth", 10, "MiB", at_least=False),
            Bound("restart after", 0.5, "s", at_least=False),
        ),
        repeats=1,
    ),
)  # fmt: skip
