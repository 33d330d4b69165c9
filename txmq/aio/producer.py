"""``client.producer(...)`` and ``client.ordered_producer(...)`` on an event loop.

Theory of operation. The producers are the synchronous ones (``txmq/client/producer``, ``txmq/client/spooling``). Their
background threads are strands. What touches a file, the spool's or the retry store's, runs in threads of the client, so
that syncs hold up no task; tasks that wait for a sync share it, as threads do.

Invariant: a send that may end on this host's disk goes to its end once it has begun, whatever becomes of the task that
waits for it (``BegunSends``). So its message is at the broker, on the disk or refused, never in between, and later ones
come after it.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

from txmq.aio.half_message import HalfMessage
from txmq.aio.transaction import Transaction, enclosing_block
from txmq.aio.twin import Facade, twin
from txmq.client.producer import producer
from txmq.client.producer.bulk import Pair
from txmq.client.producer.producer import Content
from txmq.client.spooling import ordered_producer
from txmq.client.transaction import half_message
from txmq.errors import TransactionStateError, TxmqError
from txmq.model import SendResult
from txmq.runtime.strands import Host, Running, required
from txmq.xa.resources import Resource

T = TypeVar("T")


class BegunSends:
    """The sends of one producer that have begun: each goes to its end."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._running: set[Running[Any]] = set()

    async def run(self, send: Callable[[], T]) -> T:
        """Begin ``send`` at once, and wait for its end."""
        running = self._host.begin_end(send)
        if not running.is_done:
            self._running.add(running)
            running.waiter().add_done_callback(lambda _: self._running.discard(running))
        return await running

    async def close(self, close: Callable[[], object]) -> None:
        """Call ``close`` after all that have begun; it goes to its end, too."""
        await self._host.to_end(lambda: self._close(close))

    def _close(self, close: Callable[[], object]) -> None:
        for running in tuple(self._running):
            required().wait_for(running.waiter())
        close()


class _Run(Protocol):
    """``Host.run``, or what runs sends to their end."""

    def __call__(self, work: Callable[[], T], /) -> Coroutine[Any, Any, T]: ...


class Producer(Facade[producer.Producer]):
    """Sends messages. Made by ``client.producer``; usable as a block (``async with``).

    Messages that tasks send in one turn of the loop leave as one batch for each partition, in one request each; none
    waits for company. Messages of one task to one partition are stored in the order of its calls.
    """

    def __init__(self, inner: producer.Producer, host: Host) -> None:
        super().__init__(inner, host)
        self._run: _Run = host.run

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except TxmqError:
            if error is None:  # the error of the block's body says more
                raise

    async def send(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None, timeout: float | None = None,
    ) -> SendResult:  # fmt: skip
        """Send one message and wait until the broker acknowledges it; inside a transaction's block, join it.

        As ``txmq.Producer.send``: arguments, result, errors, durability. A task that is cancelled here gives up the
        wait: the message may be stored or not.
        """
        block = enclosing_block(self.inner.client)
        if block is not None:
            return await block.append(self.inner, topic, value, key, headers, tag, partition)
        return await (await self._begun(topic, (key, value, headers, tag), partition, timeout))

    async def send_async(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None, timeout: float | None = None,
    ) -> Future[SendResult]:  # fmt: skip
        """As ``send``, without waiting for the acknowledgement: that is the future's.

        Waits for the topic's description the first time, and while ``buffer_size_bytes`` is in use.
        """
        block = enclosing_block(self.inner.client)
        if block is not None:
            done = self.host.loop.create_future()
            done.set_result(await block.append(self.inner, topic, value, key, headers, tag, partition))
            return done
        return await self._begun(topic, (key, value, headers, tag), partition, timeout)

    async def _begun(
        self, topic: str, message: Content, partition: int | None, timeout: float | None
    ) -> Future[SendResult]:
        future = await self._run(partial(self.inner.send_outside, topic, message, partition, timeout))
        return cast("Future[SendResult]", future)

    async def send_many(
        self, topic: str, messages: Sequence[Pair], *, timeout: float | None = None
    ) -> Sequence[SendResult]:
        """As ``txmq.Producer.send_many``: (key, value) pairs, pipelined; returns when all are acknowledged, or have
        joined the block that the call stands in.
        """
        pairs = messages if isinstance(messages, list | tuple) else list(messages)
        block = enclosing_block(self.inner.client)
        if block is not None:
            results: list[SendResult] = []
            for key, value in pairs:
                if self.host.has_kept_loop():
                    await asyncio.sleep(0)
                results.append(await block.append(self.inner, topic, value, key, None, None, None))
            return results
        return await self._run(partial(self.inner.send_pairs_outside, topic, pairs, timeout))

    def transaction(self, *resources: Resource, timeout: float = 30.0) -> Transaction:
        """A transaction, to be used as a block (``async with``); as ``txmq.Producer.transaction``.

        Args:
            resources: those of ``txmq``. Their databases are used in threads, one for each connection: any DB-API
                driver serves. Give the resource a ``connect=`` that returns a connection as ever.
        """
        return Transaction(self.inner.transaction(*resources, timeout=timeout), self.host, self.inner)

    async def half(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None, timeout: float = 30.0,
    ) -> HalfMessage:  # fmt: skip
        """Send a half message, to be used as a block (``async with await ...``); as ``txmq.Producer.half``.

        A task that is cancelled here has sent none: it is rolled back.
        """
        if enclosing_block(self.inner.client) is not None:
            raise TransactionStateError("a half message is a transaction of its own: send it outside of this block")
        send = partial(
            self.inner.half, topic, value, key, headers=headers, tag=tag, partition=partition, timeout=timeout
        )
        return HalfMessage(await self.host.opened(send, half_message.HalfMessage.rollback), self.host)

    @property
    def spooled(self) -> int:
        """How many messages wait on local disk; 0 without ``retry_store``."""
        return self.inner.spooled

    parked = twin(producer.Producer.parked)
    flush = twin(producer.Producer.flush)
    close = twin(producer.Producer.close)


