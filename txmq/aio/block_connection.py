"""``tx.connection(resource)`` on an event loop: a block's database connection, whose calls are awaited.

Theory of operation. The connection is that of ``txmq``, made by the resource's ``connect=``, of any DB-API driver. It
has a thread of its own (``xa/database/thread_connection.py``): the loop goes on while a statement runs. Statements of
several tasks of a block run one after another.

A task that is cancelled while its statement runs leaves the statement to the thread. The connection takes nothing more
and is closed after that; the block rolls back. (If that statement was one that ends the transaction, as ``COMMIT`` by
hand, what it did is not found out.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from txmq.client.transaction import block
from txmq.runtime.strands import Host
from txmq.xa.database.guarded_connection import GuardedConnection, GuardedCursor, in_its_thread

T = TypeVar("T")
Parameters = Sequence[Any] | Mapping[str, Any]
_ROWS_AT_ONCE = 100  # of those that are iterated over


class Connection:
    """The database connection of a block: the driver's own, without commit, rollback and close.

    An error of the driver goes on unchanged, and dooms the block, but for one in ``tx.savepoint``.

    Attributes:
        inner: as ``txmq`` would give it; used in its thread only.
    """

    def __init__(self, inner: GuardedConnection, transaction: block.Transaction, host: Host) -> None:
        self.inner, self._transaction, self._host = inner, transaction, host

    async def run(self, work: Callable[[Any], T]) -> T:
        """Call ``work(connection)`` in the connection's thread, with the connection that ``txmq`` would give.

        For several statements at once, and for code that is not ``async``. It runs in a copy of the caller's context.

        Raises:
            TransactionStateError: the block is over.
        """
        self._transaction.require_use()
        inner = self.inner
        return await self._host.run(lambda: in_its_thread(inner, lambda: work(inner)))

    async def execute(self, operation: str, parameters: Parameters = ()) -> Cursor:
        """Run a statement on a cursor of its own."""
        return await self.cursor().execute(operation, parameters)

    async def executemany(self, operation: str, parameters: Sequence[Parameters]) -> Cursor:
        """Run a statement for many rows on a cursor of its own."""
        return await self.cursor().executemany(operation, parameters)

    def cursor(self, *arguments: Any, **named: Any) -> Cursor:
        """A cursor, usable as a block (``async with``); arguments as the driver's."""
        return Cursor(self, arguments, named)


class Cursor:
    """A cursor of a block's connection. The driver's own is made by the first call that needs it.

    Attributes:
        description, rowcount, lastrowid: the driver's, of the last statement.
    """

    def __init__(self, connection: Connection, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        self._connection, self._arguments, self._named = connection, arguments, named
        self._inner: GuardedCursor | None = None

    async def execute(self, operation: str, parameters: Parameters = ()) -> Self:
        """Run a statement. Without parameters none are passed on."""
        arguments = (operation, parameters) if parameters else (operation,)
        await self._call(lambda cursor: cursor.execute(*arguments))
        return self

    async def executemany(self, operation: str, parameters: Sequence[Parameters]) -> Self:
        """Run a statement for many rows."""
        await self._call(lambda cursor: cursor.executemany(operation, parameters))
        return self

    async def fetchone(self) -> Any:
        """The next row, or None."""
        return await self._call(lambda cursor: cursor.fetchone())

    async def fetchmany(self, size: int = _ROWS_AT_ONCE) -> list[Any]:
        """The next ``size`` rows, or what is left."""
        return await self._call(lambda cursor: list(cursor.fetchmany(size)))

    async def fetchall(self) -> list[Any]:
        """All rows left."""
        return await self._call(lambda cursor: list(cursor.fetchall()))

    async def close(self) -> None:
        """Let go of the result."""
        if self._inner is not None:
            await self._call(lambda cursor: cursor.close())

    @property
    def description(self) -> Any:
        """See the class."""
        return self._of_driver("description")

    @property
    def rowcount(self) -> int:
        """See the class."""
        return int(self._of_driver("rowcount", -1))

    @property
    def lastrowid(self) -> Any:
        """See the class."""
        return self._of_driver("lastrowid")

    def _of_driver(self, name: str, before: Any = None) -> Any:
        return before if self._inner is None else getattr(self._inner, name)

    async def _call(self, work: Callable[[Any], T]) -> T:
        return await self._connection.run(lambda connection: work(self._of(connection)))

    def _of(self, connection: GuardedConnection) -> GuardedCursor:
        if self._inner is None:
            self._inner = connection.cursor(*self._arguments, **self._named)
        return self._inner

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:  # else the block is about to end, or its savepoint
            await self.close()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while rows := await self.fetchmany():
            for row in rows:
                yield row
