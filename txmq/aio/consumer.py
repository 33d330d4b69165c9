"""``client.consumer(...)`` on an event loop: ``async for message in consumer``.

Theory of operation. The consumer is the synchronous one (``txmq/client/consumer``). Its threads are strands of the
loop: heartbeats, fetches ahead, and listeners, each of which awaits its handler. Stores that block (files, databases,
ZooKeeper) are called in threads of the client.

Invariants:
    * nothing is awaited between the moment a message is taken and the moment the caller has it: a task that is
      cancelled while it waits for messages takes none along;
    * what a cancelled task has begun about a message (to reject it, to save its offset) goes to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from txmq import model
from txmq.aio.transaction import Connection
from txmq.aio.twin import Facade, twin
from txmq.client.consumer import consumer
from txmq.client.consumer.options import ConsumerSettings
from txmq.client.consumer.transactional_acks import PendingAcks
from txmq.errors import ClosedError
from txmq.model import TopicPartition
from txmq.runtime.strands import Host, required

if TYPE_CHECKING:

    class Message(model.Message):
        """A message that a consumer of an event loop delivered: at run time a ``txmq.Message``."""

        def ack(  # type: ignore[override]
            self, connection: Any = None, *, sync: bool = False
        ) -> Awaitable[None]: ...

        def reject(self, reason: str = "rejected") -> Awaitable[None]: ...  # type: ignore[override]
else:
    Message = model.Message

Handle = Callable[[Message], Awaitable[object]]
WAIT_S = 1.0


class Consumer(Facade[consumer.Consumer]):
    """A group's partitions of some topics; as ``txmq.Consumer``. Made by ``await client.consumer(...)``.

    Usable as a block (``async with``) and as an iterator (``async for``).

    Attributes:
        name: this member's name in the group.
        settings: as ``client.consumer`` was told.
    """

    def __init__(self, inner: consumer.Consumer, host: Host) -> None:
        super().__init__(inner, host)
        inner.deliver_for(self)
        self.name: str = inner.name
        self.settings: ConsumerSettings = inner.settings

    # --- taking messages ---------------------------------------------------------------------------------------------

    async def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Message]:
        """Messages of the partitions this consumer has; ``ack`` or ``reject`` each. As ``txmq.Consumer.poll``."""
        if self.host.has_kept_loop():
            await asyncio.sleep(0)
        return cast("list[Message]", await self.host.run(partial(self.inner.poll, max_records, timeout)))

    def __aiter__(self) -> Self:
        """Messages one by one, until ``close``. One that was not acknowledged is not delivered again meanwhile."""
        return self

    async def __anext__(self) -> Message:
        self.host.require_loop()
        if self.host.has_kept_loop():
            await asyncio.sleep(0)
        message = self.inner.take_next()
        if message is not None:
            return cast("Message", message)
        taken: list[model.Message] = []
        while not taken:
            try:
                taken = await self.host.run(partial(self.inner.take, 1, WAIT_S))
            except ClosedError:
                raise StopAsyncIteration from None
        return cast("Message", taken[0])

    # --- acknowledging -----------------------------------------------------------------------------------------------

    async def ack(self, message: model.Message, connection: Any = None, *, sync: bool = False) -> None:
        """Acknowledge a message; as ``await message.ack()``, and as ``txmq.Consumer.ack``.

        A task that is cancelled in it with an asynchronous connection ends the transaction, whose connection is closed.
        In all other cases what has begun goes to its end.

        Args:
            connection: one of an asynchronous driver (asyncpg, psycopg, aiosqlite, aiomysql, asyncmy), which is awaited
                in the caller's task; one of a synchronous driver, or a block's (``tx.connection``), which is used in a
                thread; or a session, with ``txmq.sqlalchemy.DatabaseOffsetStore``.
        """
        if isinstance(connection, Connection):
            connection = connection.inner
        if connection is not None:
            await self.host.run(partial(self.inner.ack, message, connection))
        elif sync:
            await self.host.to_end(partial(self.inner.ack, message, sync=True))
        else:
            self.host.require_loop()
            self.inner.ack(message)  # waits for nothing

    async def reject(self, message: model.Message, reason: str = "rejected") -> None:
        """Report that a message failed: it is delivered again, deferred, or becomes a dead letter."""
        await self.host.to_end(partial(self.inner.reject, message, reason))

    @property
    def pending_acks(self) -> PendingAcks:
        """For ``tx.ack``."""
        return self.inner.pending_acks

    # --- listeners ---------------------------------------------------------------------------------------------------

    async def run(self, handle: Handle, *, threads: int = 1) -> None:
        """Call ``handle`` with each message until ``close`` or SIGTERM: return acknowledges, raise retries.

        As ``txmq.Consumer.run``. A task that is cancelled here (as Ctrl-C does) ends the handlers where they stand:
        their messages come again. The consumer leaves the group in any case.

        Args:
            handle: a coroutine function. One handler at a time works for a partition.
            threads: how many tasks call it; with one, the caller does.
        """

        def call(message: model.Message) -> None:
            if self.host.has_kept_loop():
                required().wait_for(asyncio.sleep(0))
            answer: object = handle(cast("Message", message))
            if type(answer) is CoroutineType or isinstance(answer, Awaitable):  # the second one costs 0.3 us
                required().wait_for(cast("Awaitable[object]", answer))

        await self.host.run(partial(self.inner.run, call, threads=threads))

    # --- control -----------------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions this consumer has now, as (topic, partition)."""
        return self.inner.assignment

    @property
    def stopped(self) -> dict[TopicPartition, str]:
        """Partitions that deliver nothing new because something is wrong, each with the reason; all are tried again."""
        return self.inner.stopped

    def log_of(self, topic: str, partition: int) -> str | None:
        """What to save with an offset of a partition in a store of your own: ``OffsetPosition.log``."""
        return self.inner.log_of(topic, partition)

    def pause(self, slots: Iterable[TopicPartition] | None = None) -> None:
        """Deliver nothing of these partitions (default: all) until ``resume``; the consumer keeps them."""
        self.host.call(partial(self.inner.pause, slots))

    def resume(self, slots: Iterable[TopicPartition] | None = None) -> None:
        """The reverse of ``pause``."""
        self.host.call(partial(self.inner.resume, slots))

    seek = twin(consumer.Consumer.seek)

    async def close(self) -> None:
        """Save the offsets and leave the group; as ``txmq.Consumer.close``.

        It goes to its end also if the task that calls it is cancelled.
        """
        if await self.host.run(lambda: self.inner.is_called_by_listener):
            await self.host.run(self.inner.close)  # waits for nothing: ``run`` leaves the group
        else:
            await self.host.to_end(self.inner.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
