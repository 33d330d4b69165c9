"""Has MySQL and MariaDB end the session of a client that stands still in a transaction: its locks are let go of.

Theory of operation. The server closes a connection on which no statement came for so long: MariaDB if it is in a
transaction (``idle_transaction_timeout``; an XA branch counts, and stays if it is prepared; so does a transaction that
was begun ahead of its block), MySQL in any case (``wait_timeout``). A pooled connection that was idle for longer has
ended, and another one is taken. Both are variables of the session, set to the block's timeout, rounded up to a power of
two: a connection is told once, as a rule, and keeps it. PostgreSQL is told in each transaction, by statements that take
no snapshot: the body's first query does. A smaller limit, which the server or ``connect`` has set, stays.

Sources: MariaDB 10.3, "idle_transaction_timeout"; MySQL 8.0 Reference Manual, "wait_timeout"; PostgreSQL 15, "Setting
Parameters", "SET TRANSACTION".
"""

from __future__ import annotations

from typing import Final

from txmq.xa.database.dbapi import Connection, run, text
from txmq.xa.database.dialects import mysql_variables

IDLE_S_MAX: Final = 1 << 21  # 24 days, as PostgreSQL knows in ms; the others know more
_MARIADB: Final = "idle_transaction_timeout"
_MYSQL: Final = "wait_timeout"
_POSTGRESQL: Final = "idle_in_transaction_session_timeout"
_UNITS_S: Final = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "ms": 0.001, "s": 1.0}


def idle_s(timeout_s: float) -> int:
    """For how long a client may be idle in a block with this timeout: for longer than that, at most twice as long."""
    return min(1 << max(int(timeout_s), 0).bit_length(), IDLE_S_MAX)


class IdleLimit:
    """What one connection was told."""

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
