"""``producer.transaction(...)`` on an event loop: ``async with producer.transaction() as tx``.

Theory of operation. The block is the synchronous one (``txmq/client/transaction/block.py``). Its calls run in strands,
one at a time (``_turn``): it may wait while it holds its lock. What looks at the caller's stack or context runs in the
caller's coroutine.

*The end* runs in a strand of the client's own (``Host.begin_end``). A task that is cancelled at the end of its block
leaves the transaction to that strand, which goes to its end. The CancelledError has the id, by which the
outcome can be asked for. ``client.close`` waits for such ends.

*Which messages join.* ``tx.send`` names the block, in any task. ``producer.send`` joins it in the task that entered it;
in a task that was created inside it is refused: it may be meant for the block or not.

*The database connection* (``tx.connection``) is that of ``txmq``, made by the resource's ``connect=``, of any DB-API
driver; its calls are awaited. It has a thread of its own (``xa/database/strand_connection.py``): the loop goes on while
a statement runs. Statements of several tasks of a block run one after another. A task that is cancelled while its
statement runs leaves the statement to the thread. The connection takes nothing more and is closed after that; the block
rolls back. (If that statement was one that ends the transaction, as ``COMMIT`` by hand, what it did is not found out.)

Invariants:
    * a cancelled body rolls back; a cancelled end is not torn;
    * every statement of the synchronous block about outcome and errors holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

from txmq.aio.twin import Facade, twin
from txmq.client.producer.producer import Producer
from txmq.client.transaction import block
from txmq.client.transaction.current import enclosing
from txmq.errors import TransactionStateError
from txmq.model import Message, Outcome, SendResult
from txmq.runtime.strands import Host, LoopLock
from txmq.xa import LastResource
from txmq.xa.database.guarded_connection import GuardedConnection, GuardedCursor, in_its_thread
from txmq.xa.two_phase.resource_ports import XAResource

T = TypeVar("T")
Parameters = Sequence[Any] | Mapping[str, Any]
_LOOK_AGAIN_S = 0.001
_ROWS_AT_ONCE = 100  # of those that are iterated over


class Transaction(Facade[block.Transaction]):
    """A unit of messages that become visible all or none; as ``txmq.Transaction``."""

    def __init__(self, inner: block.Transaction, host: Host, router: Producer) -> None:
        super().__init__(inner, host)
        self._router = router
        self._task: asyncio.Task[Any] | None = None
        self._turn = LoopLock()

    # --- in the block ------------------------------------------------------------------------------------------------

    async def send(
        self, topic: str, value: bytes, key: bytes | None = None, headers: Mapping[str, bytes] | None = None,
        tag: str | None = None, partition: int | None = None,
    ) -> SendResult:  # fmt: skip
        """Send a message as part of this transaction, from any task; as ``txmq.Transaction.send``."""
        self.inner.require_use()
        return await self.append(self._router, topic, value, key, headers, tag, partition)

    async def append(
        self, router: Producer, topic: str, value: bytes, key: bytes | None, headers: Mapping[str, bytes] | None,
        tag: str | None, partition: int | None,
    ) -> SendResult:  # fmt: skip
        """For producers: append a message."""

        def add() -> SendResult:
            with self._turn:
                where, record = router.route(topic, (key, value, headers, tag), partition, None)
                return self.inner.add(topic, where, *record)

        return await self.host.run(add)

    async def ack(self, message: Message) -> None:
        """Acknowledge a consumer's message, if and only if this transaction commits; as ``txmq.Transaction.ack``."""
        self.inner.require_use()
        await self._alone(partial(self.inner.ack, message))

    async def _alone(self, work: Callable[[], T]) -> T:
        return await self.host.run(partial(self._in_turn, work))

    def _in_turn(self, work: Callable[[], T]) -> T:
        with self._turn:
            return work()

    def connection(self, resource: LastResource | XAResource) -> Connection:
        """The database connection of this transaction, whose calls are awaited; without commit, rollback and close.

        Raises:
            TransactionStateError: the resource takes no part in the transaction, or the block is over.
        """
        return Connection(self.inner.connection(resource), self.inner, self.host)

    @asynccontextmanager
    async def savepoint(self, resource: LastResource | XAResource) -> AsyncIterator[None]:
        """A block (``async with``) in which a statement may fail without dooming the transaction.

        As ``txmq.Transaction.savepoint``. While it is open, its own task sends and uses the connection.
        """
        point = self.inner.savepoint(resource)
        await self._alone(point.__enter__)
        try:
            yield
        except BaseException as error:
            await self._alone(partial(point.__exit__, type(error), error, error.__traceback__))
            raise
        await self._alone(partial(point.__exit__, None, None, None))

    def require_task(self) -> None:
        """Refuse what the block's own task did not call, and does not name the block.

        Raises:
            TransactionStateError: another task has called.
        """
        if asyncio.current_task() is not self._task:
            raise TransactionStateError(
                "this task was created inside of a transaction block that another task has entered, so that a message "
                "may be meant for it or not: use tx.send for one of the block"
            )

    @property
    def txid(self) -> str:
        """The transaction's id; taken from the broker's session when first asked for."""
        return self.inner.txid

    @property
    def outcome(self) -> Outcome:
        """COMMITTED or ROLLED_BACK once that is durable; as of ``txmq.Transaction``."""
        return self.inner.outcome

    @property
    def pending(self) -> Coroutine[Any, Any, tuple[str, ...]]:
        """To be awaited: where the decision has yet to arrive; as of ``txmq.Transaction``."""
        return self.host.run(lambda: self.inner.pending)

    @property
    def results(self) -> Coroutine[Any, Any, list[SendResult]]:
        """To be awaited: one result a message; as of ``txmq.Transaction``."""
        return self.host.run(lambda: self.inner.results)

    wait_visible = twin(block.Transaction.wait_visible)

    # --- the block ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.host.run(self._begin)
        self._task = asyncio.current_task()
        self.inner.enter_context()
        _blocks[self.inner] = self
        return self

    def _begin(self) -> None:
        inner = self.inner
        inner.begin()
        try:
            inner.attach()
        except BaseException as error:
            inner.__exit__(None, error, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.host.require_loop()
        self.inner.leave_contexts()
        _blocks.pop(self.inner, None)
        ending = self.host.begin_end(partial(self._in_turn, partial(self.inner.__exit__, None, error, None)))
        try:
            await ending
        except asyncio.CancelledError as cancelled:
            while not ending.is_done and self.inner.txid_or_none is None:  # it is about to take one
                await asyncio.wait((ending.waiter(),), timeout=_LOOK_AGAIN_S)
            txid = self.inner.txid_or_none
            if txid is not None:
                cancelled.txid = txid  # type: ignore[attr-defined]
                cancelled.add_note(f"transaction {txid} goes to its end: ask client.outcome({txid!r})")
            raise
        return False


_blocks: Final[dict[block.Transaction, Transaction]] = {}  # that are open


def enclosing_block(client: object) -> Transaction | None:
    """The block that a message of the calling task joins, or None.

    Raises:
        TransactionStateError: the block is another client's, or another task's; or the message may be meant for one or
            not.
    """
    inner = enclosing(client)
    if inner is None:
        return None
    found = _blocks.get(inner) if isinstance(inner, block.Transaction) else None
    if found is None:
        raise TransactionStateError("this block is none of txmq.aio: its messages cannot join")
    found.require_task()
    return found


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
