"""``txmq.aio.connect``, the ``Client``, and its ``topics``, ``groups`` and ``transactions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from txmq.addresses import TlsFiles, is_ensemble
from txmq.aio.consumer import Consumer
from txmq.aio.half_message import Checker, checker_for_strands
from txmq.aio.loop_transport import LoopClient
from txmq.aio.outbox import Outbox, Relay
from txmq.aio.producer import OrderedMessageProducer, Producer, RetryingProducer
from txmq.aio.twin import Facade, twin
from txmq.client.admin import groups, transactions
from txmq.client.arguments import require_function
from txmq.client.bootstrap import Bootstrap, bootstrap_of
from txmq.client.client import Client as SyncClient
from txmq.client.client import require_broker
from txmq.client.consumer.consumer import DEFAULTS, ConsumerOptions
from txmq.client.consumer.consumer import Consumer as SyncConsumer
from txmq.client.consumer.offsets.offset_store import OffsetStore
from txmq.client.partitioner import PartitionSelector
from txmq.client.relay.database_side import Durability
from txmq.client.spooling.ordered_producer import ORDERED_DEFAULTS, OrderedOptions
from txmq.client.spooling.ordered_producer import OrderedMessageProducer as SyncOrderedProducer
from txmq.client.topics import Topics as SyncTopics
from txmq.client.transport.reconnecting import Address
from txmq.model import Message
from txmq.outbox import outbox as outboxes
from txmq.runtime import strands
from txmq.runtime.clocks import OSClock
from txmq.xa.database.strand_connection import opened_for_caller


async def connect(
    bootstrap: str, *, timeout: float = 5.0, name: str = "python", lazy: bool = False,
    ca: str = "", cert: str = "", key: str = "", password: str = "",
) -> Client:  # fmt: skip
    """As ``txmq.connect``, on the event loop that runs; ``async with await txmq.aio.connect(...) as client``.

    The client belongs to that loop. ``await client.close()`` before the loop ends.
    """
    host = strands.Host()
    found = _bootstrap_of(bootstrap, TlsFiles(ca, cert, key), password)
    inner = LoopClient(found, timeout=timeout, name=name, clock=strands.LoopClock(OSClock()))
    client = Client(inner, host)
    if not lazy:
        try:
            await host.run(partial(require_broker, inner, bootstrap))
        except BaseException:
            await client.close()
            raise
    return client


def _bootstrap_of(text: str, files: TlsFiles, password: str) -> Bootstrap:
    bootstrap = bootstrap_of(text, files, password)
    if not is_ensemble(text):
        return bootstrap

    def look_up(timeout: float) -> Sequence[Address]:
        """ZooKeeper's client has threads of its own, and blocks its caller."""
        return strands.required().wait_for(asyncio.to_thread(bootstrap.find, timeout))

    return Bootstrap(look_up, bootstrap.tls, bootstrap.login)


