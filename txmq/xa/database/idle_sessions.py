"""Has MySQL and MariaDB end the session of a client that stands still in a transaction: its locks are let go of.

Theory of operation. The server closes a connection on which no statement came for so long: MariaDB if it is in a
transaction (``idle_transaction_timeout``; an XA branch counts, and stays if it is prepared), MySQL in any case
(``wait_timeout``; a pooled connection that was idle for longer has ended, and another one is taken). Both are variables
of the session, set to the block's timeout, rounded up to a power of two: a connection is told once, as a rule.

Sources: MariaDB 10.3, "idle_transaction_timeout"; MySQL 8.0 Reference Manual, "wait_timeout".
"""

from __future__ import annotations

from typing import Final

from txmq.xa.database.dbapi import run
from txmq.xa.database.dialects import mysql_variables
from txmq.xa.database.installation import DatabaseSession

IDLE_S_MAX: Final = 1 << 24  # half a year; the server knows a year
_MARIADB: Final = "idle_transaction_timeout"


class IdleLimit:
    """What one connection was told. The connection is one of MySQL or MariaDB."""

    __slots__ = ("_idle_s", "_variable")

    def __init__(self) -> None:
        self._variable, self._idle_s = "", 0

    def set(self, session: DatabaseSession, timeout_s: float) -> None:
        """Have the session ended that is idle for longer than a block of ``timeout_s`` may be. Outside a transaction.

        Raises:
            the driver's error.
        """
        idle_s = min(1 << max(int(timeout_s), 0).bit_length(), IDLE_S_MAX)
        if idle_s == self._idle_s:
            return
        connection = session.connection
        if not self._variable:
            self._variable = _MARIADB if mysql_variables(connection, _MARIADB) else "wait_timeout"
        run(connection, f"SET SESSION {self._variable} = {idle_s}")
        connection.rollback()  # a question began a transaction
        self._idle_s = idle_s
