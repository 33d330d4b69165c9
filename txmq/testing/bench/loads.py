"""The loads: puts by a raw generator, the Python client in bulk, reading, local transactions, delivery; an event loop.

Theory of operation. Two kinds of client: the raw generator (``raw.py``) costs next to nothing and shows the broker and
the disk; the Python client shows what an application gets, client and broker sharing this machine's cores. Latencies
are of one caller that waits for each answer, unless the title says otherwise. The loads of ``txmq.aio`` are many tasks
of one loop (uvloop), each of which waits for its call before the next one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import txmq
from txmq.errors import ConfigError, TxmqError
from txmq.testing.bench.limits import LOOPBACK_BYTES, SYNC, SYNCED_ECHO
from txmq.testing.bench.model import LATENCY_UNITS, Load, Run, Target, client_with_topic, latencies
from txmq.testing.bench.raw import RawConnection, batch_of, put_requests
from txmq.testing.bench.timing import in_tasks, in_threads, timed

if TYPE_CHECKING:
    import txmq.aio
PER_CHUNK = 256  # requests in one write of the raw generator
PER_CALL = 100_000  # messages in one send_many: a list that an application would hold
OUTSTANDING_BYTES_MAX = 32 << 20  # more would only wait in the sockets
FETCH_SIZE_BYTES = 1 << 20
DELIVERY_WAIT_S = 10.0


# --- of an event loop -------------------------------------------------------------------------------------------------


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


# --- of threads -------------------------------------------------------------------------------------------------------


def pairs_of(count: int, value: bytes) -> list[tuple[bytes | None, bytes]]:
    """Messages under a key of their own each."""
    return [(b"key-%d" % number, value) for number in range(count)]


# --- the raw generator -----------------------------------------------------------------------------------------------


@contextmanager
def put_pipelined(target: Target) -> Iterator[Run]:
    """Puts of one message each, many outstanding."""
    batch = batch_of(target.size_bytes)
    outstanding = max(1, min(target.outstanding, OUTSTANDING_BYTES_MAX // target.size_bytes))
    per_chunk = max(1, min(PER_CHUNK, outstanding // 2))
    kept: dict[int, list[tuple[bytes, int]]] = {}
    with client_with_topic(target), RawConnection.to(target.address) as connection:

        def run(count: int) -> dict[str, float]:
            if count not in kept:
                kept.clear()  # the requests of one count only: they are as large as what they send
                kept[count] = put_requests(target.topic, batch, count, range(target.partitions), per_chunk)
            return {"rate": count / connection.pipeline(kept[count], outstanding)}

        yield run


@contextmanager
def put_single(target: Target) -> Iterator[Run]:
    """One put, its answer, the next."""
    [(request, _)] = put_requests(target.topic, batch_of(target.size_bytes), 1, (0,), 1)
    with client_with_topic(target), RawConnection.to(target.address) as connection:

        def run(count: int) -> dict[str, float]:
            taken = connection.one_by_one(request, count)
            return {"rate": count / sum(taken)} | latencies(taken)

        yield run


# --- the Python client -----------------------------------------------------------------------------------------------


@contextmanager
def send_many(target: Target) -> Iterator[Run]:
    """Lists of messages with keys; each call returns when all of them are acknowledged."""
    kept: dict[int, list[tuple[bytes | None, bytes]]] = {}
    with client_with_topic(target) as client, client.producer(timeout=60) as producer:

        def run(count: int) -> dict[str, float]:
            size = min(count, PER_CALL)
            pairs = kept.get(size) or kept.setdefault(size, pairs_of(size, target.value))
            calls = -(-count // size)
            started = time.perf_counter()
            for _ in range(calls):
                producer.send_many(target.topic, pairs)
            return {"rate": calls * size / (time.perf_counter() - started)}

        yield run


@contextmanager
def consume(target: Target) -> Iterator[Run]:
    """Read from the start: as messages, then as raw batches. Filled by ``send_many`` before the clock starts."""
    held = 0
    with client_with_topic(target) as client, client.producer(timeout=60) as producer:

        def run(count: int) -> dict[str, float]:
            nonlocal held
            while held < count:
                size = min(count - held, PER_CALL)
                producer.send_many(target.topic, pairs_of(size, target.value))
                held += size
            started = time.perf_counter()
            messages = sum(1 for _ in islice(client.browse(target.topic), count))
            decoded_s = time.perf_counter() - started
            if messages != count:
                raise TxmqError(f"{messages} messages read, {count} sent")
            started = time.perf_counter()
            size_bytes = read_raw(client, target.topic, target.partitions)
            return {"rate": messages / decoded_s, "raw": size_bytes / (time.perf_counter() - started) / 1e9}

        yield run


def read_raw(client: txmq.Client, topic: str, partitions: int) -> int:
    """Read every partition as raw batches to its end; how many bytes."""
    size = 0
    for partition in range(partitions):
        held = client.offsets(topic, partition)
        offset = held.start
        while offset < held.end:
            content = client.fetch_raw(topic, partition, offset, max_bytes=FETCH_SIZE_BYTES)
            size += len(content)
            offset = end_of(content)
    return size


def end_of(content: bytes) -> int:
    """The offset after the last batch: lengths are hopped over, nothing else is looked at."""
    position = last = 0
    while position < len(content):
        last = position
        position += 12 + int.from_bytes(content[position + 8 : position + 12], "big")
    count = int.from_bytes(content[last + 57 : last + 61], "big")
    return int.from_bytes(content[last : last + 8], "big") + count


@contextmanager
def delivery(target: Target) -> Iterator[Run]:
    """From before ``send`` to the message in the hands of a reader that waits for it in a long poll."""
    with client_with_topic(target) as client, client.producer(timeout=60) as producer:

        def run(count: int) -> dict[str, float]:
            started = time.perf_counter()
            taken = _deliver(client, producer, target, count)
            return {"rate": count / (time.perf_counter() - started)} | latencies(sorted(taken))

        yield run


def _deliver(client: txmq.Client, producer: txmq.Producer, target: Target, count: int) -> list[float]:
    start = client.offsets(target.topic, 0).end
    taken: list[float] = []
    arrived: queue.SimpleQueue[float] = queue.SimpleQueue()  # Ctrl-C within an Event leaves its lock held, or gone
    stop = False

    def read() -> None:
        offset = start
        while offset < start + count and not stop:
            messages = client.fetch(target.topic, 0, offset, timeout=1.0)
            if messages:
                arrived.put(time.perf_counter())
                offset += len(messages)

    reader = threading.Thread(target=read)
    try:
        reader.start()
        for _ in range(count):
            sent = time.perf_counter()
            producer.send(target.topic, target.value, partition=0)
            taken.append(arrived.get(timeout=DELIVERY_WAIT_S) - sent)
    except queue.Empty:
        raise TxmqError(f"a message sent did not reach its reader within {DELIVERY_WAIT_S:.0f} s") from None
    finally:
        stop = True
        if reader.ident is not None:
            reader.join()
    return taken


@contextmanager
def tx_local(target: Target) -> Iterator[Run]:
    """Transactions of one message, one thread."""
    with client_with_topic(target) as client, client.producer(timeout=60) as producer:

        def work() -> None:
            with producer.transaction():
                producer.send(target.topic, target.value, key=b"key")

        def run(count: int) -> dict[str, float]:
            taken = timed(work, count)
            return {"rate": count / sum(taken)} | latencies(taken)

        yield run


@contextmanager
def send_threads(target: Target) -> Iterator[Run]:
    """Each of many threads of this process publishes one message at a time."""
    with client_with_topic(target) as client, client.producer(timeout=60) as producer:

        def run(count: int) -> dict[str, float]:
            send = partial(producer.send, target.topic, target.value, key=b"key")
            rate, taken = in_threads(lambda: send, target.threads, count)
            return {"rate": rate} | latencies(taken)

        yield run


@contextmanager
def tx_threads(target: Target) -> Iterator[Run]:
    """Transactions of one message, many threads of this process."""
    with client_with_topic(target) as client, client.producer(timeout=60) as producer:

        def work() -> None:
            with producer.transaction():
                producer.send(target.topic, target.value, key=b"key")

        def run(count: int) -> dict[str, float]:
            rate, taken = in_threads(lambda: work, target.threads, count)
            return {"rate": rate} | latencies(taken)

        yield run


LOADS: tuple[Load, ...] = (
    Load("put-pipelined", "puts of one message, many outstanding, raw generator", put_pipelined,
         {"rate": "msg/s"}, (LOOPBACK_BYTES,), 2000),
    Load("put-single", "one put at a time, raw generator", put_single,
         {"rate": "msg/s"} | LATENCY_UNITS, (SYNCED_ECHO,), 50),
    Load("send-many", "send_many, with keys", send_many, {"rate": "msg/s"}, (), 5000),
    Load("consume", "read: decoded messages; raw batches", consume,
         {"rate": "msg/s", "raw": "GB/s"}, (LOOPBACK_BYTES,), 20_000),
    Load("delivery", "from send to a waiting reader", delivery,
         {"rate": "msg/s"} | LATENCY_UNITS, (SYNCED_ECHO,), 50),
    Load("tx-local", "local transactions of one message, one thread", tx_local,
         {"rate": "tx/s"} | LATENCY_UNITS, (SYNCED_ECHO,), 50),
    Load("tx-threads", "local transactions of one message, many threads", tx_threads,
         {"rate": "tx/s"} | LATENCY_UNITS, (SYNC,), 640),
    Load("send-threads", "one send at a time by each of many threads", send_threads,
         {"rate": "msg/s"} | LATENCY_UNITS, (SYNC,), 640),
    *AIO_LOADS,
)  # fmt: skip
