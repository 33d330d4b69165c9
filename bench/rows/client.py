"""The Python client in bulk: ``send_many``, and reading messages and raw batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import txmq
from bench.model import Bound, Measure, Row, Surroundings
from txmq.testing.broker_process import BrokerProcess

TOPIC, PARTITIONS = "bench", 4
VALUE = b"x" * 100
FETCH_SIZE_BYTES = 1 << 20


def pairs_of(count: int) -> list[tuple[bytes | None, bytes]]:
    """Messages of 100 B, each under a key of its own."""
    return [(b"key-%d" % number, VALUE) for number in range(count)]


@contextmanager
def _connected(surroundings: Surroundings) -> Iterator[tuple[txmq.Client, txmq.Producer]]:
    with (
        BrokerProcess(surroundings.directory / "data") as broker,
        txmq.connect(broker.address) as client,
        client.producer(timeout=60) as producer,
    ):
        client.topics.create(TOPIC, partitions=PARTITIONS)
        yield client, producer


@contextmanager
def _send_many(surroundings: Surroundings) -> Iterator[Measure]:
    pairs = pairs_of(surroundings.count(500_000))
    with _connected(surroundings) as (_, producer):
        producer.send_many(TOPIC, pairs[: len(pairs) // 10])

        def measure() -> dict[str, float]:
            started = time.perf_counter()
            producer.send_many(TOPIC, pairs)
            return {"rate": len(pairs) / (time.perf_counter() - started)}

        yield measure


@contextmanager
def _consume(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(1_000_000)
    with _connected(surroundings) as (client, producer):
        for _ in range(10):
            producer.send_many(TOPIC, pairs_of(count // 10))

        def measure() -> dict[str, float]:
            started = time.perf_counter()
            messages = sum(1 for _ in client.browse(TOPIC))
            decoded_s = time.perf_counter() - started
            if messages != count // 10 * 10:
                raise AssertionError(f"{messages} messages read, {count} sent")
            started = time.perf_counter()
            size = read_raw(client)
            raw_s = time.perf_counter() - started
            return {"decoded": messages / decoded_s, "raw": size / raw_s / 1e9}

        yield measure


def read_raw(client: txmq.Client) -> int:
    """Read every partition as raw batches to its end; how many bytes."""
    size = 0
    for partition in range(PARTITIONS):
        held = client.offsets(TOPIC, partition)
        offset = held.start
        while offset < held.end:
            content = client.fetch_raw(TOPIC, partition, offset, max_bytes=FETCH_SIZE_BYTES)
            size += len(content)
            offset = end_of(content)
    return size


def end_of(content: bytes) -> int:
    """The offset behind the last batch: lengths are hopped over, nothing else is looked at."""
    position = last = 0
    while position < len(content):
        last = position
        position += 12 + int.from_bytes(content[position + 8 : position + 12], "big")
    count = int.from_bytes(content[last + 57 : last + 61], "big")
    return int.from_bytes(content[last : last + 8], "big") + count


ROWS = (
    Row(
        "send-many", "send_many, 100 B with key, acknowledged after the sync", _send_many, {"rate": "msg/s"},
        (Bound("rate", 500_000, "msg/s"),),
    ),
    Row(
        "consume", "read 100 B messages, one process", _consume, {"decoded": "msg/s", "raw": "GB/s"},
        (Bound("decoded", 700_000, "msg/s"), Bound("raw", 1, "GB/s")), ("loopback bytes/s",),
    ),
)  # fmt: skip
