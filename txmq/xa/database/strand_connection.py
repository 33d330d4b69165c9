"""A driver's connection as a strand of an event loop uses it: as if it were a DB-API one, and nothing blocks the loop.

Theory of operation. *In a thread of its own* (``ThreadConnection``). ``opened`` calls ``connect`` where the caller
runs, or for a strand in a new thread (``runtime/workers.py``), in which the connection is used from then on, until it
is closed. So any DB-API driver serves ``txmq.aio``. One thread a connection, and not a pool of threads: 64 transactions
that wait for one row would hold all threads of a pool, and the one that has the row would find none for its COMMIT.
What is done at once is done in one hop: ``call(work, ...)``. Attributes are the connection's own; each call of a method
is a hop.

*On the loop* (``LoopConnection``, for asynchronous drivers). Each call makes the driver's awaitable, and parks the
strand until it is done. So what txmq does with databases is written once, for DB-API connections, and serves asyncpg as
well. The awaits are those of the caller's own task: a task that is cancelled has its CancelledError raised in the
driver, which does what it does then (aiomysql and asyncmy close the connection, asyncpg and psycopg cancel the
statement). An asynchronous driver saves the hop, but not much (its protocol is read in Python), and it has no packets
of several statements: a transaction takes four round trips with mysqlclient in a thread, and six with asyncmy or
aiomysql.

Drivers whose connections have cursors (psycopg, aiosqlite, aiomysql, asyncmy) differ in what they make at once and what
they have awaited: whatever is awaitable is awaited. asyncpg has no cursors of that kind, writes parameters otherwise,
and knows of a transaction only if its own call has begun it.

Invariants:
    * never a second statement while one runs: one piece of work at a time, each in a copy of its caller's context;
    * a call whose caller was interrupted (a cancelled task, Ctrl-C) goes on, and the connection is *left*: it takes
      nothing more, and is closed after that call. What it had sent decides nothing: a COMMIT's outcome must be looked
      up;
    * such calls are counted while they run (``GivenUp``): each has a connection and a thread, which no semaphore of the
      application holds any more.

Sources: PEP 249; psycopg 3, "AsyncConnection"; asyncpg, "Connection", "Transaction"; aiosqlite, "API Reference".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import isawaitable, iscoroutinefunction
from types import ModuleType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from txmq.errors import ConfigError
from txmq.runtime import threads
from txmq.runtime.workers import Worker

P = ParamSpec("P")
T = TypeVar("T")
_THREAD_NAME = "txmq-database"
_DOES_NOT_BLOCK = frozenset({"fileno"})


class LeftConnectionError(Exception):
    """The connection takes nothing more: a call on it was given up while it ran."""


class GivenUp:
    """How many calls run on that their callers have given up. Thread safety: any thread."""

    def __init__(self) -> None:
        self._lock = threads.Lock()
        self.count = 0

    def begun(self) -> None:
        """One more."""
        with self._lock:
            self.count += 1

    def ended(self) -> None:
        """One has ended."""
        with self._lock:
            self.count -= 1


class ThreadConnection:
    """A connection in a thread of its own; see the module's docstring.

    Attributes:
        driver_connection: the driver's own; used in the thread only.
        is_left: a call was given up while it ran.

    Thread safety: any thread, any strand.
    """

    __slots__ = ("_given_up", "_has_ended", "_is_lent", "_worker", "driver_connection", "is_left")

    def __init__(
        self, connect: Callable[[], Any], *, is_lent: bool = False, given_up: GivenUp | None = None,
        timeout_s: float = math.inf,
    ) -> None:  # fmt: skip
        self._is_lent, self._given_up = is_lent, given_up
        self.driver_connection: Any = None
        self.is_left = self._has_ended = False
        self._worker = Worker(_THREAD_NAME)

        def open_here() -> None:
            self.driver_connection = connect()

        try:
            self._worker.call(open_here, self._leave, timeout_s)
        except BaseException:
            self.let_go() if is_lent else self.close()
            raise

    def call(self, work: Callable[Concatenate[Any, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Call ``work(connection, ...)`` in the thread.

        Raises:
            LeftConnectionError: an earlier call was given up while it ran.
        """
        if self.is_left:
            raise LeftConnectionError("an earlier call on this connection was cancelled while it ran")
        connection = self.driver_connection
        return self._worker.call(lambda: work(connection, *args, **named), self._leave)

    def _leave(self) -> None:
        if self._given_up is not None and not self.is_left:
            self._given_up.begun()
            self._worker.post(self._given_up.ended)  # after what runs
        self.is_left = True
        with suppress(Exception):  # only SQLite's can be interrupted from here, and costs nobody else anything
            self.driver_connection.interrupt()

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Close it after what runs, without waiting for that; and then call ``then``, in the thread."""
        if not self._has_ended:
            self._has_ended = self.is_left = True
            self._worker.post(self._close_here)
            if then is not None:
                self._worker.post(then)
            self._worker.end()
        elif then is not None:
            then()

    def _close_here(self) -> None:
        if self.driver_connection is not None:
            self.driver_connection.close()

    def let_go(self) -> None:
        """End the thread; the connection is its owner's, and stays open."""
        if not self._has_ended:
            self._has_ended = self.is_left = True
            self._worker.end()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.driver_connection, name)
        if not callable(found) or isinstance(found, type) or name in _DOES_NOT_BLOCK:
            return found
        return lambda *args, **named: self.call(_call_method, name, args, named)

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter ends, or a forked child lets go of its copy
            self.let_go() if self._is_lent else self.close()


