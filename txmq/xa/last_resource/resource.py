"""One database, any DB-API driver, as the last resource of a transaction: its own COMMIT is the decision.

Theory of operation. ``LastResource`` knows how to reach the database, who it is (identity, ``marker``), and keeps idle
connections (``connection_pool``).
``enlist`` begins a transaction on one and answers a ``Branch``: the transaction's side in this database.

A connection is verified before its first use (``installed``).

Through mysqlclient, statements that stand together go out in one packet (``mysql_server``), three round trips instead
of six: the savepoint's release with the marker row; COMMIT with the next transaction's BEGIN and savepoint, so that a
block that follows at once on the same connection of ours begins without asking (later, the server may have ended it:
BEGIN is what notices). What comes of those two is read by that block. An empty transaction holds no locks and no
snapshot.

SQLite: the path that a connection reports (always absolute) is remembered, and whoever settles opens it with
``mode=rw``: a file that is gone is unreachable, never a new empty database. Its writers queue up (``turns``) from BEGIN
to COMMIT, so that nobody sleeps while the file is free.

Invariants:
    * rows and marker are in one transaction, opened here, ended here;
    * a connection goes back only when its transaction has surely ended; in doubt it is closed;
    * a database whose uuid differs from the first one seen is refused: unreachable, never absent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

from txmq.errors import ConfigError, HeuristicHazardError, RolledBackError, TransactionError, TransactionTimeoutError
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.os_clock import OSClock, OSRandom
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import Lock
from txmq.xa.database.connection_pool import ConnectionPool, close_connection
from txmq.xa.database.dbapi import driver_of, is_integrity_error, may_change_threads, run
from txmq.xa.database.dialects import make_settling
from txmq.xa.database.guarded_connection import Guard, GuardedConnection
from txmq.xa.database.installation import DatabaseSession, Demands, Installation, Lent
from txmq.xa.database.marker import MarkerTable
from txmq.xa.database.marker_sweep import FINISHED_MAX
from txmq.xa.database.mysql_server import discard_results, send, sends_packets
from txmq.xa.database.sqlite_file import open_existing
from txmq.xa.database.sqlite_turns import SQLiteWriterQueue, WriterTurn

_SAVEPOINT = "txmq_body"
SETTLE_WAIT_S = 1.0  # for a lock, by one who settles
BEGUN_FRESH_S = 0.1  # a connection that answered so lately is taken to be alive; one that is not dooms one block


def _nothing() -> None:
    """Nobody wants to know."""


class Unsettled(NamedTuple):
    """A transaction of this process that the broker must still hear of."""

    txid: str
    outcome: str | None  # marker.COMMITTED, marker.ROLLED_BACK, or None: the marker table is to be asked
    deadline_ms: int
    on_settled: Callable[[], None] = _nothing


class LastResource:
    """A database that decides its transactions itself.

    Args:
        name: as it shows in ``txmq tx list``; stored in the database at ``install``.
        connect: makes a DB-API connection; called whenever one more is needed, by any thread.
        dialect: ``sqlite``, ``mysql`` or ``postgresql``; None to tell by the driver.
        table: name of the marker table, and of ``<table>_identity``.
        allow_weak_durability: accept a database that may lose an acknowledged commit, and with it a row whose message
            was sent.
        ignore_tables: tables (``table`` or ``schema.table``) that no transaction writes to: theirs may be an engine
            that cannot roll back.

    Thread safety: yes. Threads share the idle connections, but for those of drivers that bind them to a thread.
    """

    def __init__(
        self, name: str, connect: Callable[[], Any], *, dialect: str | None = None, table: str = "txmq_marker",
        allow_weak_durability: bool = False, ignore_tables: Collection[str] = (), clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:  # fmt: skip
        self.name, self._connect = name, connect
        demands = Demands(allow_weak_durability, ignore_tables)
        self.clock: Clock = clock or OSClock()
        self.installation = Installation(name, table, dialect, demands, self.clock)
        self._random: Random = random or OSRandom()
        self._lent = Lent()
        self._pool: ConnectionPool[DatabaseSession] = ConnectionPool()
        self._sqlite: tuple[ModuleType | None, str] | None = None  # driver and file, once seen
        self.turns = SQLiteWriterQueue()  # of SQLite's writers; others lock rows
        # Told to the resolver of this process; appended and popped by one call each, so no lock is needed.
        self.unsettled: deque[Unsettled] = deque()
        self.finished: deque[str] = deque(maxlen=FINISHED_MAX)  # committed in the broker, durably: their markers may go

    def __repr__(self) -> str:
        return f"LastResource({self.name!r})"

    @property
    def uuid(self) -> str | None:
        """Identity of the database, 32 hex digits; None before the first connection."""
        return self.installation.uuid

    def install(self, client: Any = None, *, adopt: bool = False) -> None:
        """Create the marker and identity tables where they are missing. Idempotent.

        Args:
            client: binds the database to this client's cluster now; without it the first transaction does.
            adopt: this server or file is the database from now on, whichever was: it was moved, restored or failed
                over, and the old one is off for good (docs/how-to/move-a-database.md).

        Raises:
            ConfigError: another resource or another cluster has been installed there, or it is in memory.

        Durability: the tables are committed when this returns.
        """
        connection = self._connect()
        try:
            cluster = None if client is None else cluster_of(client)
            self.installation.install(connection, cluster, self._random, adopt=adopt)
        finally:
            close_connection(connection)

    def using(self, connection: Any) -> UsedConnection:
        """This resource with a connection of the caller's, to be enlisted in place of one made by ``connect``.

        The connection stays the caller's: it is not closed, except where its COMMIT was not answered. It may be wrapped
        by tracing or by a pool (SQLAlchemy's ``connection.connection``). If the wrapper hides the driver, give the
        resource its ``dialect=``.
        """
        return UsedConnection(self, connection)

    def enlist(self, cluster: str, connection: Any = None) -> Branch:
        """Begin a transaction.

        Args:
            cluster: the broker's cluster id, 16 hex digits.
            connection: the caller's own; None for one of the resource's.

        Raises:
            TransactionStateError: the connection is in autocommit or in a transaction.
            ConfigError: weak durability, not installed, or installed for another resource or cluster.
            Exception: the driver's own, where it cannot connect or begin (a lock that is held).
        """
        if connection is not None:
            return self._enlist_lent(cluster, connection)
        while (session := self._pool.take()) is not None:
            try:
                return Branch(self, session, is_own=True)
            except Exception:
                close_connection(session.connection)
                if session.table.dialect.is_local_clock:
                    raise  # no server that ends idle connections: locked, full, ... and waiting again does not help
        session = self._open(cluster, self._connect)
        try:
            return Branch(self, session, is_own=True)
        except BaseException:
            close_connection(session.connection)
            raise

    def _enlist_lent(self, cluster: str, connection: Any) -> Branch:
        session = self._lent.recall(connection, cluster)
        if session is None:
            session = self._verified(connection, cluster)
        else:
            self.installation.require_idle(connection, session.table)
        branch = Branch(self, session, is_own=False)
        self._lent.remember(session, cluster)
        return branch

    def open_settling(self, cluster: str) -> Settling:
        """A verified connection for one who settles; waits for locks only shortly.

        Raises:
            Exception: unreachable, in whatever way; nothing is known.
        """
        if not self._knows_sqlite():
            session = self._open(cluster, self._connect)
            if not self._knows_sqlite():
                make_settling(session.connection, session.table.dialect)
                session.connection.commit()  # PostgreSQL takes a SET back with its transaction
                return Settling(session.connection, session.table, self.installation.required_uuid)
            close_connection(session.connection)
        session = self._open(cluster, self._open_existing_sqlite)
        return Settling(session.connection, session.table, self.installation.required_uuid)

    def close(self) -> None:
        """Close the idle connections of this process."""
        self._pool.close()

    def give_back(self, session: DatabaseSession) -> None:
        """Keep a connection whose transaction has ended."""
        self._pool.give_back(session)

    def _knows_sqlite(self) -> bool:
        return self._sqlite is not None

    def _open_existing_sqlite(self) -> Any:
        if self._sqlite is None:
            raise ConfigError(f"resource {self.name!r} has no file yet")
        driver, path = self._sqlite
        return open_existing(driver, path, SETTLE_WAIT_S)

    def _open(self, cluster: str, connect: Callable[[], Any]) -> DatabaseSession:
        connection = connect()
        try:
            session = self._verified(connection, cluster)
        except BaseException:
            close_connection(connection)
            raise
        self.installation.keep(session)
        return session

    def _verified(self, connection: Any, cluster: str) -> DatabaseSession:
        session = self.installation.verify(connection, cluster)
        if session.table.dialect.name == "sqlite":
            self._sqlite = driver_of(connection), self.installation.sqlite_path(connection)
            ((busy_timeout_ms,),) = run(connection, "PRAGMA busy_timeout")[0]
            session.table.place = WriterTurn(self.turns, busy_timeout_ms)
        session.takes_packets = sends_packets(connection)
        session.is_bound_to_thread = not may_change_threads(connection)
        return session


class UsedConnection(NamedTuple):
    """A resource together with the caller's connection (``LastResource.using``)."""

    resource: LastResource
    connection: Any


class Settling(NamedTuple):
    """A connection of one who settles."""

    connection: Any
    table: MarkerTable
    uuid: str

    def is_duplicate(self, error: Exception) -> bool:
        """Whether an INSERT failed because the row is there."""
        return is_integrity_error(error)

    def committed_before(self, age_ms: int, after: str, limit: int) -> list[str]:
        """See ``Markers``."""
        return self.table.committed_before(self.connection, age_ms, after, limit)

    def delete_committed(self, txids: Sequence[str]) -> None:
        """See ``Markers``."""
        self.table.delete_committed(self.connection, txids)

    def delete_expired(self) -> None:
        """Remove rolled-back markers that are old enough."""
        self.table.delete_expired_rolled_back(self.connection)

    def close(self) -> None:
        """End the session."""
        close_connection(self.connection)


class Branch:
    """One transaction's side in its database: begun when made, ended by exactly one of ``commit`` and ``roll_back``."""

    def __init__(self, resource: LastResource, session: DatabaseSession, *, is_own: bool) -> None:
        self.resource, self._session, self._is_own = resource, session, is_own
        connection = session.connection
        is_told = session.table.dialect.name == "sqlite" and hasattr(connection, "in_transaction")
        self._guard = Guard((lambda: connection.in_transaction) if is_told else None)
        self._has_savepoint = True  # txmq has not released it
        self._was_intact: bool | None = None  # found once: rolling back takes the savepoint away
        is_begun, checked = self._is_begun(session), session.checked
        # Before BEGIN: measuring takes a transaction of its own.
        self._deadline_base_ms = resource.installation.deadline_ms(session, 0.0)
        self.connection = GuardedConnection(session.connection, self._guard)
        self._turn: Lock | None = None
        if is_begun and session.checked == checked:
            return
        try:
            self._begin(session.connection, session.table.dialect.begin, session.table.place)
        except BaseException:
            self._end_turn()
            raise

    def _begin(self, connection: Any, begin: str, place: WriterTurn | None) -> None:
        if self._session.takes_packets:
            _, error = send(connection, (begin, f"SAVEPOINT {_SAVEPOINT}"), in_one_packet=True)
            if error is not None:
                raise error
            return
        if place is not None:
            self._turn = place.begin(connection, begin)
        elif begin:
            run(connection, begin)
        run(connection, f"SAVEPOINT {_SAVEPOINT}")

    def _is_begun(self, session: DatabaseSession) -> bool:
        """Whether the COMMIT of the transaction before has begun this one; once."""
        begun_at, session.begun_at = session.begun_at, float("-inf")
        if begun_at == session.begun_at:
            return False
        discard_results(session.connection)
        return self.resource.clock.monotonic() < begun_at + BEGUN_FRESH_S

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()

    @property
    def error(self) -> BaseException | None:
        """The first error a statement of the body raised: it dooms the transaction."""
        return self._guard.error

    def end_body(self) -> None:
        """Take the connection from the body, and make sure that it left the transaction as it was.

        Where the release of the savepoint goes with the marker row, ``insert_marker`` makes sure of the latter.

        Raises:
            RolledBackError: a statement failed, or the connection is lost.
            HeuristicError: the body ended the transaction by itself: what it did before may be committed.
        """
        self._guard.end()
        connection = self._session.connection
        if self._guard.error is not None:
            raise self._failed(f"a statement failed: {self._guard.error}", self._guard.error)
        try:
            if self._session.takes_packets:
                discard_results(connection)  # of a statement that the body did not wait for
            else:
                run(connection, f"RELEASE SAVEPOINT {_SAVEPOINT}")
                self._has_savepoint = False
        except Exception as error:
            raise self._not_released(error) from error

    def _failed(self, text: str, cause: BaseException, txid: str | None = None) -> RolledBackError:
        error = RolledBackError(text, txid, retriable=self.is_retriable(cause))
        error.__cause__ = cause
        return error

    def is_retriable(self, error: BaseException) -> bool:
        """Whether a transaction that ended with this error of the database may succeed when it is run again."""
        return self._session.table.dialect.is_retriable(self._session.connection, error)

    def _not_released(self, error: Exception) -> TransactionError:
        if self._session.table.dialect.is_lost(self._session.connection, error):
            return self._failed(f"the connection to {self.resource.name!r} was lost: {error}", error)
        if not self._session.table.dialect.has_no_savepoint(error):
            return self._failed(f"a statement failed: {error}", error)
        return HeuristicHazardError(f"{self.ended_by_body}: {error}")

    @property
    def ended_by_body(self) -> str:
        """What is said where ``roll_back`` finds that."""
        return (
            f"the body ended the transaction in {self.resource.name!r} by itself (COMMIT, ROLLBACK, or a statement "
            "that commits); its rows may be there, no message was sent"
        )

    def note(self, error: BaseException) -> None:
        """The body raised this: behind it may stand what the guard did not see."""
        self._guard.note(error)

    def insert_marker(self, txid: str, timeout_s: float) -> None:
        """Put the committed marker into the open transaction.

        Args:
            timeout_s: from the beginning of the transaction, by the database's clock.

        Raises:
            TransactionTimeoutError: the deadline has passed on the database's clock.
            RolledBackError: a resolver was faster, or the statement failed.
            HeuristicError: as ``end_body``.
        """
        session, deadline_ms = self._session, self._deadline_base_ms + int(timeout_s * 1000)
        uuid = self.resource.uuid or ""
        try:
            if session.takes_packets:
                is_in = self._insert_with_release(txid, uuid, deadline_ms)
            else:
                is_in = session.table.insert_committed(session.connection, txid, uuid, deadline_ms)
        except TransactionError:
            raise
        except Exception as error:
            if is_integrity_error(error):
                raise RolledBackError("a resolver has rolled it back: the owner was taken for gone", txid) from error
            raise self._failed(f"the marker row was refused: {error}", error, txid) from error
        if not is_in:
            raise TransactionTimeoutError("the deadline has passed on the database's clock", txid)

    def _insert_with_release(self, txid: str, uuid: str, deadline_ms: int) -> bool:
        """In one packet, of which the server does nothing behind what fails: no marker where the savepoint is gone."""
        insert = self._session.table.insert_committed_statement(txid, uuid, deadline_ms)
        released, error = send(
            self._session.connection, (f"RELEASE SAVEPOINT {_SAVEPOINT}", insert), in_one_packet=True
        )
        self._has_savepoint = not released
        if error is not None:
            raise error if released else self._not_released(error) from error
        return released[1] == 1

    def commit(self) -> None:
        """Commit rows and marker.

        Raises:
            Exception: see ``is_still_open``: only then is it surely not committed.
        """
        session = self._session
        if not (session.takes_packets and self._is_own):
            session.connection.commit()
            return
        # Returns with COMMIT's own answer. The other two are read by the block that needs them, not waited for while
        # the broker has not heard of the decision.
        session.connection.send_query(f"COMMIT; {session.table.dialect.begin}; SAVEPOINT {_SAVEPOINT}")
        crash_point("client.tx.db_commit_sent")
        session.connection.read_query_result()
        session.begun_at = self.resource.clock.monotonic()

    @property
    def is_still_open(self) -> bool:
        """Whether the driver knows that the transaction has not ended. False where it cannot tell."""
        connection: Any = self._session.connection
        return self._session.table.dialect.name == "sqlite" and bool(connection.in_transaction)

    def roll_back(self) -> bool:
        """Undo everything, or close the connection, which undoes it.

        Returns:
            False where the body had ended the transaction by itself: what it did before may be committed.
        """
        self._guard.end()
        if self._was_intact is None:
            self._was_intact = not self._has_savepoint or self._is_intact()
        try:
            self._session.connection.rollback()
        except Exception:  # noqa: BLE001  whatever it was, a closed connection has no transaction
            self.abandon()
        else:
            self.finish()
        return self._was_intact

    def _is_intact(self) -> bool:
        """Whether the transaction was open to the end, or the database itself had rolled it back.

        A savepoint that is gone, with no error that explains it, says that the body ended the transaction. Where
        nothing can be asked (the connection is lost) nothing speaks for that.
        """
        guard, connection, dialect = self._guard, self._session.connection, self._session.table.dialect
        if guard.was_ended or guard.was_rolled_back:
            return not guard.was_ended
        try:
            if self._session.takes_packets:
                self._discard_results()
            run(connection, f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
        except Exception as error:  # noqa: BLE001  the driver's; judged by what it says
            if dialect.has_no_savepoint(error):
                with suppress(Exception):  # lost meanwhile
                    return any(dialect.rolls_back(connection, known) for known in guard.errors)
        return True

    def _discard_results(self) -> None:
        try:
            discard_results(self._session.connection)
        except Exception as error:  # noqa: BLE001  of a statement that the body did not wait for
            self._guard.note(error)

    def finish(self) -> None:
        """The transaction has ended: the connection may be used again."""
        self._guard.end()
        self._end_turn()
        if self._is_own:
            self.resource.give_back(self._session)

    def abandon(self) -> None:
        """Close the connection: what it was doing is not known."""
        self._guard.end()
        close_connection(self._session.connection)
        self._end_turn()


def cluster_of(client: Any) -> str:
    """The cluster id of a client's broker, 16 hex digits."""
    return f"{client.session.cluster:016x}"
