"""MySQL and MariaDB as an XA resource: branches of two-phase commits, through the driver mysqlclient.

Theory of operation. ``MySQLResource`` knows how to reach the database and its identity (``installation``), keeps idle
connections for all threads of a process, and begins branches on them (``branch``). One connection serves one branch
from XA START to its end. A resolver, which works for owners that have gone, has a connection of its own
(``xa_recover``).

A connection is verified before its first use. A pooled one is not asked again: if the server has ended it, XA START
says so, and the next connection is taken. One that has answered a moment ago is taken to be alive: there XA START goes
out with the body's first statement (``pipelined_xa_start``).

Invariants:
    * a forked child never uses, and never closes, its parent's connections;
    * what the server does not support or does not promise is refused or said before the first branch begins: Galera,
      weak durability, engines without rollback, missing privileges, the binary log (a warning).

The tests run against MariaDB 10.11, and by ``make test-mysql`` against MariaDB 11.8 and MySQL 9.7. MySQL differs: XA
RECOVER needs XA_RECOVER_ADMIN and gives binary xids with CONVERT XID, and a prepared branch leaves its connection
(``xa_detach_on_prepare``, since 8.0.29).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from txmq.errors import ConfigError, TransactionTimeoutError, caused
from txmq.runtime.call_limits import CallLimit
from txmq.runtime.ports import Clock, Random
from txmq.xa.database.connection_pool import close_connection
from txmq.xa.database.guarded_connection import NO_ANSWER
from txmq.xa.database.installation import Demands
from txmq.xa.database.mysql_driver import mysql_driver
from txmq.xa.database.mysql_server import Server, listed_xids, require_driver, warn_of_binary_log, why_no_xa
from txmq.xa.database.resource import OPEN_S_MAX, WAIT_S_MIN, DatabaseResource
from txmq.xa.mysql.branch import MySQLBranch
from txmq.xa.mysql.branch_session import MySQLSession
from txmq.xa.mysql.xa_recover import MySQLRecovery
from txmq.xa.two_phase.resource_ports import UsedXAConnection
from txmq.xid import TxId

FRESH_S = 0.1  # a connection that has committed so lately is taken to be alive; one that is not dooms one block


class MySQLResource(DatabaseResource[MySQLSession]):
    """A MySQL or MariaDB database that takes part in two-phase commits. See ``resource_ports.XAResource``.

    Args:
        name: as it shows in ``txmq tx list``; stored in the database at ``install``.
        connect: makes a MySQLdb connection, not in autocommit; called whenever one more is needed, by any thread.
            The server ends one that stands still in a branch for longer than its block's timeout (``idle_sessions``).
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
