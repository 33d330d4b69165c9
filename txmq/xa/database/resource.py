"""The base of every resource: a way to its database, the database's identity, and a pool of idle connections.

A connection is verified before its first use (``installation``). ``LastResource`` and ``MySQLResource`` begin
transactions on it.

A database that does not answer (a frozen server, a network that swallows packets) holds nobody up for ever: blocks wait
until their deadline, resolvers a while (``PATIENCE_S``). A call on a connection is ended by its socket
(``runtime/call_limits``). ``connect`` cannot be, so that it runs in a thread of its own, which may be given up.

Invariants:
    * a forked child never uses, and never closes, its parent's connections;
    * the first connection of a process is made where it is needed: nobody knows before whether its driver binds it to
      that thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import getattr_static
from typing import Any, Final, Generic, TypeVar

from txmq.errors import ConfigError, RolledBackError, TransactionStateError, TransactionTimeoutError, caused
from txmq.runtime import threads
from txmq.runtime.caller import current_process
from txmq.runtime.clocks import OSClock, OSRandom
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import ThreadLocal
from txmq.runtime.workers import WorkUnendedError
from txmq.xa.database.dbapi import driver_of, limit_of
from txmq.xa.database.guarded_connection import NO_ANSWER, WAIT_S_MIN
from txmq.xa.database.installation import DatabaseSession, Demands, Installation, Lent
from txmq.xa.database.strand_connection import (
    GivenUp,
    ThreadConnection,
    close_connection,
    lent,
    opened,
    return_lent,
)
from txmq.xa.fencing import Drawn, Fence
from txmq.xa.resolver_ports import RoutedClient, cluster_of

IDLE_MAX: Final = 64  # connections kept per process; more are closed after their transaction
IDLE_OF_THREAD_MAX: Final = 4  # a thread in one block at a time uses one

_of_parents: list[Any] = []  # let go, the driver would close them
S = TypeVar("S", bound=DatabaseSession)
GIVEN_UP_MAX: Final = 64  # calls that run on; no more connections for blocks until one has ended
PATIENCE_S: Final = 10.0  # of a resolver with one step of its work; each statement waits a second for a lock, at most
OPEN_S_MAX: Final = 5.0  # of a resolver with a connection
OPEN_AGAIN_S: Final = 0.5  # the same, after one that could not be made
OPEN_LONG_EVERY: Final = 8


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
    """Idle connections of a resource: one pool a process, bounded.

    A caller takes the connection that was given back last, by any thread. Connections of drivers that bind them to a
    thread (sqlite3), or that do not take threads at all, are kept by their thread instead, and closed when it ends.
    Those that strands have opened have threads of their own (``strand_connection``), and are for strands.

    Invariants:
        * a forked child never uses, and never closes, its parent's connections;
        * connections of a thread that has ended are used by others, or closed.

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


class SilentDatabaseError(Exception):
    """A database does not answer."""


