"""One database, any DB-API driver, as the last resource of a transaction: its own COMMIT is the decision.

Theory of operation. ``LastResource`` knows how to reach the database, and keeps verified idle connections. ``enlist``
begins a transaction on one and answers a ``Branch``: the transaction's side in this database.

SQLite: the path that a connection reports (always absolute) is remembered, and a resolver opens it with
``mode=rw``: a file that is gone is unreachable, never a new empty database. Its writers queue (``writers``) from BEGIN
to COMMIT, so that no thread sleeps while the file is free.

Invariants:
    * a database whose uuid differs from the first one seen is refused: unreachable, never absent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, NamedTuple

from txmq.errors import ConfigError, TransactionTimeoutError
from txmq.runtime.ports import Clock, Random
from txmq.xa.database.dbapi import driver_of, limit_of, may_change_threads, run
from txmq.xa.database.dialects import prepare_for_resolver
from txmq.xa.database.installation import DatabaseSession, Demands
from txmq.xa.database.marker_sweep import FINISHED_MAX
from txmq.xa.database.mysql_server import sends_packets
from txmq.xa.database.resource import OPEN_S_MAX, DatabaseResource
from txmq.xa.database.sqlite_file import QueuePlace, SQLiteWriterQueue, open_existing
from txmq.xa.database.strand_connection import close_connection
from txmq.xa.last_resource.branch import Branch
from txmq.xa.last_resource.in_doubt_outcome import ResolvingConnection, Unresolved

RESOLVE_WAIT_S = 1.0  # for a lock, by a resolver


class LastResource(DatabaseResource[DatabaseSession]):
    """A database that decides its transactions itself.

    Args:
        name: as it shows in ``txmq tx list``; stored in the database at ``install``.
        connect: makes a DB-API connection; called whenever one more is needed, by any thread.
        dialect: ``sqlite``, ``mysql`` or ``postgresql``; None to tell by the driver.
        table: name of the marker table, and of ``<table>_identity``.
        allow_weak_durability: accept a database that may lose an acknowledged commit, and with it a row whose message
            was sent.
        ignore_tables: tables (``table``, ``schema.table`` or ``schema.*``) that no transaction writes to: theirs
            may be an engine that cannot roll back.

    Thread safety: yes. Threads share the idle connections, but for those of drivers that bind them to a thread.
    """

    def __init__(
        self, name: str, connect: Callable[[], Any], *, dialect: str | None = None, table: str = "txmq_marker",
        allow_weak_durability: bool = False, ignore_tables: Collection[str] = (), clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:  # fmt: skip
        demands = Demands(allow_weak_durability, ignore_tables)
        super().__init__(name, connect, table, dialect, demands, clock, random)
        self._sqlite: tuple[ModuleType | None, str] | None = None  # driver and file, once seen
        self.writers = SQLiteWriterQueue()  # of SQLite's writers; others lock rows
        # For the resolver of this process; appended and popped by one call each, so no lock is needed.
        self.unresolved: deque[Unresolved] = deque()
        self.finished: deque[str] = deque(maxlen=FINISHED_MAX)  # committed in the broker, durably: their markers may go

    def using(self, connection: Any) -> UsedConnection:
        """This resource with a connection of the caller's, to be enlisted in place of one made by ``connect``.

        The connection stays the caller's: it is not closed, unless it cannot tell whether it has committed (COMMIT was
        not answered), or a task was cancelled while a statement ran on it.
        It is closed, too, if the database does not answer until the block's deadline.
        It may be wrapped by tracing or by a pool (SQLAlchemy's ``connection.connection``). If the wrapper hides the
        driver, give the resource its ``dialect=``.
        """
        return UsedConnection(self, connection)

    def enlist(self, cluster: str, connection: Any = None, timeout_s: float = 30.0) -> Branch:
        """Begin a transaction.

        Args:
            cluster: the broker's cluster id, 16 hex digits.
            connection: the caller's own; None for one of the resource's.
            timeout_s: until the transaction's deadline; a call that is not answered then is ended.

        Raises:
            TransactionStateError: the connection is in autocommit or in a transaction.
            ConfigError: weak durability, not installed, or installed for another resource or cluster.
            TransactionTimeoutError: the database does not answer.
            RolledBackError: too many calls run on that were given up.
            Exception: the driver's own, if it cannot connect or begin (a lock that is held).
        """
        until = self.clock.monotonic() + timeout_s
        if connection is not None:
            return self._enlist_lent(cluster, connection, timeout_s)
        if self.installation.cluster not in ("", cluster):  # it was opened before the broker was known
            close_connection(self._open(cluster).connection)  # ConfigError
        while (session := self._pool.take()) is not None:
            try:
                return Branch(self, session, is_own=True, timeout_s=timeout_s)
            except BaseException as error:
                close_connection(session.connection)
                if session.table.dialect.is_local_clock or not isinstance(error, Exception):
                    raise  # no server that ends idle connections: locked, full, ... and waiting again does not help
                if isinstance(error, TransactionTimeoutError):
                    raise
        session = self._open_for_block(cluster, timeout_s)
        try:
            return Branch(self, session, is_own=True, timeout_s=until - self.clock.monotonic())
        except BaseException:
            close_connection(session.connection)
            raise

    def _drawn(self, cluster: str) -> ResolvingConnection:
        return self.open_for_resolver(cluster)

    def _enlist_lent(self, cluster: str, given: Any, timeout_s: float) -> Branch:
        with self._lent_for_block(given, timeout_s) as connection:
            session = self._lent.recall(connection, cluster)
            if session is None:
                session = self._verified(connection, cluster)
            else:
                self.installation.require_idle(connection, session.table)
            branch = Branch(self, session, is_own=False, timeout_s=timeout_s)
            self._lent.remember(session, cluster)
        return branch

    def open_for_resolver(self, cluster: str, timeout_s: float = OPEN_S_MAX) -> ResolvingConnection:
        """A verified connection for a resolver; waits for locks only shortly.

        Raises:
            Exception: unreachable, in whatever way; nothing is known.
        """
        if not self._knows_sqlite():
            session = self._open_for_resolver(cluster, timeout_s)
            if not self._knows_sqlite():
                self._prepare_for_resolver(session, timeout_s)
                session.begin_with(session.table.dialect.resolving)
                return self._resolving(session)
            close_connection(session.connection)
        session = self._open_for_resolver(cluster, timeout_s, self._open_existing_sqlite)
        return self._resolving(session)

    def _prepare_for_resolver(self, session: DatabaseSession, timeout_s: float) -> None:
        limit = limit_of(session.connection)
        limit.begin(timeout_s)
        try:
            with limit:
                prepare_for_resolver(session.connection, session.table.dialect)
                session.connection.commit()
        except BaseException:
            close_connection(session.connection)
            raise
        finally:
            limit.end()

    def _resolving(self, session: DatabaseSession) -> ResolvingConnection:
        connection, uuid = session.connection, self.installation.required_uuid
        return ResolvingConnection(connection, session.table, uuid, limit_of(connection))

    def _knows_sqlite(self) -> bool:
        return self._sqlite is not None

    def _open_existing_sqlite(self) -> Any:
        if self._sqlite is None:
            raise ConfigError(f"resource {self.name!r} has no file yet")
        driver, path = self._sqlite
        return open_existing(driver, path, RESOLVE_WAIT_S)

    def _check_driver(self, connection: Any) -> None:
        """Accept any driver."""

    def _verified(self, connection: Any, cluster: str | None) -> DatabaseSession:
        session = self.installation.verify(connection, cluster)
        if session.table.dialect.name == "sqlite":
            self._sqlite = driver_of(connection), self.installation.sqlite_path(connection)
            ((busy_timeout_ms,),) = run(connection, "PRAGMA busy_timeout")[0]
            session.table.place = QueuePlace(self.writers, busy_timeout_ms)
        session.takes_packets = sends_packets(connection)
        session.is_bound_to_thread = not may_change_threads(connection)
        return session


class UsedConnection(NamedTuple):
    """A resource together with the caller's connection (``LastResource.using``)."""

    resource: LastResource
    connection: Any
