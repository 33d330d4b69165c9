"""The queue of writers to an SQLite file, among the threads of this process.

Theory of operation. SQLite has one writer a file; the others poll with sleeps of 1 to 100 ms, so the file lies idle
while all of them sleep. A thread that waits for its turn here is woken by the one that ends its transaction: 8 threads
make about twice the transactions. It is a queue and nothing else: the file's own lock decides, also between processes,
and a thread that has waited in vain for its connection's busy timeout asks SQLite all the same.

Invariants:
    * nothing is ever refused here, and no turn is needed for what is correct;
    * a turn that is lost (its thread was interrupted just then, or lives in the parent of a fork) costs at most one
      busy timeout: a thread that began without a turn then has the queue begin anew (``renew``).
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.runtime.threads import Lock, watch_forks
from txmq.xa.database.dbapi import Connection, run


class SQLiteWriterQueue:
    """One file's queue; shared by its connections.

    Thread safety: yes. A turn may end in another thread than it began in.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        watch_forks(self)

    def take(self, timeout_s: float) -> Lock | None:
        """Wait for a turn; ``release`` what is returned to end it. None if the time was over first."""
        lock = self._lock
        return lock if lock.acquire(timeout=timeout_s) else None

    def renew(self) -> None:
        """Begin anew: a thread wrote without a turn, so the one that holds the turn does not write."""
        self._lock = Lock()

    forked = renew


class WriterTurn(NamedTuple):
    """One connection's place in the queue: it waits for as long as it waits for the file's lock."""

    turns: SQLiteWriterQueue
    busy_timeout_ms: int

    def begin(self, connection: Connection, statement: str) -> Lock | None:
        """Wait for a turn and begin a transaction.

        Returns:
            The turn, to be released when the transaction has ended; None if it began without one.

        Raises:
            Exception: the driver's own, if the file is locked by others; no turn is held then.
        """
        turn = self.turns.take(self.busy_timeout_ms / 1000)
        if turn is None:
            self._begin_now(connection, statement)
            return None
        try:
            run(connection, statement)
        except BaseException:
            turn.release()
            raise
        return turn

    def _begin_now(self, connection: Connection, statement: str) -> None:
        """The busy timeout is over: ask the file once."""
        run(connection, "PRAGMA busy_timeout = 0")
        try:
            run(connection, statement)
        finally:
            run(connection, f"PRAGMA busy_timeout = {self.busy_timeout_ms}")
        self.turns.renew()