class DatabaseResource(ABC, Generic[S]):
    """See the module's docstring.

    Attributes:
        opens_aside: its connections may be used by another thread than made them.

    Thread safety: yes.
    """

    def __init__(
        self, name: str, connect: Callable[[], Any], table: str, dialect: str | None, demands: Demands,
        clock: Clock | None, random: Random | None,
    ) -> None:  # fmt: skip
        self.name, self._connect = name, connect
        self.clock: Clock = clock or OSClock()
        self.installation = Installation(name, table, dialect, demands, self.clock)
        self._random: Random = random or OSRandom()
        self._lent = Lent()
        self._pool: ConnectionPool[S] = ConnectionPool()
        self._given_up = GivenUp()
        self._unopened = GivenUp()  # connections that resolvers have given up, and that are still being made
        self._silences = 0  # of the last ones, that could not be made in time
        self.opens_aside = dialect in ("mysql", "postgresql")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def uuid(self) -> str | None:
        """Identity of the database, 32 hex digits; None before the first connection."""
        return self.installation.uuid

    def install(self, client: RoutedClient | None = None, *, adopt: bool = False) -> None:
        """Create the marker and identity tables if they are missing. Idempotent.

        Args:
            client: binds the database to this client's cluster now; without it the first transaction does.
            adopt: this is the database from now on, whichever was: it was restored, or a copy has taken its place, and
                the old one is off for good (docs/how-to/move-a-database.md). Needs the client: every home is told.

        Raises:
            ConfigError: another resource or another cluster has been installed there, the user may not, or an SQLite
                database is in memory; or the client is one of ``txmq.aio``, which nobody can wait for here.
            BrokerAwayError: the broker is away: without a client the tables are made all the same.

        Durability: the tables are committed when this returns.
        """
        if client is not None and getattr_static(client, "session", None) is None:
            kind = f"{type(client).__module__}.{type(client).__qualname__}"
            raise ConfigError(
                f"install() takes a client of txmq.connect(), not a {kind}, or none: then the first block binds"
            )
        if adopt and client is None:
            raise ConfigError(f"resource {self.name!r}: install(client, adopt=True): the broker has to be told")
        cluster = None if client is None else cluster_of(client)
        connection = opened(self._connect, self._given_up)
        try:
            self._check_driver(connection)
            self.installation.install(connection, cluster, self._random, adopt=adopt)
        finally:
            close_connection(connection)
        if adopt and client is not None:
            self._adopt(client)

    def new_token(self) -> str:
        """A fencing token, 32 hex digits."""
        return f"{self._random.bits(128):032x}"

    def _adopt(self, client: RoutedClient) -> None:
        """Tell every home that this is the database from now on."""
        database = self._drawn(cluster_of(client))
        try:
            for home in client.routes.all_links():
                Fence(database, f"{home.session.home:016x}", home.control, self.new_token).adopt()
        finally:
            database.close()

    def close(self) -> None:
        """Close the idle connections of this process."""
        self._pool.close()

    def give_back(self, session: S) -> None:
        """Keep a connection whose transaction has ended."""
        self._pool.give_back(session)

    @contextmanager
    def _lent_for_block(self, given: Any, timeout_s: float) -> Iterator[Any]:
        """A caller's connection, on which a block begins here. If it does not, none of its transaction is left open.

        One that was refused because it is not idle is as it was. One with a call that was given up while it ran is
        closed after that. One of an asynchronous driver is not touched.
        """
        driver_of(given)
        connection = lent(given)
        limit = limit_of(connection)
        limit.begin(max(timeout_s, WAIT_S_MIN))
        try:
            with limit:
                yield connection
        except TransactionStateError:
            return_lent(connection)
            raise
        except BaseException as error:
            try:
                with limit:
                    connection.rollback()
            except BaseException:  # noqa: BLE001  whatever it was, a closed connection has no transaction
                close_connection(connection)
            else:
                return_lent(connection)
            if limit.has_passed and isinstance(error, Exception):
                raise caused(TransactionTimeoutError(NO_ANSWER), error) from error
            raise
        finally:
            limit.end()

    def _open_for_block(self, cluster: str, timeout_s: float) -> S:
        """As ``_open``, within bounds: tasks that time out waiting for a held row would open as many as the server has.

        Raises:
            TransactionTimeoutError: the database does not answer.
            RolledBackError: too many calls run on that were given up.
        """
        if self._given_up.count >= GIVEN_UP_MAX:
            raise RolledBackError(
                f"{GIVEN_UP_MAX} calls of {self.name!r} run on that were given up, each on a connection of its own: "
                "none is opened until one of them has ended"
            )
        try:
            return self._open(cluster, timeout_s=max(timeout_s, WAIT_S_MIN))
        except SilentDatabaseError as error:
            raise caused(TransactionTimeoutError(f"{error}; nothing happened"), error) from error

    def _open_for_resolver(self, cluster: str, timeout_s: float, connect: Callable[[], Any] | None = None) -> S:
        """As ``_open``. One connection that was given up is waited for by nobody, and no other one is tried meanwhile.

        A database that was silent has a moment to show that it answers again: others wait for their turn. Now and then
        it has longer: it may be slow.

        Raises:
            SilentDatabaseError: the database does not answer.
        """
        if self._unopened.count:
            raise SilentDatabaseError(f"{self.name!r} does not answer: a connection to it is still being made")
        if self._silences % OPEN_LONG_EVERY:
            timeout_s = min(timeout_s, OPEN_AGAIN_S)
        silences, self._silences = self._silences, 0
        try:
            return self._open(cluster, connect, timeout_s, self._unopened)
        except SilentDatabaseError:
            self._silences = silences + 1
            raise

    def _open(
        self, cluster: str | None, connect: Callable[[], Any] | None = None, timeout_s: float = math.inf,
        given_up: GivenUp | None = None,
    ) -> S:  # fmt: skip
        try:
            connection = opened(connect or self._connect, given_up or self._given_up, timeout_s, aside=self.opens_aside)
        except WorkUnendedError as error:
            text = f"{self.name!r} does not answer: connect= has not returned after {timeout_s:.3g} s"
            raise SilentDatabaseError(text) from error
        limit = limit_of(connection)
        limit.begin(timeout_s)
        try:
            with limit:
                session = self._verified(connection, cluster)
        except BaseException as error:
            close_connection(connection)
            if limit.has_passed and isinstance(error, Exception):
                text = f"{self.name!r} does not answer: no answer within {timeout_s:.3g} s"
                raise SilentDatabaseError(text) from error
            raise
        finally:
            limit.end()
        if not isinstance(session.connection, ThreadConnection):  # a strand's says nothing of the driver
            self.opens_aside = not session.is_bound_to_thread
        self.installation.keep(session)
        return session

    @abstractmethod
    def _drawn(self, cluster: str) -> Drawn:
        """A connection of a resolver, to be closed."""

    @abstractmethod
    def _check_driver(self, connection: Any) -> None:
        """Refuse a connection of a driver that this kind of resource cannot use."""

    @abstractmethod
    def _verified(self, connection: Any, cluster: str | None) -> S:
        """The session on a connection on which a transaction may begin (``Installation.verify``)."""
