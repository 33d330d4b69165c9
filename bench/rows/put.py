"""Puts by the raw generator: pipelined, and one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from bench.model import Bound, Measure, Row, Surroundings
from txmq.testing.bench.limits import cpu_seconds
from txmq.testing.bench.raw import RawConnection, message_of, percentile, put_requests
from txmq.testing.broker_process import BrokerProcess

MESSAGE_SIZE_BYTES = 200  # of the batch on the wire, its 61 bytes of header included
OUTSTANDING, PER_CHUNK, PARTITIONS = 2048, 256, 4
TOPIC = "bench"


@contextmanager
def _connected(surroundings: Surroundings, sync: str) -> Iterator[tuple[BrokerProcess, RawConnection]]:
    with (
        BrokerProcess(surroundings.directory / "data", settings={"sync": sync}) as broker,
        RawConnection(broker.host, broker.port) as connection,
    ):
        connection.create_topic(TOPIC, PARTITIONS)
        yield broker, connection


@contextmanager
def _pipelined(surroundings: Surroundings, *, sync: str) -> Iterator[Measure]:
    batch = message_of(MESSAGE_SIZE_BYTES)
    chunks = put_requests(TOPIC, batch, surroundings.count(300_000), PARTITIONS, PER_CHUNK)
    total = sum(count for _, count in chunks)
    with _connected(surroundings, sync) as (broker, connection):
        connection.pipeline(chunks[: len(chunks) // 10], OUTSTANDING)  # files and caches are there

        def measure() -> dict[str, float]:
            used_s = cpu_seconds(broker.pid)
            took_s = connection.pipeline(chunks, OUTSTANDING)
            return {"rate": total / took_s, "broker CPU": (cpu_seconds(broker.pid) - used_s) / total * 1e6}

        yield measure


@contextmanager
def _one_at_a_time(surroundings: Surroundings, *, sync: str) -> Iterator[Measure]:
    (request, _), *_ = put_requests(TOPIC, message_of(MESSAGE_SIZE_BYTES), 1, 1, 1)
    count = surroundings.count(5000)
    with _connected(surroundings, sync) as (_, connection):
        connection.one_by_one(request, count // 10)

        def measure() -> dict[str, float]:
            taken = connection.one_by_one(request, count)
            return {"p50": percentile(taken, 50) * 1000, "p99": percentile(taken, 99) * 1000}

        yield measure


def _row_pipelined(sync: str, limit: float) -> Row:
    label = {"always": "on", "interval": "interval"}[sync]
    return Row(
        f"put-pipelined-sync-{label}",
        f"pipelined put, 200 B, one a batch, {OUTSTANDING} outstanding, sync {label}",
        partial(_pipelined, sync=sync),
        {"rate": "msg/s", "broker CPU": "us/msg"},
        (Bound("rate", limit, "msg/s"),),
        ("loopback of 261 B a message/s",),
    )


def _row_single(sync: str, limit_ms: float, bare: str) -> Row:
    label = {"always": "on", "interval": "interval"}[sync]
    return Row(
        f"put-single-sync-{label}",
        f"one put at a time, 200 B, sync {label}",
        partial(_one_at_a_time, sync=sync),
        {"p50": "ms", "p99": "ms"},
        (Bound("p50", limit_ms, "ms", at_least=False),),
        (bare,),
    )


ROWS = (
    _row_pipelined("interval", 170_000),
    _row_pipelined("always", 100_000),
    _row_single("interval", 0.07, "echo p50 ms"),
    _row_single("always", 0.15, "echo after a sync p50 ms"),
)
