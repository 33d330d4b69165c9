"""``client.ordered_producer(...)`` on an event loop.

Theory of operation. The producer is the synchronous one (``txmq/client/spooling``): its drain and spooling threads are
strands. What touches the spool's file runs in threads of the client, so that syncs hold up no task; tasks that wait for
a sync share it, as threads do.

Invariant: a send that has begun goes to its end, whatever becomes of the task that waits for it (``begun``).
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Self, cast

from txmq.aio.begun import BegunSends
from txmq.aio.twin import Facade, twin
from txmq.client.spooling import ordered_producer
from txmq.model import SendResult
from txmq.runtime.strands import Host


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
