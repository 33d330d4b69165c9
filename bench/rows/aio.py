"""``txmq.aio``: 64 tasks of one loop, each with one call at a time, against 64 threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.databases import ORDER, VALUE, Open, mariadb, sqlite
from bench.rows.groups import GROUP_BOUNDS, PER_POLL
from bench.rows.last_resource import PARTITIONS, TOPIC, row_and_message
from txmq.testing.bench import loads
from txmq.testing.bench.limits import LOOPBACK_BYTES, SYNC
from txmq.testing.bench.model import LATENCY_UNITS, Figures, Target, client_with_topic, latencies
from txmq.testing.bench.timing import in_tasks, in_threads
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource

if TYPE_CHECKING:
    import txmq.aio

CALLERS = 64
READ_TOPIC = "read"
_BESIDE = {"tasks": "/s"} | LATENCY_UNITS | {"threads": "/s"}


@contextmanager
def _send(surroundings: Surroundings, *, sync: str) -> Iterator[Measure]:
    """Publishing by tasks, then by threads of the same process."""
    sends = surroundings.count(80_000)
    with (
        BrokerProcess(surroundings.directory / "data", settings={"sync": sync}) as broker,
        loads.aio_send(Target(broker.address, threads=CALLERS)) as tasks,
        loads.send_threads(Target(broker.address, "threads", threads=CALLERS)) as threads,
    ):
        tasks(sends // 10)
        yield lambda: _beside(tasks(sends), threads(sends // 4))


@contextmanager
def _transactions(surroundings: Surroundings) -> Iterator[Measure]:
    wanted = surroundings.count(40_000)
    with (
        BrokerProcess(surroundings.directory / "data") as broker,
        loads.aio_tx(Target(broker.address, threads=CALLERS)) as tasks,
        loads.tx_threads(Target(broker.address, "threads", threads=CALLERS)) as threads,
    ):
        tasks(wanted // 10)
        yield lambda: _beside(tasks(wanted), threads(wanted // 2))


@contextmanager
def _consume(surroundings: Surroundings) -> Iterator[Measure]:
    """Through a group, each message acknowledged, all offsets saved at the end."""
    wanted, numbers = surroundings.count(500_000), count()
    with (
        BrokerProcess(surroundings.directory / "data") as broker,
        client_with_topic(Target(broker.address, READ_TOPIC)) as client,
        client.producer(timeout=60) as producer,
        loads.aio_side(broker.address) as side,
    ):
        for _ in range(-(-wanted // loads.PER_CALL)):
            producer.send_many(READ_TOPIC, loads.pairs_of(min(wanted, loads.PER_CALL), VALUE))

        async def read(way: Callable[[txmq.aio.Consumer, int], Awaitable[None]]) -> float:
            started = time.perf_counter()
            group = f"group-{next(numbers)}"
            async with await side.client.consumer(group, [READ_TOPIC], start="earliest") as consumer:
                await way(consumer, wanted)
            return wanted / (time.perf_counter() - started)

        yield lambda: {name: side.runner.run(read(way)) for name, way in _WAYS.items()}


async def _poll(consumer: txmq.aio.Consumer, wanted: int) -> None:
    seen = 0
    while seen < wanted:
        messages = await consumer.poll(PER_POLL)
        for message in messages:
            await message.ack()
        seen += len(messages)


async def _iterate(consumer: txmq.aio.Consumer, wanted: int) -> None:
    seen = 0
    async for message in consumer:
        await message.ack()
        seen += 1
        if seen == wanted:
            return


async def _run(consumer: txmq.aio.Consumer, wanted: int) -> None:
    seen = 0

    async def handle(_: txmq.aio.Message) -> None:
        nonlocal seen
        seen += 1
        if seen == wanted:
            await consumer.close()

    await consumer.run(handle)


_WAYS = {"poll": _poll, "async for": _iterate, "run": _run}


def _beside(tasks: Figures, threads: Figures) -> Figures:
    return {"tasks": tasks["rate"], **{name: tasks[name] for name in LATENCY_UNITS}, "threads": threads["rate"]}


@contextmanager
def _rows_and_messages(surroundings: Surroundings, *, opened: Open) -> Iterator[Measure]:
    """A row and a message in one transaction, the database as last resource."""
    orders = surroundings.count(4000)
    with (
        opened(surroundings.directory) as database,
        BrokerProcess(surroundings.directory / "data") as broker,
        client_with_topic(Target(broker.address, TOPIC, partitions=PARTITIONS)) as client,
        client.producer() as producer,
        loads.aio_side(broker.address) as side,
    ):
        resource, insert = LastResource("orders", connect=database.connect), database.sql(ORDER)
        resource.install(client)

        async def order() -> None:
            async with side.producer.transaction(resource) as tx:
                await tx.connection(resource).execute(insert, (VALUE,))
                await side.producer.send(TOPIC, VALUE, key=b"key")

        def measure() -> dict[str, float]:
            rate, taken = side.runner.run(in_tasks(order, CALLERS, orders))
            make = partial(row_and_message, producer, resource, insert)
            # The loop goes on meanwhile: if it stood still, its client's resolver might hold SQLite's one lock.
            threads, _ = side.runner.run(asyncio.to_thread(in_threads, make, CALLERS, orders))
            return {"tasks": rate} | latencies(taken) | {"threads": threads}

        measure()
        yield measure
        resource.close()


def _row(name: str, title: str, opened: Open) -> Row:
    work = partial(_rows_and_messages, opened=opened)
    return Row(name, f"row in {title} and message, {CALLERS} tasks, threads", work, _BESIDE, (), (SYNC,))


ROWS = (
    Row(
        "aio-send", f"one send at a time, {CALLERS} tasks, threads", partial(_send, sync="always"), _BESIDE,
        (Bound("tasks", 25_000, "msg/s"), Bound("threads", 12_000, "msg/s")), (SYNC,),
    ),
    Row(
        "aio-send-interval", f"the same, sync = interval, {CALLERS} tasks, threads", partial(_send, sync="interval"),
        _BESIDE, (Bound("tasks", 50_000, "msg/s"),),
    ),
    Row(
        "aio-tx", f"transactions of one message, {CALLERS} tasks, threads", _transactions, _BESIDE,
        (Bound("tasks", 20_000, "tx/s"),), (SYNC,),
    ),
    Row(
        "aio-consume-group", "read 100 B messages through a group in one task, each acknowledged", _consume,
        dict.fromkeys(_WAYS, "msg/s"), GROUP_BOUNDS, (LOOPBACK_BYTES,),
    ),
    _row("aio-last-resource", "SQLite", sqlite),
    _row("aio-last-resource-mariadb", "MariaDB", mariadb),
)  # fmt: skip
