"""A driver's connection in a thread of its own, for callers that must not block: the strands of an event loop.

Theory of operation. ``opened`` calls ``connect`` where the caller runs, or for a strand in a new thread, in which the
connection is used from then on, until it is closed. So any DB-API driver serves ``txmq.aio``. One thread a connection,
and not a pool of threads: 64 transactions that wait for one row would hold all threads of a pool, and the one that has
the row would find none for its COMMIT. An asynchronous driver in its place would save the hop, but not much (its
protocol is read in Python), and it has no packets of several statements: a transaction takes four round trips with
mysqlclient in a thread, and six with asyncmy or aiomysql.

What is done at once is done in one hop: ``call(work, ...)``. Attributes are the connection's own; each call of a method
is a hop.

Invariants:
    * never a second statement while one runs;
    * a call whose caller was interrupted (a cancelled task) goes on, and the connection is *left*: it takes nothing
      more, and is closed after that call. What it had sent decides nothing: a COMMIT's outcome must be looked up;
    * such calls are counted while they run (``GivenUp``): each has a connection and a thread, which no semaphore of the
      application holds any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

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
    """See the module's docstring.

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
