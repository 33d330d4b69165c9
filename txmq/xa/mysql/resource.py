"""MySQL and MariaDB as an XA resource: branches of two-phase commits, through the driver mysqlclient.

Theory of operation. ``MySQLResource`` knows how to reach the database and its identity (``installation``), keeps idle
connections for all threads of a process, and begins branches on them (``branch``). One connection serves one branch
from XA START to its end. A resolver, which works for owners that have gone, has a connection of its own
(``MySQLRecovery``).

A connection is verified before its first use. A pooled one is not asked again: if the server has ended it, XA START
says so, and the next connection is taken. One that has answered a moment ago is taken to be alive: there XA START goes
out with the body's first statement (``PipelinedStart``).

Invariants:
    * a forked child never uses, and never closes, its parent's connections;
    * what the server does not support or does not promise is refused or said before the first branch begins: Galera,
      weak durability, engines without rollback, missing privileges, the binary log (a warning).

The tests run against MariaDB 10.11, and by ``make test-mysql`` against MariaDB 11.8 and MySQL 9.7. MySQL differs: XA
RECOVER needs XA_RECOVER_ADMIN and gives binary xids with CONVERT XID, and a prepared branch leaves its connection
(``xa_detach_on_prepare``, since 8.0.29).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from txmq.errors import ConfigError, TransactionTimeoutError, caused
from txmq.runtime.call_limits import CallLimit
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock, Random
from txmq.xa.database.dbapi import limit_of, run
from txmq.xa.database.dialects import code_of, prepare_for_resolver
from txmq.xa.database.guarded_connection import NO_ANSWER, WAIT_S_MIN
from txmq.xa.database.installation import DatabaseSession, Demands
from txmq.xa.database.marker_table import TokenRow, TokenTable
from txmq.xa.database.mysql_server import (
    ACCESS_DENIED,
    NOTA,
    ROLLED_BACK,
    UNKNOWN_THREAD,
    Server,
    execute,
    listed_xids,
    mysql_driver,
    require_driver,
    warn_of_binary_log,
    why_no_xa,
    xa,
)
from txmq.xa.database.resource import OPEN_S_MAX, DatabaseResource
from txmq.xa.database.strand_connection import close_connection, of_driver
from txmq.xa.mysql.branch import MySQLBranch
from txmq.xa.two_phase.resource_ports import Ended, ListedXid, UsedXAConnection, listed_xid
from txmq.xid import TxId, Xid

_TRANSACTIONS = "innodb_trx WHERE trx_mysql_thread_id"
_GONE_TRIES, _GONE_PAUSE_S = 400, 0.005  # until a killed session has ended
_TRANSACTIONS_KEPT_S = 0.15  # InnoDB answers from its cache for 0.1 s after a question
FRESH_S = 0.1  # a connection that has committed so lately is taken to be alive; one that is not dooms one block


class MySQLSession(DatabaseSession):
    """A verified connection, and the abilities of its server.

    Attributes:
        committed_at: when the server has answered to its last branch's commit, on the monotonic clock; once.
        may_pipeline_start: for ``PipelinedStart``. A wrapper is there to see each statement by itself.
    """

    __slots__ = ("committed_at", "may_pipeline_start", "server")

    def __init__(self, verified: DatabaseSession, server: Server) -> None:
        super().__init__(verified.connection, verified.table)
        self.clock_ahead_ms, self.checked, self.server = verified.clock_ahead_ms, verified.checked, server
        self.committed_at, driver = float("-inf"), of_driver(verified.connection)
        is_plain = issubclass(type(driver), mysql_driver().connections.Connection) and hasattr(driver, "send_query")
        self.may_pipeline_start = server.takes_packets and is_plain


class MySQLRecovery:
    """A resolver's connection to the XA branches in MySQL or MariaDB. See ``resource_ports.Recovery``.

    Args:
        session: verified, idle; from now on this object's.
        cluster: 16 hex digits.

    The connection is in autocommit: on any other one MariaDB refuses to end a branch that it did not begin
    (XAER_OUTSIDE). It waits for locks a second only, and leaves no locks on gaps between marker rows.

    "Not known" (XAER_NOTA) is answered for a branch that has ended and for one whose owner's connection lives; only a
    later ``prepared`` tells them apart, and ``kill`` ends the owner's session.

    An XA COMMIT that comes while the owner's session ends may be acknowledged without a commit (MariaDB 10.11): the
    server strikes the branch from its list, and InnoDB keeps it prepared, with its locks, until the server is
    restarted; then it is listed again. So ``kill`` waits until the session has gone, and ``commit`` waits for the lock
    on the branch's marker row before it says DONE. Without the row there is no proof, and none is asked for.

    Invariants:
        * nothing but prepared branches with txmq's format id, this cluster and this database's uuid is listed;
        * a rollback is not durable when it is acknowledged: it is after ``force``;
        * what a marker row says is durable before it is answered (``marker.read_durably``).
    """

    def __init__(self, session: MySQLSession, name: str, uuid: str, cluster: str) -> None:
        self.uuid, self.limit = uuid, limit_of(session.connection)
        self._session, self._connection, self._cluster = session, session.connection, int(cluster, 16)
        self._log = get_logger(resource=name)
        self.limit.work(OPEN_S_MAX)
        try:
            self._connection.autocommit(True)
            prepare_for_resolver(self._connection, session.table.dialect)
        finally:
            self.limit.end()

    def prepared(self) -> list[ListedXid]:
        """See ``Recovery``."""
        xids = listed_xids(self._connection, is_mariadb=self._session.server.is_mariadb)
        found = (listed_xid(xid) for xid in xids)
        return [
            listed
            for listed in found
            if listed is not None and listed.uuid == self.uuid and listed.txid.cluster == self._cluster
        ]

    def commit(self, xid: Xid) -> Ended:
        """See ``Recovery``. The driver's error for a lock, if the server has only lost sight of the branch."""
        ended = self._end("COMMIT", xid)
        if ended is Ended.DONE:
            self._session.table.wait_for_lock(self._connection, xid.gtrid.decode("ascii"))
        return ended

    def rollback(self, xid: Xid) -> Ended:
        """See ``Recovery``."""
        return self._end("ROLLBACK", xid)

    def force(self) -> None:
        """See ``Recovery``."""
        self._session.table.touch(self._connection)

    def marker_outcome(self, txid: str) -> str | None:
        """See ``Recovery``. A branch that is prepared holds the row: the driver's error for a lock, after a second."""
        return self._session.table.read_durably(self._connection, txid)

    def token_row(self, home: str) -> TokenRow:
        """See ``Drawn``."""
        return TokenTable(self._session.table).row(self._connection, home)

    def draw_token(self, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()) -> bool:
        """See ``Drawn``."""
        return TokenTable(self._session.table).draw(self._connection, home, before, after, rolled_back)

    def committed_before(self, age_ms: int, after: str, limit: int) -> list[str]:
        """See ``Markers``."""
        return self._session.table.committed_before(self._connection, age_ms, after, limit)

    def delete_committed(self, txids: Sequence[str]) -> None:
        """See ``Markers``."""
        self._session.table.delete_committed(self._connection, txids)

    def kill(self, connection: int) -> bool:
        """See ``Recovery``.

        After a restart of the server the number may be another client's: kill only for a branch that is listed and not
        known, since a restarted server holds none for a session.
        """
        if connection == self._session.server.connection_id or not self._is_in_transaction(connection):
            return False
        try:
            execute(self._connection, f"KILL CONNECTION {int(connection)}")
        except Exception as error:
            if code_of(error) == UNKNOWN_THREAD:
                return False
            raise
        self._log.info("session killed: it held a prepared branch", connection=connection)
        for _ in range(_GONE_TRIES):
            if not self._finds("processlist WHERE id", connection):
                break
            run(self._connection, f"SELECT SLEEP({_GONE_PAUSE_S})")
        return True

    def now_ms(self) -> int:
        """See ``Recovery``."""
        return self._session.table.now_ms(self._connection)

    def close(self) -> None:
        """See ``Recovery``."""
        self.limit.end()
        with suppress(Exception):
            self._connection.close()

    def _end(self, verb: str, xid: Xid) -> Ended:
        try:
            execute(self._connection, xa(verb, xid))
        except Exception as error:
            code = code_of(error)
            if code == NOTA:
                return Ended.NOT_KNOWN
            if code in ROLLED_BACK:
                return Ended.ROLLED_BACK
            raise
        return Ended.DONE

    def _is_in_transaction(self, connection: int) -> bool:
        if not self._finds("processlist WHERE id", connection):
            return False
        try:
            if self._finds(_TRANSACTIONS, connection):
                return True
            run(self._connection, f"SELECT SLEEP({_TRANSACTIONS_KEPT_S})")
            return self._finds(_TRANSACTIONS, connection)
        except Exception as error:
            if code_of(error) not in ACCESS_DENIED:
                raise
            # Without the privilege PROCESS a user sees its own sessions only, and not what they hold.
            return True

    def _finds(self, where: str, number: int) -> bool:
        return bool(run(self._connection, f"SELECT 1 FROM information_schema.{where} = {int(number)}")[0])  # noqa: S608