def _call_method(connection: Any, name: str, args: Any, named: Any) -> Any:
    return getattr(connection, name)(*args, **named)


def opened(
    connect: Callable[[], Any], given_up: GivenUp | None = None, timeout_s: float = math.inf, *, aside: bool = False
) -> Any:
    """A connection made by ``connect``; a strand's has a thread of its own, and counts what was given up on it.

    Args:
        aside: it may be used by another thread than made it, and is made where nobody waits longer than ``timeout_s``.

    Raises:
        WorkUnendedError: it was not made in time; if it is later, it is closed.
    """
    if threads.current_strand() is not None:
        return ThreadConnection(connect, given_up=given_up, timeout_s=timeout_s)
    if not aside or timeout_s == math.inf:
        return connect()
    made = ThreadConnection(connect, given_up=given_up, timeout_s=timeout_s)
    made.let_go()
    return made.driver_connection


def close_connection(connection: Any, then: Callable[[], None] | None = None) -> None:
    """Close it, whatever state it is in; and then call ``then``."""
    if isinstance(connection, ThreadConnection):
        connection.close(then)
        return
    with suppress(Exception):
        connection.close()
    if then is not None:
        then()


def lent(connection: Any) -> Any:
    """A caller's connection; in a strand it is used in a thread of its own, until ``return_lent``."""
    return connection if threads.current_strand() is None else ThreadConnection(lambda: connection, is_lent=True)


def return_lent(connection: Any) -> None:
    """It is the caller's again."""
    if isinstance(connection, ThreadConnection):
        connection.let_go()


def of_driver(connection: Any) -> Any:
    """The driver's own connection, to be used by ``there``."""
    return connection.driver_connection if isinstance(connection, ThreadConnection) else connection


ASYNCHRONOUS: Final = ("asyncpg", "aiosqlite", "aiomysql", "asyncmy")  # and psycopg has connections of both kinds
_SUPPORTED: Final = "asyncpg, psycopg (AsyncConnection), aiosqlite, aiomysql, asyncmy"
_IDLE, _IN_TRANSACTION = 0, 2  # as libpq numbers them
_SQLITE_LEGACY: Final = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL
_CLOSE_S: Final = 5.0
_READS: Final = ("SELECT", "SHOW")
_STATEMENTS_MAX: Final = 128


