"""``txmq.aio.Outbox``: messages written in the transaction that is open on an asynchronous driver's connection.

Theory of operation. The outbox is that of ``txmq`` (``txmq/outbox``), with its statements. They run in a strand, over
the driver's connection as DB-API has it (``txmq/xa/database/strand_connection.py``): each is awaited in the caller's
own task. An outbox belongs to no client and to no loop: strands are made in the loop that runs.

A task that is cancelled in ``send`` leaves the transaction to its owner, as any statement of the driver does. One that
is cancelled in ``transaction`` rolls back; in its COMMIT it does not learn what became of it, and the driver may have
closed the connection. The messages are there exactly if the rows are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from txmq.aio.twin import Facade, twin
from txmq.client.relay import relay
from txmq.outbox import outbox
from txmq.outbox.outbox import ROWS_MAX, UNIT_BYTES_MAX, Message, OutboxTransaction
from txmq.outbox.tables import DEFAULT_TABLE, Backlog
from txmq.runtime.ports import Clock
from txmq.runtime.strands import Host
from txmq.runtime.threads import ThreadLocal
from txmq.xa.database.strand_connection import on_loop

T = TypeVar("T")


class Outbox:
    """An outbox for programs on an event loop; as ``txmq.Outbox``.

    Connections are those of asyncpg (a pool's, too), psycopg, aiosqlite, aiomysql and asyncmy.

    Attributes:
        inner: the outbox of ``txmq``, for connections of other drivers: it has the same tables.

    Thread safety: any thread, any loop, each with a connection of its own.
    """

    def __init__(
        self, name: str = "default", *, table: str = DEFAULT_TABLE, dialect: str | None = None,
        rows_max: int = ROWS_MAX, unit_bytes_max: int = UNIT_BYTES_MAX, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.inner = outbox.Outbox(
            name, table=table, dialect=dialect, rows_max=rows_max, unit_bytes_max=unit_bytes_max, clock=clock
        )
        self._hosts = ThreadLocal()

    @property
    def name(self) -> str:
        """For operators and the broker's lists."""
        return self.inner.name

    async def install(self, connection: Any) -> None:
        """Create what is missing of the tables, and commit. Idempotent; as ``txmq.Outbox.install``."""
        await self._host.run(partial(self.inner.install, on_loop(connection)))

    async def send(
        self, connection: Any, topic: str, value: bytes, key: bytes | None = None, *,
        headers: Mapping[str, bytes] | None = None, unit: int | None = None,
    ) -> None:  # fmt: skip
        """Write a message in the transaction that is open on the connection; as ``txmq.Outbox.send``."""
        of_loop = on_loop(connection)
        await self._host.run(partial(self.inner.send, of_loop, topic, value, key, headers=headers, unit=unit))

    async def send_many(self, connection: Any, messages: Sequence[Message], *, unit: int | None = None) -> None:
        """Write several as one unit; as ``txmq.Outbox.send_many``."""
        await self._host.run(partial(self.inner.send_many, on_loop(connection), messages, unit=unit))

    @asynccontextmanager
    async def transaction(self, connection: Any) -> AsyncIterator[OutboxTransaction]:
        """A transaction of the application, begun and committed here (``async with``); as ``txmq.Outbox.transaction``.

        Its ``send`` waits for nothing: messages are written before the COMMIT.
        """
        run: Callable[[Callable[[], T]], Any] = self._host.run
        block = self.inner.transaction(on_loop(connection))
        transaction = await run(block.__enter__)
        try:
            yield transaction
        except BaseException as error:
            await run(partial(block.__exit__, type(error), error, error.__traceback__))
            raise
        await run(partial(block.__exit__, None, None, None))

    def wake(self) -> None:
        """Messages were committed: let relays of this process look at once; as ``txmq.Outbox.wake``."""
        self.inner.wake()

    @property
    def _host(self) -> Host:
        """For strands in the loop that runs: this thread's last one, as long as that is it."""
        known: Host | None = getattr(self._hosts, "last", None)
        if known is None or known.loop is not asyncio.get_running_loop():
            known = self._hosts.last = Host()
        return known


class Relay(Facade[relay.Relay]):
    """A running relay, a task of the client's loop; usable as a block (``async with``). Made by ``client.relay``."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def stopped(self) -> str | None:
        """Why it sends nothing: database and broker are not of one history. None while all is well."""
        return self.inner.stopped

    @property
    def refusal(self) -> str | None:
        """Why it cannot use this database; None while all is well."""
        return self.inner.refusal

    @property
    def sent(self) -> int:
        """How many messages it has taken to the broker."""
        return self.inner.sent

    @property
    def backlog(self) -> Backlog | None:
        """What waits, as it was when the relay looked last; None: it has not seen the database yet."""
        return self.inner.backlog

    def wake(self) -> None:
        """Messages were committed: look now, not with the next poll. From any thread."""
        self.inner.wake()

    drain = twin(relay.Relay.drain)

    async def close(self) -> None:
        """End it, after the page that is on its way. It goes to its end also if its task is cancelled."""
        await self.host.to_end(self.inner.close)
