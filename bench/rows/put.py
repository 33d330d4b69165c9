"""Puts by the raw generator: pipelined, and one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from bench.model import Bound, Measure, Row, Surroundings
from txmq.testing.bench import loads
from txmq.testing.bench.limits import ECHO, LOOPBACK_MESSAGES, SYNCED_ECHO, cpu_seconds
from txmq.testing.bench.model import LATENCY_UNITS, Target
from txmq.testing.processes.broker import BrokerProcess

MESSAGE_SIZE_BYTES, VALUE_SIZE_BYTES = (
    200,
    130,
)  # of the batch on the wire, its 61 bytes of header included; of the value
OUTSTANDING = 2048
_LABELS = {"always": "on", "interval": "interval"}


@contextmanager
def _pipelined(surroundings: Surroundings, *, sync: str) -> Iterator[Measure]:
    count = surroundings.count(300_000)
    with BrokerProcess(surroundings.directory / "data", settings={"sync": sync}) as broker:
        target = Target(broker.address, size_bytes=VALUE_SIZE_BYTES, outstanding=OUTSTANDING)
        with loads.put_pipelined(target) as run:
            run(count // 10)  # files and caches are there

            def measure() -> dict[str, float]:
                used_s = cpu_seconds(broker.pid)
                return {**run(count), "broker CPU": (cpu_seconds(broker.pid) - used_s) / count * 1e6}

            yield measure


@contextmanager
def _one_at_a_time(surroundings: Surroundings, *, sync: str) -> Iterator[Measure]:
    count = surroundings.count(5000)
    with (
        BrokerProcess(surroundings.directory / "data", settings={"sync": sync}) as broker,
        loads.put_single(Target(broker.address, size_bytes=VALUE_SIZE_BYTES)) as run,
    ):
        run(count // 10)
        yield lambda: run(count)


def _row_pipelined(sync: str, limit: float) -> Row:
    return Row(
        f"put-pipelined-sync-{_LABELS[sync]}",
        f"pipelined put, {MESSAGE_SIZE_BYTES} B, one a batch, {OUTSTANDING} outstanding, sync {_LABELS[sync]}",
        partial(_pipelined, sync=sync),
        {"rate": "msg/s", "broker CPU": "us/msg"},
        (Bound("rate", limit, "msg/s"),),
        (LOOPBACK_MESSAGES,),
    )


def _row_single(sync: str, limit_ms: float, bare: str) -> Row:
    return Row(
        f"put-single-sync-{_LABELS[sync]}",
        f"one put at a time, {MESSAGE_SIZE_BYTES} B, sync {_LABELS[sync]}",
        partial(_one_at_a_time, sync=sync),
        LATENCY_UNITS,
        (Bound("p50", limit_ms, "ms", at_least=False, best=lambda limits, _: limits[bare]),),
        (bare,),
    )


ROWS = (
    _row_pipelined("interval", 170_000),
    _row_pipelined("always", 100_000),
    _row_single("interval", 0.07, ECHO),
    _row_single("always", 0.15, SYNCED_ECHO),
)