class MySQLResource(DatabaseResource[MySQLSession]):
    """A MySQL or MariaDB database that takes part in two-phase commits. See ``resource_ports.XAResource``.

    Args:
        name: as it shows in ``txmq tx list``; stored in the database at ``install``.
        connect: makes a MySQLdb connection, not in autocommit; called whenever one more is needed, by any thread.
            The server ends one that stands still in a branch for longer than its block's timeout (``IdleLimit``).
        table: name of the marker table, and of ``<table>_identity``.
        marker: put a marker row into each branch: it proves the branch's outcome. Without, a decided branch that the
            database does not know is reported as a hazard.
        allow_weak_durability: accept a server that may lose an acknowledged prepare or commit.
        ignore_tables: tables (``table``, ``schema.table`` or ``schema.*``) that no transaction writes to: theirs
            may be an engine that cannot roll back.

    Thread safety: yes.
    """

    def __init__(
        self, name: str, connect: Callable[[], Any], *, table: str = "txmq_marker", marker: bool = True,
        allow_weak_durability: bool = False, ignore_tables: Collection[str] = (), clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:  # fmt: skip
        mysql_driver()
        demands = Demands(allow_weak_durability, ignore_tables, two_phase=True)
        super().__init__(name, connect, table, None, demands, clock, random)
        self.has_marker = marker
        self._is_server_checked = False
        self.opens_aside = True  # mysqlclient's connections may change threads

    def using(self, connection: Any) -> UsedXAConnection:
        """This resource with a connection of the caller's, to be enlisted in place of one made by ``connect``.

        The connection stays the caller's, and is given back idle. It is closed only if a branch on it could not be
        ended, or a task was cancelled while a statement ran on it.
        """
        return UsedXAConnection(self, connection)

    def enlist(self, cluster: str, txid: str, timeout_s: float, connection: Any = None) -> MySQLBranch:
        """Begin a branch. See ``XAResource``."""
        TxId.parse(txid)
        until = self.clock.monotonic() + timeout_s
        if connection is not None:
            return self._enlist_lent(cluster, txid, timeout_s, connection)
        while (session := self._pool.take()) is not None:
            try:
                return self._begin(session, txid, timeout_s)
            except BaseException as error:
                close_connection(session.connection)
                if not isinstance(error, Exception) or not session.table.dialect.is_lost(session.connection, error):
                    raise
        session = self._open_for_block(cluster, timeout_s)
        try:
            return self._begin(session, txid, until - self.clock.monotonic())
        except BaseException:
            close_connection(session.connection)
            raise

    def _enlist_lent(self, cluster: str, txid: str, timeout_s: float, given: Any) -> MySQLBranch:
        with self._lent_for_block(given, timeout_s) as connection:
            session = self._lent.recall(connection, cluster)
            if not isinstance(session, MySQLSession):
                session = self._verified(connection, cluster)
            else:
                self.installation.require_idle(connection, session.table)
            branch = self._begin(session, txid, timeout_s, is_own=False)
            self._lent.remember(session, cluster)
        return branch

    def open_recovery(self, cluster: str) -> MySQLRecovery:
        """A connection for a resolver. See ``XAResource``."""
        session = self._open_for_resolver(cluster, OPEN_S_MAX)
        try:
            return MySQLRecovery(session, self.name, self.installation.required_uuid, cluster)
        except BaseException:
            close_connection(session.connection)
            raise

    def _begin(self, session: MySQLSession, txid: str, timeout_s: float, *, is_own: bool = True) -> MySQLBranch:
        limit = CallLimit(session.descriptor)
        limit.begin(max(timeout_s, WAIT_S_MIN))
        try:
            with limit:
                return self._begun(session, txid, timeout_s, limit, is_own=is_own)
        except BaseException as error:
            limit.end()
            if limit.has_passed and isinstance(error, Exception):
                raise caused(TransactionTimeoutError(NO_ANSWER, txid), error) from error
            raise

    def _begun(
        self, session: MySQLSession, txid: str, timeout_s: float, limit: CallLimit, *, is_own: bool
    ) -> MySQLBranch:  # fmt: skip
        if is_own:
            session.idle_limit.set(session.connection, timeout_s)
        deadline_ms = self.installation.deadline_ms(session, timeout_s)
        committed_at, session.committed_at = session.committed_at, float("-inf")
        is_fresh = self.clock.monotonic() < committed_at + FRESH_S
        pipelines_start = is_own and is_fresh and session.may_pipeline_start and self.has_marker
        return MySQLBranch(self, session, txid, deadline_ms, limit, is_own=is_own, pipelines_start=pipelines_start)

    def _drawn(self, cluster: str) -> MySQLRecovery:
        return self.open_recovery(cluster)

    def _check_driver(self, connection: Any) -> None:
        require_driver(connection, self.name)

    def _verified(self, connection: Any, cluster: str | None) -> MySQLSession:
        self._check_driver(connection)
        session = MySQLSession(self.installation.verify(connection, cluster), Server(connection))
        if not self._is_server_checked:
            self._check_server(session)
            self._is_server_checked = True
        return session

    def _check_server(self, session: MySQLSession) -> None:
        why = why_no_xa(session.connection)
        if why is not None:
            raise ConfigError(f"resource {self.name!r}: {why}; LastResource works there")
        listed_xids(session.connection, is_mariadb=session.server.is_mariadb)  # may this user?
        warn_of_binary_log(session.connection, self.name)