def driver_name(connection: Any) -> str:
    """The package of an asynchronous driver; empty if the connection is none of one."""
    roots = [cls.__module__.partition(".")[0] for cls in type(connection).__mro__]
    for name in ASYNCHRONOUS:
        if name in roots:
            return name
    return "psycopg" if "psycopg" in roots and iscoroutinefunction(getattr(connection, "commit", None)) else ""


def waited(found: Any) -> Any:
    """What a driver made, after it was awaited, if it has to be; in a strand."""
    if not isawaitable(found):
        return found
    strand = threads.current_strand()
    if strand is None:
        raise RuntimeError("a connection of an asynchronous driver was used outside of an event loop")
    return strand.wait_for(found)


class LoopConnection:
    """A connection of an asynchronous driver. Attributes that say something of the connection are the driver's.

    Attributes:
        inner: the driver's.
        driver: its module.

    Thread safety: the strands of its loop, one at a time.
    """

    def __init__(self, inner: Any, driver: ModuleType) -> None:
        self.inner, self.driver = inner, driver

    def cursor(self) -> Any:
        """A new cursor, as DB-API has it."""
        return _Cursor(self.inner)

    def commit(self) -> None:
        """End the transaction."""
        waited(self.inner.commit())

    def rollback(self) -> None:
        """Undo the transaction."""
        waited(self.inner.rollback())

    def close(self) -> None:
        """End the session."""
        waited(self.inner.close())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Cursor:
    """A cursor; the driver's own is made by ``execute``."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._inner: Any = None

    def execute(self, operation: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement."""
        arguments = (operation, parameters) if parameters else (operation,)
        if hasattr(self._connection, "execute"):  # one await in place of two
            self._inner = waited(self._connection.execute(*arguments))
            return
        self._inner = waited(self._connection.cursor())
        waited(self._inner.execute(*arguments))

    def fetchall(self) -> Any:
        """All rows."""
        return waited(self._inner.fetchall())

    def close(self) -> None:
        """Let go of the result."""
        if self._inner is not None:
            waited(self._inner.close())

    @property
    def description(self) -> Any:
        """The columns; None if the statement gives no rows."""
        return self._inner.description

    @property
    def rowcount(self) -> int:
        """Rows that the statement has changed."""
        return int(self._inner.rowcount)


class _AiomysqlConnection(LoopConnection):
    """aiomysql's."""

    def cursor(self) -> Any:
        """A new cursor, as DB-API has it."""
        return _AiomysqlCursor(self.inner)