class RetryingProducer(Producer):
    """A producer with a ``retry_store``. A send that has begun goes to its end, also if its task is cancelled."""

    def __init__(self, inner: producer.Producer, host: Host) -> None:
        super().__init__(inner, host)
        self._sends = BegunSends(host)
        self._run = self._sends.run

    async def close(self, timeout: float | None = None) -> None:
        """End, after sends that have begun. The next producer that opens the store sends what is kept."""
        await self._sends.close(partial(self.inner.close, timeout))


class OrderedMessageProducer(Facade[ordered_producer.OrderedMessageProducer]):
    """Sends messages in order, per partition; as ``txmq.OrderedMessageProducer``. Usable as a block (``async with``).

    Made by ``await client.ordered_producer(...)``. Messages of one task to one partition are stored in the order of its
    calls.
    """

    def __init__(self, inner: ordered_producer.OrderedMessageProducer, host: Host) -> None:
        super().__init__(inner, host)
        self._sends = BegunSends(host)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, timeout: float | None = None,
    ) -> SendResult:  # fmt: skip
        """Send one message: to the broker, or to the spool; as ``txmq.OrderedMessageProducer.send``.

        A task that is cancelled here gives up the wait: the message is sent, or spooled.
        """
        return await self._sends.run(
            partial(self.inner.send, topic, value, key, headers=headers, tag=tag, timeout=timeout)
        )

    async def send_async(
        self, topic: str, value: bytes, key: bytes | None = None, *, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, timeout: float | None = None,
    ) -> Future[SendResult]:  # fmt: skip
        """As ``send``, without waiting for the broker: that is the future's. A spooled message is synced first."""
        future = await self._sends.run(
            partial(self.inner.send_async, topic, value, key, headers=headers, tag=tag, timeout=timeout)
        )
        return cast("Future[SendResult]", future)

    @property
    def spooled(self) -> int:
        """How many messages wait in the spool."""
        return self.inner.spooled

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more messages."""
        return self.inner.is_closed

    @property
    def request_size_bytes_max(self) -> int:
        """The broker's limit, or its default until that is known."""
        return self.inner.request_size_bytes_max

    parked = twin(ordered_producer.OrderedMessageProducer.parked)
    flush = twin(ordered_producer.OrderedMessageProducer.flush)

    async def close(self) -> None:
        """End, after sends that have begun; as ``txmq.OrderedMessageProducer.close``.

        It goes to its end also if its task is cancelled.
        """
        await self._sends.close(self.inner.close)
