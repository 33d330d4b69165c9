"""Which database a resource is, and whether a transaction may begin on one of its connections.

Theory of operation. ``install`` creates the tables and stores the database's identity (name, uuid, cluster). ``verify``
looks at a connection before its first use: not in autocommit and idle, durable commits, tables that can roll back, the
identity the expected one, the privileges that resolving needs. The first uuid seen is the one that holds.

Deadlines are judged by the database's clock: its distance to our monotonic one, which nobody can set, is measured when
a connection is verified, and again each minute, together with the tables; and when the database's was seen to be set.
The transaction's start in the database would spare that on PostgreSQL alone: MySQL has no function for it, and an xid
holds its deadline before XA START. A clock that is set within a block would be as wrong.

Invariants:
    * a database whose uuid, name or cluster is another one is refused: unreachable, never absent;
    * a defect that would show only when a transaction must be resolved (a missing privilege) is found before the first
      one begins;
    * ``install`` touches nothing if everything is there: a transaction in doubt holds locks on the tables;
    * of several installations at the same moment one creates what is missing, and the others find it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from txmq.errors import ConfigError, RolledBackError, TransactionStateError
from txmq.model import is_valid_name
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import watch_forks
from txmq.xa.database.dbapi import (
    Connection,
    descriptor_of,
    innermost,
    is_error,
    is_integrity_error,
    run,
    silence_copy,
    text,
)
from txmq.xa.database.dialects import Dialect, mysql_variables
from txmq.xa.database.marker_table import (
    DatabaseIdentity,
    MarkerTable,
    TokenTable,
    create_tables,
    look_for_key,
    statements,
)
from txmq.xa.database.mysql_server import Compound
from txmq.xa.database.sqlite_file import main_file

IDLE_S_MAX: Final = 1 << 21  # 24 days, as PostgreSQL knows in ms; the others know more
_MARIADB: Final = "idle_transaction_timeout"
_MYSQL: Final = "wait_timeout"
_POSTGRESQL: Final = "idle_in_transaction_session_timeout"
_UNITS_S: Final = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "ms": 0.001, "s": 1.0}
CHECK_EVERY_S = 60.0
CLOCK_ERROR_MS = 1000  # of a measurement: a slow answer
_UUID = re.compile(r"[0-9a-f]{32}\Z")
_TABLES_SHOWN_MAX = 5


def idle_s(timeout_s: float) -> int:
    """For how long a client may be idle in a block with this timeout: for longer than that, at most twice as long."""
    return min(1 << max(int(timeout_s), 0).bit_length(), IDLE_S_MAX)


class IdleLimit:
    """What one connection was told about clients that stand still in a transaction.

    The server lets go of their locks: it closes a connection on which no statement came for so long, MariaDB if it is
    in a transaction (``idle_transaction_timeout``; an XA branch counts, and stays if it is prepared; so does a
    transaction that was begun ahead of its block), MySQL in any case (``wait_timeout``). A pooled connection that was
    idle for longer has ended, and another one is taken. Both are variables of the session, set to the block's timeout,
    rounded up to a power of two: a connection is told once, as a rule, and keeps it. PostgreSQL is told in each
    transaction, by statements that take no snapshot: the body's first query does. A smaller limit, which the server or
    ``connect`` has set, stays.

    Sources: MariaDB 10.3, "idle_transaction_timeout"; MySQL 8.0 Reference Manual, "wait_timeout"; PostgreSQL 15,
    "Setting Parameters", "SET TRANSACTION".
    """

    __slots__ = ("_given_s", "_idle_s", "_variable")

    def __init__(self) -> None:
        self._variable, self._given_s, self._idle_s = "", 0.0, 0

    def in_transaction(self, connection: Connection, timeout_s: float) -> str:
        """The statement for a transaction of PostgreSQL that is open; empty if the session's own limit is smaller.

        Raises:
            the driver's error.
        """
        if not self._given_s:
            ((shown,),), _ = run(connection, f"SHOW {_POSTGRESQL}")
            self._given_s = _seconds(text(shown)) or IDLE_S_MAX
        wanted_s = idle_s(timeout_s)
        return f"SET LOCAL {_POSTGRESQL} = '{wanted_s}s'" if wanted_s < self._given_s else ""

    def set(self, connection: Connection, timeout_s: float) -> bool:
        """Have a session of MySQL or MariaDB ended that is idle for longer than a block of ``timeout_s`` may be.

        Returns:
            Whether it had to be told: a transaction that was begun on it has ended.

        Raises:
            the driver's error.
        """
        wanted_s = idle_s(timeout_s)
        if wanted_s == self._idle_s:
            return False
        if not self._variable:
            found = mysql_variables(connection, _MARIADB, _MYSQL)
            self._variable = _MARIADB if _MARIADB in found else _MYSQL
            self._given_s = int(found[self._variable]) or IDLE_S_MAX
        run(connection, f"SET SESSION {self._variable} = {int(min(wanted_s, self._given_s))}")
        connection.rollback()  # a question began a transaction
        self._idle_s = wanted_s
        return True


def _seconds(shown: str) -> float:
    """As PostgreSQL shows a time: ``0``, ``1500ms``, ``5s``, ``2min``, ``1h``, ``1d``."""
    number = shown.rstrip("dhimns")
    return int(number) * _UNITS_S.get(shown[len(number) :], 0.001)


class DatabaseSession:
    """A verified connection.

    Attributes:
        clock_ahead_ms: the database's clock minus our monotonic one, when it was measured.
        checked: when that was, on the monotonic clock.
        is_bound_to_thread: only the thread that opened it may use it.
        takes_packets: several statements may be sent to it in one text (``mysql_server.send``).
        begun_at: when the next transaction was begun on it ahead of time, on the monotonic clock.
        is_answer_owed: the answer to that is unread.
        compound: what is prepared on it.
        idle_limit: what MySQL or MariaDB was told about blocks that stand still.
        descriptor: what tells that of its socket, for the limit of a block's calls; None: it has none.
    """

    __slots__ = (
        "__weakref__",
        "begun_at",
        "checked",
        "clock_ahead_ms",
        "compound",
        "connection",
        "descriptor",
        "idle_limit",
        "is_answer_owed",
        "is_bound_to_thread",
        "table",
        "takes_packets",
    )

    def __init__(self, connection: Any, table: MarkerTable) -> None:
        self.connection, self.table = connection, table
        self.clock_ahead_ms, self.takes_packets, self.is_bound_to_thread = 0, False, False
        self.checked = self.begun_at = float("-inf")
        self.compound, self.idle_limit, self.is_answer_owed = Compound(), IdleLimit(), False
        self.descriptor = descriptor_of(connection)

    def on(self, connection: Any) -> DatabaseSession:
        """The same session on this connection; None: without a reference to one."""
        session = copy(self)
        session.connection, session.descriptor = connection, descriptor_of(connection)
        return session

    def begin_with(self, settings: tuple[str, ...]) -> None:
        """Have each transaction begin with these settings (``Dialect.settings``)."""
        self.table.dialect = replace(self.table.dialect, settings=settings)


class Lent:
    """Connections of callers, verified once for as long as they live; never kept alive by that.

    One of a driver whose connections cannot be watched over (the plain ones of sqlite3) is verified each time.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[str, DatabaseSession]] = WeakKeyDictionary()

    def recall(self, connection: Any, cluster: str) -> DatabaseSession | None:
        """The session on a connection that was verified for this cluster."""
        with suppress(TypeError):  # it cannot be watched over
            verified_for, session = self._known.get(innermost(connection), ("", None))
            if session is not None and verified_for == cluster:
                return session.on(connection)
        return None

    def remember(self, session: DatabaseSession, cluster: str) -> None:
        """It was verified, and measured as the session says."""
        with suppress(TypeError):
            self._known[innermost(session.connection)] = (cluster, session.on(None))


