"""NATS JetStream and RabbitMQ in the same run, from Python as txmq is: one publish at a time, in flight, transactions.

Brokers differ in how far a message is on its way to the disk when they acknowledge it: the titles say it,
docs/benchmarks.md says how it was counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.model import Measure, Row, Surroundings
from bench.peers.processes import nats, rabbitmq
from txmq.testing.bench.model import LATENCY_UNITS, latencies
from txmq.testing.bench.timing import timed

VALUE = b"x" * 100
IN_FLIGHT = 512
_SUBJECT, _QUEUE = "bench.orders", "bench"
_TIMEOUT_S = 60.0


# --- NATS ------------------------------------------------------------------------------------------------------------


async def _with_stream(port: int, work: Callable[[Any], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """Do it with a JetStream context and a stream on disk."""
    import nats as client
    from nats.js.api import StorageType, StreamConfig

    connection = await client.connect(f"nats://127.0.0.1:{port}")
    try:
        stream = connection.jetstream(timeout=_TIMEOUT_S)
        await stream.add_stream(StreamConfig(name="bench", subjects=["bench.*"], storage=StorageType.FILE))
        try:
            return await work(stream)
        finally:
            await stream.delete_stream("bench")
    finally:
        await connection.close()


async def _nats_single(count: int, stream: Any) -> dict[str, float]:
    clock, taken = time.perf_counter, []
    for _ in range(count):
        started = clock()
        await stream.publish(_SUBJECT, VALUE)
        taken.append(clock() - started)
    return {"rate": count / sum(taken)} | latencies(sorted(taken))


async def _nats_in_flight(count: int, stream: Any) -> dict[str, float]:
    """Tasks that wait for their turn; the client's ``publish_async`` is slower."""
    turn = asyncio.Semaphore(IN_FLIGHT)

    async def publish() -> None:
        async with turn:
            await stream.publish(_SUBJECT, VALUE)

    started = time.perf_counter()
    await asyncio.gather(*(publish() for _ in range(count)))
    return {"rate": count / (time.perf_counter() - started)}


@contextmanager
def _nats(surroundings: Surroundings, *, work: Any, full: int, sync_always: bool = False) -> Iterator[Measure]:
    count = surroundings.count(full)
    with nats(surroundings.directory, sync_always=sync_always) as port:
        yield lambda: asyncio.run(_with_stream(port, partial(work, count)))


# --- RabbitMQ --------------------------------------------------------------------------------------------------------


def _parameters(port: int) -> Any:
    import pika

    return pika.ConnectionParameters("127.0.0.1", port, heartbeat=0)


def _persistent() -> Any:
    import pika

    return pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)


@contextmanager
def _rabbit_confirm(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(3000)
    with rabbitmq(surroundings.directory) as port, _channel(port, "quorum") as channel:
        channel.confirm_delivery()
        yield lambda: _timed_publishes(count, partial(_publish, channel))


@contextmanager
def _rabbit_tx(surroundings: Surroundings) -> Iterator[Measure]:
    """Quorum queues take part in no transaction; a classic durable queue does."""
    count = surroundings.count(3000)
    with rabbitmq(surroundings.directory) as port, _channel(port, "classic") as channel:
        channel.tx_select()

        def work() -> None:
            _publish(channel)
            channel.tx_commit()

        yield lambda: _timed_publishes(count, work)


@contextmanager
def _channel(port: int, kind: str) -> Iterator[Any]:
    import pika

    with pika.BlockingConnection(_parameters(port)) as connection:
        channel = connection.channel()
        channel.queue_declare(_QUEUE, durable=True, arguments={"x-queue-type": kind})
        yield channel


def _publish(channel: Any) -> None:
    channel.basic_publish("", _QUEUE, VALUE, _persistent(), mandatory=True)


def _timed_publishes(count: int, work: Callable[[], None]) -> dict[str, float]:
    timed(work, count // 10)
    taken = timed(work, count)
    return {"rate": count / sum(taken)} | latencies(taken)


class _Confirmed:
    """Publishes on a connection of callbacks, keeping ``IN_FLIGHT`` unconfirmed, until all are confirmed."""

    def __init__(self, port: int, count: int) -> None:
        import pika

        self._count, self._sent, self._confirmed, self._refused = count, 0, 0, 0
        self._started, self.seconds = 0.0, 0.0
        self._properties = _persistent()
        self._connection = pika.SelectConnection(_parameters(port), on_open_callback=self._opened)
        self._channel: Any = None

    def run(self) -> float:
        """How many a second."""
        self._connection.ioloop.start()
        if self._refused or self._confirmed < self._count:
            raise AssertionError(f"{self._confirmed} of {self._count} confirmed, {self._refused} refused")
        return self._count / self.seconds

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._declare)

    def _declare(self, channel: Any) -> None:
        self._channel = channel
        arguments = {"x-queue-type": "quorum"}
        channel.queue_declare(_QUEUE, durable=True, arguments=arguments, callback=self._declared)

    def _declared(self, _frame: Any) -> None:
        self._channel.confirm_delivery(self._answered, callback=self._begin)

    def _begin(self, _frame: Any) -> None:
        self._started = time.perf_counter()
        self._fill()

    def _fill(self) -> None:
        while self._sent < self._count and self._sent - self._confirmed < IN_FLIGHT:
            self._channel.basic_publish("", _QUEUE, VALUE, self._properties)
            self._sent += 1

    def _answered(self, frame: Any) -> None:
        """A confirm may stand for all before it."""
        self._refused += frame.method.NAME != "Basic.Ack"
        self._confirmed = frame.method.delivery_tag if frame.method.multiple else self._confirmed + 1
        if self._confirmed < self._count:
            self._fill()
            return
        self.seconds = time.perf_counter() - self._started
        self._connection.close()
        self._connection.ioloop.stop()


@contextmanager
def _rabbit_in_flight(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(20_000)
    with rabbitmq(surroundings.directory) as port:
        _Confirmed(port, max(1, count // 10)).run()
        yield lambda: {"rate": _Confirmed(port, count).run()}


_SINGLE = {"rate": "msg/s"} | LATENCY_UNITS
ROWS = (
    Row("peer-nats", "peer: NATS JetStream, one publish at a time (not synced)",
        partial(_nats, work=_nats_single, full=5000), _SINGLE, repeats=3),
    Row("peer-nats-in-flight", f"peer: NATS JetStream, {IN_FLIGHT} in flight (not synced)",
        partial(_nats, work=_nats_in_flight, full=20_000), {"rate": "msg/s"}, repeats=3),
    Row("peer-nats-sync", "peer: NATS JetStream, one at a time, sync_interval: always",
        partial(_nats, work=_nats_single, full=3000, sync_always=True), _SINGLE, repeats=3),
    Row("peer-rabbitmq", "peer: RabbitMQ quorum queue, one confirmed publish at a time (synced)",
        _rabbit_confirm, _SINGLE, repeats=3),
    Row("peer-rabbitmq-in-flight", f"peer: RabbitMQ quorum queue, {IN_FLIGHT} unconfirmed (synced)",
        _rabbit_in_flight, {"rate": "msg/s"}, repeats=3),
    Row("peer-rabbitmq-tx", "peer: RabbitMQ classic durable queue, tx.commit of one message (synced)",
        _rabbit_tx, {"rate": "tx/s"} | LATENCY_UNITS, repeats=3),
)  # fmt: skip
