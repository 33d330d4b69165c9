"""A resolver's connection to the XA branches in MySQL or MariaDB.

Theory of operation. The connection is in autocommit: on any other one MariaDB refuses to end a branch that it did not
begin (XAER_OUTSIDE). It waits for locks a second only, and leaves no locks on gaps between marker rows.

"Not known" (XAER_NOTA) is answered for a branch that has ended and for one whose owner's connection lives; only a later
``prepared`` tells them apart, and ``kill`` ends the owner's session.

An XA COMMIT that comes while the owner's session ends may be acknowledged without a commit (MariaDB 10.11): the server
strikes the branch from its list, and InnoDB keeps it prepared, with its locks, until the server is restarted; then it
is listed again. So ``kill`` waits until the session has gone, and ``commit`` waits for the lock on the branch's marker
row before it says DONE. Without the row there is no proof, and none is asked for.

Invariants:
    * nothing but prepared branches with txmq's format id, this cluster and this database's uuid is listed;
    * a rollback is not durable when it is acknowledged: it is after ``force``;
    * what a marker row says is durable before it is answered (``marker.read_durably``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from txmq.runtime.logging import get_logger
from txmq.xa.database.dbapi import limit_of, run
from txmq.xa.database.dialects import code_of, prepare_for_resolver
from txmq.xa.database.mysql_server import (
    ACCESS_DENIED,
    NOTA,
    ROLLED_BACK,
    UNKNOWN_THREAD,
    execute,
    listed_xids,
    xa,
)
from txmq.xa.database.resource import OPEN_S_MAX
from txmq.xa.database.token_table import TokenRow, TokenTable
from txmq.xa.mysql.branch_session import MySQLSession
from txmq.xa.two_phase.resource_ports import Ended, ListedXid, listed_xid
from txmq.xid import Xid

_TRANSACTIONS = "innodb_trx WHERE trx_mysql_thread_id"
_GONE_TRIES, _GONE_PAUSE_S = 400, 0.005  # until a killed session has ended
_TRANSACTIONS_KEPT_S = 0.15  # InnoDB answers from its cache for 0.1 s after a question


class MySQLRecovery:
    """See ``resource_ports.Recovery``.

    Args:
        session: verified, idle; from now on this object's.
        cluster: 16 hex digits.
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