class Client(Facade[LoopClient]):
    """A broker's client on an event loop; made by ``txmq.aio.connect``, usable as a block (``async with``).

    Its methods have the names, parameters, errors and promises of ``txmq.Client``. It belongs to the loop in which it
    was made, and to no thread but that loop's.

    Attributes:
        topics, groups, transactions: as of ``txmq.Client``.
    """

    def __init__(self, inner: LoopClient, host: strands.Host) -> None:
        super().__init__(inner, host)
        self.topics = Topics(inner.topics, host)
        self.groups = Groups(inner.groups, host)
        self.transactions = Transactions(inner.transactions, host)
        self._consumers: WeakSet[Consumer] = WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def producer(
        self, *, partition_selector: PartitionSelector | None = None, linger_ms: float = 0,
        batch_size_bytes: int = 256 << 10, buffer_size_bytes: int = 64 << 20, max_in_flight: int = 8,
        compression: str | None = None, timeout: float = 5.0, group: str | None = None, checker: Checker | None = None,
        retry_store: str | None = None,
    ) -> Producer:  # fmt: skip
        """Make a producer; a client may have many. As ``txmq.Client.producer``.

        Args:
            checker: a coroutine function; a task of this client awaits it.
            retry_store: opened before this returns, which keeps the loop for some milliseconds; from then on the disk
                is used in threads of this client.
        """
        check = checker_for_strands(checker)
        make = partial(
            self.inner.producer, partition_selector=partition_selector, linger_ms=linger_ms,
            batch_size_bytes=batch_size_bytes, buffer_size_bytes=buffer_size_bytes, max_in_flight=max_in_flight,
            compression=compression, timeout=timeout, group=group, checker=check, retry_store=retry_store,
        )  # fmt: skip
        kind = Producer if retry_store is None else RetryingProducer
        return kind(self.host.call(make, may_block=retry_store is not None), self.host)

    def relay(
        self, outbox: Outbox | outboxes.Outbox, *, connect: Callable[[], Any], durability: Durability = "forced"
    ) -> Relay:  # fmt: skip
        """Take an outbox's messages to the broker, in a task of this client's loop; as ``txmq.Client.relay``.

        Args:
            connect: opens a connection of an asynchronous driver, as ``lambda: asyncpg.connect(...)`` does, or one of
                any other driver, which is used in a thread of its own.
        """
        inner = outbox.inner if isinstance(outbox, Outbox) else outbox
        require_function("connect", connect, "a function that opens a connection")
        opens = partial(opened_for_caller, connect)
        began = partial(self.inner.relay, inner, connect=opens, durability=durability)
        return Relay(self.host.call(began), self.host)

    async def consumer(
        self, group: str, topics: Sequence[str], *, start: str | int | None = None, max_retries: int = 5,
        retry_store: str | None = None, broadcast: bool = False, offset_store: OffsetStore | None = None,
        options: ConsumerOptions = DEFAULTS,
    ) -> Consumer:  # fmt: skip
        """Join a consumer group: ``async with await client.consumer(...) as consumer``. As ``txmq.Client.consumer``.

        A store that blocks is called in threads of this client.
        """
        join = partial(
            self.inner.consumer, group, topics, start=start, max_retries=max_retries, retry_store=retry_store,
            broadcast=broadcast, offset_store=offset_store, options=options,
        )  # fmt: skip
        made = Consumer(await self.host.opened(join, SyncConsumer.close), self.host)
        self._consumers.add(made)
        return made

    async def ordered_producer(
        self, partition_selector: PartitionSelector, spool: str, *, options: OrderedOptions = ORDERED_DEFAULTS
    ) -> OrderedMessageProducer:
        """Make a producer that keeps order through outages; as ``txmq.Client.ordered_producer``.

        The spool is read and written in threads of this client.
        """
        make = partial(self.inner.ordered_producer, partition_selector, spool, options=options)
        return OrderedMessageProducer(await self.host.opened(make, SyncOrderedProducer.close), self.host)

    fetch = twin(SyncClient.fetch)
    fetch_raw = twin(SyncClient.fetch_raw)
    offsets = twin(SyncClient.offsets)
    log_of = twin(SyncClient.log_of)
    ranges = twin(SyncClient.ranges)
    offset_for = twin(SyncClient.offset_for)
    outcome = twin(SyncClient.outcome)
    ping = twin(SyncClient.ping)
    stats = twin(SyncClient.stats)
    settle = twin(SyncClient.settle)

    async def browse(self, topic: str) -> AsyncIterator[Message]:
        """Iterate over every message that is there now, partition by partition, each in order."""
        pages = self.inner.browse_pages(topic)
        while (page := await self.host.run(partial(next, pages, None))) is not None:
            for message in page:
                yield message

    async def close(self) -> None:
        """Close consumers and connections. Unacknowledged messages are given up; a producer's ``close`` waits for them.

        It goes to its end also if the task that calls it is cancelled.
        """
        self.host.require_loop()
        await asyncio.shield(self.host.loop.create_task(self._close(), name="txmq-close"))

    async def _close(self) -> None:
        # One that cannot be closed in order leaves nothing open.
        await asyncio.gather(*(consumer.close() for consumer in self._consumers), return_exceptions=True)
        await self.host.await_ends(self.inner.timeout)
        await self.host.run(self.inner.close)
        await self.host.close()


class Topics(Facade[SyncTopics]):
    """``client.topics``, as ``txmq.Client`` has it."""

    create = twin(SyncTopics.create)
    alter = twin(SyncTopics.alter)
    delete = twin(SyncTopics.delete)
    describe = twin(SyncTopics.describe)
    watermarks = twin(SyncTopics.watermarks)
    list = twin(SyncTopics.list)
    ensure = twin(SyncTopics.ensure)


class Groups(Facade[groups.Groups]):
    """``client.groups``, as ``txmq.Client`` has it."""

    list = twin(groups.Groups.list)
    describe = twin(groups.Groups.describe)
    reset = twin(groups.Groups.reset)
    delete = twin(groups.Groups.delete)


class Transactions(Facade[transactions.Transactions]):
    """``client.transactions``, as ``txmq.Client`` has it."""

    list = twin(transactions.Transactions.list)
    resources = twin(transactions.Transactions.resources)
    messages = twin(transactions.Transactions.messages)
    show = twin(transactions.Transactions.show)
    outcome = twin(transactions.Transactions.outcome)
    commit = twin(transactions.Transactions.commit)
    rollback = twin(transactions.Transactions.rollback)
    complete = twin(transactions.Transactions.complete)
    give_up_home = twin(transactions.Transactions.give_up_home)
    fence = twin(transactions.Transactions.fence)
    forget = twin(transactions.Transactions.forget)
