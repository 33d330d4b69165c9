"""The loads of ``txmq.aio``: many tasks of one loop (uvloop), each of which waits for its call before the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from txmq.errors import ConfigError
from txmq.testing.bench.limits import SYNC
from txmq.testing.bench.model import LATENCY_UNITS, Load, Run, Target, client_with_topic, latencies
from txmq.testing.bench.timing import in_tasks

if TYPE_CHECKING:
    import txmq.aio


class AioSide:
    """A client and a producer on a loop of their own, which runs while something is measured."""

    def __init__(self, runner: asyncio.Runner, client: txmq.aio.Client) -> None:
        self.runner, self.client = runner, client
        self.producer = client.producer(timeout=60)


@contextmanager
def aio_side(address: str) -> Iterator[AioSide]:
    """Connect to a broker.

    Raises:
        ConfigError: greenlet is not installed.
    """
    try:
        import txmq.aio
    except ImportError as error:
        raise ConfigError(str(error)) from error
    with asyncio.Runner(loop_factory=new_loop()) as runner:
        client = runner.run(txmq.aio.connect(address, timeout=30))
        try:
            yield AioSide(runner, client)
        finally:
            runner.run(client.close())


def new_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes uvloop's, if that is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


@contextmanager
def aio_send(target: Target) -> Iterator[Run]:
    """Each task publishes one message at a time."""
    with client_with_topic(target), aio_side(target.address) as side:
        producer, topic, value = side.producer, target.topic, target.value

        async def work() -> None:
            await producer.send(topic, value, key=b"key")

        def run(count: int) -> dict[str, float]:
            rate, taken = side.runner.run(in_tasks(work, target.threads, count))
            return {"rate": rate} | latencies(taken)

        yield run


@contextmanager
def aio_tx(target: Target) -> Iterator[Run]:
    """Transactions of one message."""
    with client_with_topic(target), aio_side(target.address) as side:
        producer, topic, value = side.producer, target.topic, target.value

        async def work() -> None:
            async with producer.transaction():
                await producer.send(topic, value, key=b"key")

        def run(count: int) -> dict[str, float]:
            rate, taken = side.runner.run(in_tasks(work, target.threads, count))
            return {"rate": rate} | latencies(taken)

        yield run


AIO_LOADS: tuple[Load, ...] = (
    Load("aio-send", "one send at a time by each of many tasks", aio_send, {"rate": "msg/s"} | LATENCY_UNITS,
         (SYNC,), 2000),
    Load("aio-tx", "transactions of one message by many tasks", aio_tx, {"rate": "tx/s"} | LATENCY_UNITS,
         (SYNC,), 640),
)  # fmt: skip
