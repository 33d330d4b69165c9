"""Has MySQL and MariaDB end the session of a client that stands still in a transaction: its locks are let go of.

Theory of operation. The server closes a connection on which no statement came for so long: MariaDB if it is in a
transaction (``idle_transaction_timeout``; an XA branch counts, and stays if it is prepared; so does a transaction that
was begun ahead of its block), MySQL in any case (``wait_timeout``). A pooled connection that was idle for longer has
ended, and another one is taken. Both are variables of the session, set to the block's timeout, rounded up to a power of
two: a connection is told once, as a rule. PostgreSQL is told by each transaction (``Dialect.limits_idle``). A smaller
limit, which the server or ``connect`` has set, stays.

Sources: MariaDB 10.3, "idle_transaction_timeout"; MySQL 8.0 Reference Manual, "wait_timeout".
"""

from __future__ import annotations

from typing import Final

from txmq.xa.database.dbapi import Connection, run
from txmq.xa.database.dialects import mysql_variables

IDLE_S_MAX: Final = 1 << 21  # 24 days, as PostgreSQL knows in ms; the others know more
_MARIADB: Final = "idle_transaction_timeout"
_MYSQL: Final = "wait_timeout"


def idle_s(timeout_s: float) -> int:
    """For how long a client may be idle in a block with this timeout: for longer than that, at most twice as long."""
    return min(1 << max(int(timeout_s), 0).bit_length(), IDLE_S_MAX)


class IdleLimit:
    """What one connection was told. The connection is one of MySQL or MariaDB."""

    __slots__ = ("_given_s", "_idle_s", "_variable")

    def __init__(self) -> None:
        self._variable, self._given_s, self._idle_s = "", 0, 0

    def set(self, connection: Connection, timeout_s: float) -> bool:
        """Have the session ended that is idle for longer than a block of ``timeout_s`` may be.

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
        run(connection, f"SET SESSION {self._variable} = {min(wanted_s, self._given_s)}")
        connection.rollback()  # a question began a transaction
        self._idle_s = wanted_s
        return True