@dataclass(frozen=True, slots=True)
class Demands:
    """A resource's demands on its database.

    Attributes:
        allow_weak_durability: accept a database that may lose an acknowledged commit.
        ignore_tables: tables (``table``, ``schema.table`` or ``schema.*``) that may be of an engine that cannot roll
            back.
        two_phase: its engines must be able to prepare, too.
    """

    allow_weak_durability: bool = False
    ignore_tables: Collection[str] = ()
    two_phase: bool = False


class Installation:
    """A resource's database, once it is known.

    Args:
        name: of the resource.
        table: name of the marker table, and of ``<table>_identity``.
        dialect: ``sqlite``, ``mysql`` or ``postgresql``; None to tell by the driver.

    Attributes:
        uuid: of the database; None before the first connection.
        cluster: that it belongs to, 16 hex digits; empty before the first connection, and if it belongs to none yet.
    """

    def __init__(self, name: str, table: str, dialect: str | None, demands: Demands, clock: Clock) -> None:
        if not is_valid_name(name):
            raise ConfigError(f"resource name {name[:80]!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
        if isinstance(demands.ignore_tables, str):
            raise ConfigError(f"resource {name!r}: ignore_tables= takes a list of names, not one text")
        self.name, self.uuid, self.cluster = name, None, ""  # type: str, str | None, str
        self.table, self._dialect, self._demands, self._clock = table, dialect, demands, clock
        self._has_privileges = self._has_token_table = False
        self._distrusts_before = float("-inf")  # what was measured before this moment
        self._own: WeakSet[DatabaseSession] = WeakSet()
        watch_forks(self)

    @property
    def required_uuid(self) -> str:
        """The identity, once a connection was verified."""
        if self.uuid is None:
            raise ConfigError(f"resource {self.name!r} has no identity yet")
        return self.uuid

    def install(self, connection: Connection, cluster: str | None, random: Random, *, adopt: bool = False) -> None:
        """Create missing tables and identity. See ``LastResource.install``."""
        table = MarkerTable.on(connection, self.table, self._dialect)
        with self._unless_busy(connection, table):
            self._require_usable(connection, table)
            table.dialect = replace(table.dialect, settings=table.dialect.installing)
            with self._turn_to_install(connection, table.dialect):
                self._install(connection, table, cluster, random, adopt=adopt)

    @contextmanager
    def _turn_to_install(self, connection: Connection, dialect: Dialect) -> Iterator[None]:
        """Install alone, where transactions cannot see to that.

        Raises:
            RolledBackError: others take too long.
        """
        if dialect.turn_to_install is None:
            yield
            return
        take, give_back = dialect.turn_to_install
        ((is_ours,),) = run(connection, take)[0]
        connection.rollback()
        if not is_ours:
            raise RolledBackError(f"resource {self.name!r} is being installed by others; try again", retriable=True)
        try:
            yield
        finally:
            with suppress(Exception):  # the connection is lost, and with it the turn
                run(connection, give_back)
                connection.rollback()

    def _install(
        self, connection: Connection, table: MarkerTable, cluster: str | None, random: Random, *, adopt: bool
    ) -> None:
        if adopt:
            self._check_identity(connection, table, cluster)  # a database that is not installed is a mistake
        if not table.is_there(connection):
            by_hand = f"; as one who may: {'; '.join(statements(table))}; and install() again"
            with self._named(connection, table, f": its tables cannot be created{by_hand}"):
                create_tables(connection, table)
        if table.identity(connection) is None:
            self._put_identity(connection, table, DatabaseIdentity(self.name, f"{random.bits(128):032x}", ""))
        self._check_identity(connection, table, cluster)

    def sqlite_path(self, connection: Connection) -> str:
        """The file of an SQLite database, which a resolver opens; one in memory has none.

        Raises:
            ConfigError: it is in memory. No demand lifts that: no other process could ever read its markers.
        """
        path = main_file(connection)
        if path:
            return path
        raise ConfigError(f"resource {self.name!r}: a database in memory is gone with its process; give it a file")

    def verify(self, connection: Any, cluster: str | None) -> DatabaseSession:
        """Make sure that a transaction may begin on this connection.

        Args:
            cluster: that the database is to belong to; None for any.

        Raises:
            TransactionStateError: it is in autocommit or in a transaction.
            ConfigError: see the module.
            RolledBackError: the database is locked by others, full or the like; the same call may succeed later.
        """
        is_weak = self._demands.allow_weak_durability
        table = MarkerTable.on(connection, self.table, self._dialect, is_weak=is_weak)
        with self._unless_busy(connection, table):
            return self._verified(connection, table, cluster)

    def _verified(self, connection: Any, table: MarkerTable, cluster: str | None) -> DatabaseSession:
        self._require_usable(connection, table)
        if not self._demands.allow_weak_durability:
            table.dialect.strengthen(connection)
        table.qualify(connection)
        weakness = table.dialect.weakness(connection)
        if weakness is not None and not self._demands.allow_weak_durability:
            raise ConfigError(
                f"resource {self.name!r} may lose acknowledged commits: {weakness}; "
                "correct it, or accept it with allow_weak_durability=True"
            )
        self._check_identity(connection, table, cluster)
        self._check_token_table(connection, table)
        self._check_privileges(connection, table)
        session = DatabaseSession(connection, table)
        self.recheck(session)
        return session

    def _require_usable(self, connection: Connection, table: MarkerTable) -> None:
        self.require_idle(connection, table)
        if table.dialect.name == "sqlite":
            self.sqlite_path(connection)

    def keep(self, session: DatabaseSession) -> None:
        """Know a connection of the resource's own, for when this process is forked."""
        self._own.add(session)

    def forked(self) -> None:
        """In a forked child: its copies of connections are the parent's."""
        for session in list(self._own):
            silence_copy(session.connection)
        self._own.clear()

    def require_idle(self, connection: Any, table: MarkerTable) -> None:
        """Refuse a connection on which a transaction cannot begin."""
        why = table.dialect.why_not_idle(connection)
        if why is not None:
            raise TransactionStateError(f"resource {self.name!r}: cannot begin on this connection: {why}")

    def recheck(self, session: DatabaseSession) -> None:
        """Measure the clock and look at the tables, if that was a minute ago. Outside any transaction."""
        now = self._clock.monotonic()
        is_fresh = now - session.checked < CHECK_EVERY_S and session.checked >= self._distrusts_before
        if session.table.dialect.is_local_clock or is_fresh:
            return
        self._check_tables(session)
        look_for_key(session.connection, session.table)
        session.clock_ahead_ms = session.table.now_ms(session.connection) - int(self._clock.monotonic() * 1000)
        session.checked = now

    def deadline_ms(self, session: DatabaseSession, remaining_s: float) -> int:
        """A moment from now, on the database's clock."""
        if not session.table.dialect.is_local_clock:
            self.recheck(session)
        return self._database_ms(session) + int(remaining_s * 1000)

    def _database_ms(self, session: DatabaseSession) -> int:
        if session.table.dialect.is_local_clock:
            return self._clock.now_ms()
        return int(self._clock.monotonic() * 1000) + session.clock_ahead_ms

    def is_late(self, session: DatabaseSession, deadline_ms: int) -> bool:
        """Whether a deadline, which the database says has passed, has; if not, its clock was set: measure it anew."""
        if self._database_ms(session) >= deadline_ms - CLOCK_ERROR_MS:
            return True
        self._distrusts_before = self._clock.monotonic()
        return False

    def _check_tables(self, session: DatabaseSession) -> None:
        found = session.table.tables_without_rollback(session.connection, two_phase=self._demands.two_phase)
        ignored = set(self._demands.ignore_tables)
        bad = [(name, engine) for name, engine in found if ignored.isdisjoint(_names(name))]
        if bad:
            shown = ", ".join(f"{name} ({engine})" for name, engine in bad[:_TABLES_SHOWN_MAX])
            more = f" and {len(bad) - _TABLES_SHOWN_MAX} more" if len(bad) > _TABLES_SHOWN_MAX else ""
            raise ConfigError(
                f"resource {self.name!r} has tables that cannot roll back: {shown}{more}; "
                "make them InnoDB, or name those that no transaction writes to in ignore_tables="
            )

    def _check_privileges(self, connection: Connection, table: MarkerTable) -> None:
        if self._has_privileges:
            return
        needs = f": GRANT SELECT, INSERT, UPDATE, DELETE ON {table.name}, and ON {table.name}_token, TO its user"
        with self._named(connection, table, needs):
            table.probe(connection)
        self._has_privileges = True

    def _check_token_table(self, connection: Connection, table: MarkerTable) -> None:
        if self._has_token_table:
            return
        older = " was installed by an older txmq; call install() once"
        older += f" (and GRANT SELECT, INSERT, UPDATE, DELETE ON {table.name}_token TO its user)"
        with self._named(connection, table, older):
            TokenTable(table).row(connection, "")
        self._has_token_table = True

    def _check_identity(self, connection: Connection, table: MarkerTable, cluster: str | None) -> None:
        with self._named(connection, table, " cannot be identified; call install() once"):
            identity = table.identity(connection)
        if identity is None:
            raise ConfigError(f"resource {self.name!r} is not installed: call install() once")
        if identity.name != self.name:
            raise ConfigError(
                f"resource {self.name!r}: this database is installed as {identity.name!r}: give it that name, whatever "
                "kind of resource it is, or another table="
            )
        if self.uuid not in (None, identity.uuid):
            raise ConfigError(f"resource {self.name!r}: another database answers: {identity.uuid}, not {self.uuid}")
        if not _UUID.match(identity.uuid):
            raise ConfigError(f"resource {self.name!r}: its identity is damaged: uuid {identity.uuid[:80]!r}")
        if cluster is not None and identity.cluster != cluster:
            if not identity.cluster:
                self._bind(connection, table, cluster)
                return
            raise ConfigError(
                f"resource {self.name!r} belongs to cluster {identity.cluster}, not {cluster}: connect to the "
                "broker it was installed with; lost for ever: docs/operations.md, The broker's disk is lost"
            )
        self.uuid, self.cluster = identity.uuid, identity.cluster

    def _bind(self, connection: Connection, table: MarkerTable, cluster: str) -> None:
        with self._named(connection, table, " cannot be bound to its cluster"):
            table.bind_cluster(connection, cluster)
        self._check_identity(connection, table, cluster)

    def _put_identity(self, connection: Connection, table: MarkerTable, identity: DatabaseIdentity) -> None:
        try:
            table.put_identity(connection, identity)
        except Exception as error:
            if not is_integrity_error(error):  # another process was first
                raise

    @contextmanager
    def _named(self, connection: Connection, table: MarkerTable, says: str) -> Iterator[None]:
        """Turn a refusal of the database into an error of the configuration, unless it says nothing about that."""
        try:
            yield
        except Exception as error:
            if not is_error(error) or table.dialect.is_retriable(connection, error):
                raise
            raise ConfigError(f"resource {self.name!r}{says}: {error}") from error

    @contextmanager
    def _unless_busy(self, connection: Connection, table: MarkerTable) -> Iterator[None]:
        """Turn what may pass (a lock that others hold, a full disk, ...) into an error that says so."""
        try:
            yield
        except Exception as error:
            dialect = table.dialect
            if not is_error(error) or dialect.is_lost(connection, error) or not dialect.may_pass(error):
                raise
            text = f"resource {self.name!r} is busy: {error}; nothing happened, and the same call may succeed later"
            raise RolledBackError(text, retriable=True) from error


def _names(table: str) -> tuple[str, str, str]:
    """What ``ignore_tables`` may call a ``schema.table``."""
    schema, _, name = table.partition(".")
    return table, name, f"{schema}.*"