class _AiomysqlCursor(_Cursor):
    """aiomysql 0.3 cannot write bytes with PyMySQL 1.2, whose function for them it calls: they go as literals."""

    def execute(self, operation: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement."""
        if not parameters:
            super().execute(operation)
            return
        first, *others = operation.split("%s")
        marks = [f"X'{one.hex()}'" if isinstance(one, bytes) else "%s" for one in parameters]
        rest = tuple(one for one in parameters if not isinstance(one, bytes))
        super().execute(first + "".join(map("".join, zip(marks, others, strict=True))), rest)


class _SQLiteConnection(LoopConnection):
    """aiosqlite's, which hides ``autocommit`` of Python 3.12."""

    def __init__(self, inner: Any, driver: ModuleType) -> None:
        super().__init__(inner, driver)
        self._autocommit: int | None = None

    @property
    def autocommit(self) -> int:
        """As sqlite3 has it; -1 for the ways of older Pythons."""
        if self._autocommit is None:
            self._autocommit = self._in_its_thread(lambda own: own.autocommit)
        return self._autocommit

    @autocommit.setter
    def autocommit(self, value: int) -> None:
        self._in_its_thread(lambda own: setattr(own, "autocommit", value))
        self._autocommit = value

    def _in_its_thread(self, work: Callable[[Any], Any]) -> Any:
        own = self.inner._conn  # noqa: SLF001  there is no other way to it, nor to its thread
        if not hasattr(type(own), "autocommit"):  # before Python 3.12
            return _SQLITE_LEGACY
        return waited(self.inner._execute(work, own))  # noqa: SLF001


class _AsyncpgConnection(LoopConnection):
    """asyncpg's. A statement is committed by itself, unless a transaction was begun."""

    autocommit = True

    def __init__(self, inner: Any, driver: ModuleType) -> None:
        super().__init__(inner, driver)
        self._transaction: Any = None

    def cursor(self) -> Any:
        """A new cursor, as DB-API has it."""
        return _AsyncpgCursor(self)

    def begin(self) -> None:
        """Begin a transaction in which ``connection.transaction()`` of asyncpg is a savepoint."""
        transaction = self.inner.transaction()
        waited(transaction.start())
        self._transaction = transaction

    def commit(self) -> None:
        """Commit what ``begin`` has begun."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            waited(transaction.commit())

    def rollback(self) -> None:
        """Undo what is open: what ``begin`` has begun, though it may have been cancelled."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            waited(transaction.rollback())
        elif self.inner.is_in_transaction():
            waited(self.inner.execute("ROLLBACK"))

    def close(self) -> None:
        """End the session; a server that does not answer is waited for shortly."""
        waited(self.inner.close(timeout=_CLOSE_S))

    def get_transaction_status(self) -> int:
        """As psycopg2 has it."""
        return _IN_TRANSACTION if self.inner.is_in_transaction() else _IDLE


class _AsyncpgCursor:
    """See ``_Cursor``."""

    def __init__(self, connection: _AsyncpgConnection) -> None:
        self._connection = connection
        self._rows: list[Any] | None = None
        self.rowcount = -1

    def execute(self, operation: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement."""
        own = self._connection
        bound = {"BEGIN": own.begin, "COMMIT": own.commit, "ROLLBACK": own.rollback}.get(operation)
        if bound is not None:
            bound()
            return
        inner, words = own.inner, _numbered(operation) if parameters else operation
        if operation.startswith(_READS):
            self._rows = waited(inner.fetch(words, *parameters))
        else:
            *_, count = waited(inner.execute(words, *parameters)).split()
            self.rowcount = int(count) if count.isdigit() else -1

    def fetchall(self) -> Any:
        """All rows."""
        return self._rows

    def close(self) -> None:
        """Nothing is open."""

    @property
    def description(self) -> Any:
        """None if the statement gives no rows."""
        return self._rows


@lru_cache(maxsize=_STATEMENTS_MAX)
def _numbered(operation: str) -> str:
    """``%s`` as ``$1``, ``$2``, ..."""
    first, *others = operation.split("%s")
    return first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))


_TYPES: Final[dict[str, type[LoopConnection]]] = {
    "asyncpg": _AsyncpgConnection, "aiosqlite": _SQLiteConnection, "aiomysql": _AiomysqlConnection,
}  # fmt: skip


def on_loop(connection: Any) -> LoopConnection:
    """An asynchronous driver's connection, for strands.

    Raises:
        ConfigError: it is none of a driver that is known.
    """
    name = driver_name(connection)
    if not name:
        found = of_driver(connection)
        raise ConfigError(
            f"{type(found).__module__}.{type(found).__qualname__} is not a connection of an asynchronous driver that "
            f"is known: {_SUPPORTED}"
        )
    return _TYPES.get(name, LoopConnection)(connection, sys.modules[name])


def opened_for_caller(connect: Callable[[], Any]) -> Any:
    """A connection made by ``connect``, for the caller alone.

    In a strand ``connect`` may be of an asynchronous driver: the connection is used on the loop. Any other one is made,
    and used, in a thread of its own.
    """
    if threads.current_strand() is None:
        return connect()
    made = ThreadConnection(connect)
    if not isawaitable(made.driver_connection):
        return made
    made.let_go()
    return on_loop(waited(made.driver_connection))
