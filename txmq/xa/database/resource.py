"""The base of every resource: a way to its database, the database's identity, and idle connections.

A connection is verified before its first use (``installation``). ``LastResource`` and ``MySQLResource`` begin
transactions on it.

Invariant: a forked child never uses, and never closes, its parent's connections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, Final, Generic, Protocol, TypeVar

from txmq.errors import BrokerAwayError, ConfigError, RolledBackError, TransactionStateError
from txmq.runtime.os_clock import OSClock, OSRandom
from txmq.runtime.ports import Clock, Random
from txmq.xa.broker_port import InstallingClient, cluster_of
from txmq.xa.database.connection_pool import ConnectionPool, close_connection
from txmq.xa.database.dbapi import driver_of
from txmq.xa.database.installation import DatabaseSession, Demands, Installation, Lent
from txmq.xa.database.outbox_topics import TopicSize
from txmq.xa.database.thread_connection import GivenUp, lent, opened, return_lent
from txmq.xa.fencing import Drawn, Fence

S = TypeVar("S", bound=DatabaseSession)
GIVEN_UP_MAX: Final = 64  # calls of cancelled tasks that run on; no more connections for blocks until one has ended


class DrawnConnection(Drawn, Protocol):
    """A connection on which tokens are drawn."""

    def close(self) -> None:
        """End the session."""


class DatabaseResource(ABC, Generic[S]):
    """See the module's docstring.

    Thread safety: yes.
    """

    def __init__(
        self, name: str, connect: Callable[[], Any], table: str, dialect: str | None, demands: Demands,
        clock: Clock | None, random: Random | None,
    ) -> None:  # fmt: skip
        self.name, self._connect = name, connect
        self.clock: Clock = clock or OSClock()
        self.installation = Installation(name, table, dialect, demands, self.clock)
        self._has_outbox = demands.outbox
        self._random: Random = random or OSRandom()
        self._lent = Lent()
        self._pool: ConnectionPool[S] = ConnectionPool()
        self._given_up = GivenUp()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def uuid(self) -> str | None:
        """Identity of the database, 32 hex digits; None before the first connection."""
        return self.installation.uuid

    def install(self, client: InstallingClient | None = None, *, adopt: bool = False) -> None:
        """Create the marker and identity tables if they are missing. Idempotent.

        With an outbox the database learns its cluster and all topics, for processes that start while the broker is
        away. If the broker is away now, what it has learned before is enough.

        Args:
            client: binds the database to this client's cluster now; without it the first transaction does.
            adopt: this is the database from now on, whichever was: it was restored, or a copy has taken its place, and
                the old one is off for good (docs/how-to/move-a-database.md). Needs the client: every home is told.

        Raises:
            ConfigError: another resource or another cluster has been installed there, the user may not, or an SQLite
                database is in memory; or the client is one of ``txmq.aio``, which nobody can wait for here.
            BrokerAwayError: the broker is away, and the database has no outbox, or belongs to no cluster yet.

        Durability: the tables are committed when this returns.
        """
        if client is not None and getattr_static(client, "session", None) is None:
            kind = f"{type(client).__module__}.{type(client).__qualname__}"
            raise ConfigError(
                f"install() takes a client of txmq.connect(), not a {kind}, or none: then the first block binds"
            )
        if adopt and client is None:
            raise ConfigError(f"resource {self.name!r}: install(client, adopt=True): the broker has to be told")
        away: BrokerAwayError | None = None
        cluster: str | None = None
        topics: Mapping[str, TopicSize] = {}
        connection = opened(self._connect, self._given_up)
        try:
            self._check_driver(connection)
            if client is not None:
                try:
                    cluster, topics = cluster_of(client), self._topics_of(client)
                except BrokerAwayError as error:
                    away = error
            self.installation.install(connection, cluster, self._random, topics, adopt=adopt)
        finally:
            close_connection(connection)
        if away is not None and (adopt or not (self._has_outbox and self.installation.cluster)):
            raise away
        if adopt and client is not None:
            self._adopt(client)

    def _topics_of(self, client: InstallingClient) -> Mapping[str, TopicSize]:
        return client.topics.sizes() if self._has_outbox else {}

    def new_token(self) -> str:
        """A fencing token, 32 hex digits."""
        return f"{self._random.bits(128):032x}"

    def _adopt(self, client: InstallingClient) -> None:
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
    def _lent_for_block(self, given: Any) -> Iterator[Any]:
        """A caller's connection, on which a block begins here. If it does not, none of its transaction is left open.

        One that was refused because it is not idle is as it was. One with a call that was given up while it ran is
        closed after that. One of an asynchronous driver is not touched.
        """
        driver_of(given)
        connection = lent(given)
        try:
            yield connection
        except TransactionStateError:
            return_lent(connection)
            raise
        except BaseException:
            try:
                connection.rollback()
            except BaseException:  # noqa: BLE001  whatever it was, a closed connection has no transaction
                close_connection(connection)
            else:
                return_lent(connection)
            raise

    def _open_for_block(self, cluster: str) -> S:
        """As ``_open``, within bounds: tasks that time out behind a held row would open as many as the server has.

        Raises:
            RolledBackError: too many calls run on that were given up.
        """
        if self._given_up.count >= GIVEN_UP_MAX:
            raise RolledBackError(
                f"{GIVEN_UP_MAX} statements in {self.name!r} run on whose tasks were cancelled, each on a connection "
                "of its own: none is opened until one of them has ended"
            )
        return self._open(cluster)

    def _open(self, cluster: str | None, connect: Callable[[], Any] | None = None) -> S:
        connection = opened(connect or self._connect, self._given_up)
        try:
            session = self._verified(connection, cluster)
        except BaseException:
            close_connection(connection)
            raise
        self.installation.keep(session)
        return session

    @abstractmethod
    def _drawn(self, cluster: str) -> DrawnConnection:
        """A connection of a resolver, to be closed."""

    @abstractmethod
    def _check_driver(self, connection: Any) -> None:
        """Refuse a connection of a driver that this kind of resource cannot use."""

    @abstractmethod
    def _verified(self, connection: Any, cluster: str | None) -> S:
        """The session on a connection on which a transaction may begin (``Installation.verify``)."""
