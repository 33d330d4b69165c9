"""The file of an SQLite database: which it is, how a resolver opens it, and the queue of its writers.

Theory of operation. SQLite has one writer a file; the others poll with sleeps of 1 to 100 ms, so the file lies idle
while all of them sleep. So the threads and strands of this process that want to write wait in a queue
(``SQLiteWriterQueue``). A waiter for a lease is woken by the one that ends its transaction: 8 threads make about twice
the transactions. A strand waits in its loop, and holds no thread while it does. It is a queue and nothing else: the
file's own lock decides, also between processes, and a waiter that has waited in vain for the connection's busy timeout
asks SQLite all the same.

Invariants:
    * a resolver never makes the file anew;
    * nothing is ever refused by the queue, and no lease is needed for what is correct;
    * a lease is handed to the one that has waited longest: the tasks of a loop would else pass it to themselves;
    * a lease that is lost (its thread was interrupted just then, or lives in the parent of a fork) costs at most one
      busy timeout: a thread that began without a lease then has the queue begin anew (``renew``).
"""

from __future__ import annotations

import sqlite3
from collections import deque
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import quote

from txmq.runtime.threads import Lock, Signal, watch_forks
from txmq.xa.database.dbapi import Connection, run


def main_file(connection: Connection) -> str:
    """The absolute path of the connection's file; empty for a database in memory."""
    return next((str(path) for _, name, path in run(connection, "PRAGMA database_list")[0] if name == "main"), "")


def open_existing(driver: ModuleType | None, path: str, timeout_s: float) -> Any:
    """Open a file that is there.

    Args:
        driver: of the application's own connections; None if it is not known.

    Raises:
        the driver's error: it is not there, or cannot be opened.
    """
    connect = sqlite3.connect if driver is None else driver.connect
    return connect(f"file:{quote(path)}?mode=rw", uri=True, timeout=timeout_s)


class WriterLease:
    """The right to write: one has it at a time.

    Thread safety: any thread, any strand; it may be released in another one than took it.
    """

    __slots__ = ("_is_taken", "_lock", "_waiting")

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_taken = False
        self._waiting: deque[Signal] = deque()

    def acquire(self, timeout_s: float) -> bool:
        """Wait for it; False if the time was over first."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return True
            if timeout_s <= 0:
                return False
            mine = Signal()
            self._waiting.append(mine)
        try:
            mine.wait(timeout_s)
        except BaseException:
            if not self._has_left(mine):
                self.release()
            raise
        return not self._has_left(mine)

    def _has_left(self, mine: Signal) -> bool:
        """Wait no more; False if the lease was handed over before that."""
        with self._lock:
            if mine not in self._waiting:
                return False
            self._waiting.remove(mine)
            return True

    def release(self) -> None:
        """Hand it to the next one."""
        with self._lock:
            if not self._waiting:
                self._is_taken = False
                return
            following = self._waiting.popleft()
        following.set()


class SQLiteWriterQueue:
    """One file's queue; shared by its connections.

    Thread safety: yes. A lease may end in another thread than it began in.
    """

    def __init__(self) -> None:
        self._lease = WriterLease()
        watch_forks(self)

    def take(self, timeout_s: float) -> WriterLease | None:
        """Wait for a lease; ``release`` what is returned to end it. None if the time was over first."""
        lease = self._lease
        return lease if lease.acquire(timeout_s) else None

    def renew(self) -> None:
        """Begin anew: a thread wrote without a lease, so the one that holds the lease does not write."""
        self._lease = WriterLease()

    forked = renew


class QueuePlace(NamedTuple):
    """One connection's place in the queue: it waits for as long as it waits for the file's lock."""

    queue: SQLiteWriterQueue
    busy_timeout_ms: int

    def begin(self, connection: Connection, statement: str) -> WriterLease | None:
        """Wait for a lease and begin a transaction.

        Returns:
            The lease, to be released when the transaction has ended; None if it began without one.

        Raises:
            Exception: the driver's own, if the file is locked by others; no lease is held then.
        """
        lease = self.queue.take(self.busy_timeout_ms / 1000)
        if lease is None:
            self._begin_now(connection, statement)
            return None
        try:
            run(connection, statement)
        except BaseException:
            lease.release()
            raise
        return lease

    def _begin_now(self, connection: Connection, statement: str) -> None:
        """The busy timeout is over: ask the file once."""
        run(connection, "PRAGMA busy_timeout = 0")
        try:
            run(connection, statement)
        finally:
            run(connection, f"PRAGMA busy_timeout = {self.busy_timeout_ms}")
        self.queue.renew()
