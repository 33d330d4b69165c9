"""The broker as a process: restart with a journal tail, memory while idle."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.client import PARTITIONS, TOPIC
from bench.rows.put import OUTSTANDING
from txmq.testing.bench.limits import rss_mib
from txmq.testing.bench.loads import PER_CHUNK
from txmq.testing.bench.raw import RawConnection, message_of, put_requests
from txmq.testing.processes.broker import BrokerProcess

TAIL_SIZE_BYTES = 64 << 20
IDLE_S = 0.5  # the mark, the next journal file and the ballast are made by then


def logged_seconds(broker: BrokerProcess) -> float:
    """How long the last recovery took, from the broker's log."""
    lines = [json.loads(line) for line in broker.logs().splitlines() if line.startswith("{")]
    return float([line["seconds"] for line in lines if line.get("event") == "recovered"][-1])


@contextmanager
def _restart(surroundings: Surroundings) -> Iterator[Measure]:
    """Killed with a tail that no checkpoint covers; a checkpoint is off until then, so every measure redoes it all."""
    settings = {"checkpoint_interval_bytes": 1 << 34, "checkpoint_interval_ms": 86_400_000}
    batch = message_of(200)
    chunks = put_requests(TOPIC, batch, surroundings.count(TAIL_SIZE_BYTES // 200), range(PARTITIONS), PER_CHUNK)
    with BrokerProcess(surroundings.directory / "data", settings=settings) as broker:
        with RawConnection(broker.host, broker.port) as connection:
            connection.create_topic(TOPIC, PARTITIONS)
            connection.pipeline(chunks, OUTSTANDING)

        def measure() -> dict[str, float]:
            broker.kill()
            started = time.perf_counter()
            broker.start()
            return {"recovery": logged_seconds(broker), "until it serves": time.perf_counter() - started}

        yield measure


@contextmanager
def _idle(surroundings: Surroundings) -> Iterator[Measure]:
    number = iter(range(1000))

    def measure() -> dict[str, float]:
        with BrokerProcess(surroundings.directory / f"data-{next(number)}") as broker:
            time.sleep(IDLE_S)
            return {"rss": rss_mib(broker.pid)}

    yield measure


ROWS = (
    Row(
        "restart",
        "restart with a 64 MiB journal tail of 200 B messages",
        _restart,
        {"recovery": "s", "until it serves": "s"},
        (Bound("recovery", 0.5, "s", at_least=False),),
    ),
    Row("idle-rss", "idle broker", _idle, {"rss": "MiB"}, (Bound("rss", 80, "MiB", at_least=False),)),
)
