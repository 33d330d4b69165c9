"""Idle connections of a resource: one pool a process, bounded.

Theory of operation. A caller takes the connection that was given back last, by any thread. Connections
of drivers that bind them to a thread (sqlite3), or that do not take threads at all, are kept by their thread instead,
and closed when it ends. Those that strands have opened have threads of their own (``thread_connection``), and are for
strands.

Invariants:
    * a forked child never uses, and never closes, its parent's connections;
    * connections of a thread that has ended are used by others, or closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from txmq.runtime import threads
from txmq.runtime.caller import current_process
from txmq.runtime.threads import ThreadLocal
from txmq.xa.database.thread_connection import ThreadConnection

if TYPE_CHECKING:
    from txmq.xa.database.installation import DatabaseSession

IDLE_MAX: Final = 64  # connections kept per process; more are closed after their transaction
IDLE_OF_THREAD_MAX: Final = 4  # a thread in one block at a time uses one

S = TypeVar("S", bound="DatabaseSession")
_of_parents: list[Any] = []  # let go, the driver would close them


class _Kept(Generic[S]):
    """Connections that one thread keeps, until it ends."""

    def __init__(self) -> None:
        self.process, self.idle = current_process(), deque[S]()

    def __del__(self) -> None:
        if self.process == current_process():
            _close_all(self.idle)
        else:
            _of_parents.append(self.idle)


class ConnectionPool(Generic[S]):
    """See the module's docstring.

    Thread safety: any thread; appended and popped by one call each, so no lock is needed.
    """

    def __init__(self) -> None:
        self._of_processes: dict[tuple[int, bool], deque[S]] = {}
        self._of_thread = ThreadLocal()
        self._has_bound = False  # one that its thread keeps has been given back

    def __len__(self) -> int:
        """How many the calling thread could take."""
        return len(self._of_this_process()) + len(self._of_this_thread())

    def take(self) -> S | None:
        """An idle connection; None if there is none."""
        if self._has_bound:
            try:
                return self._of_this_thread().pop()
            except IndexError:  # there is none
                pass
        try:
            return self._of_this_process().pop()
        except IndexError:
            return None

    def give_back(self, session: S) -> None:
        """Keep a connection whose transaction has ended, or close it."""
        if session.is_bound_to_thread:
            self._has_bound, idle, most = True, self._of_this_thread(), IDLE_OF_THREAD_MAX
        else:
            idle, most = self._of_this_process(), IDLE_MAX
        if len(idle) < most:
            idle.append(session)
        else:
            close_connection(session.connection)

    def close(self) -> None:
        """Close what is idle in this process."""
        for (process, _), idle in list(self._of_processes.items()):
            if process == current_process():
                _close_all(idle)
        _close_all(self._of_this_thread())
        self._of_thread = ThreadLocal()  # connections of other threads go with it

    def _of_this_process(self) -> deque[S]:
        whose = current_process(), threads.current_strand() is not None
        found = self._of_processes.get(whose)
        return self._of_processes.setdefault(whose, deque()) if found is None else found

    def _of_this_thread(self) -> deque[S]:
        kept: _Kept[S] | None = getattr(self._of_thread, "kept", None)
        if kept is None or kept.process != current_process():
            kept = self._of_thread.kept = _Kept()
        return kept.idle


def _close_all(idle: deque[S]) -> None:
    with suppress(IndexError):
        while True:
            close_connection(idle.pop().connection)


def close_connection(connection: Any, then: Callable[[], None] | None = None) -> None:
    """Close it, whatever state it is in; and then call ``then``."""
    if isinstance(connection, ThreadConnection):
        connection.close(then)
        return
    with suppress(Exception):
        connection.close()
    if then is not None:
        then()
