"""What is known of a connection to MySQL or MariaDB that serves branches. Not compiled: its base is not either."""

from __future__ import annotations

from txmq.xa.database.installation import DatabaseSession
from txmq.xa.database.mysql_server import Server


class MySQLSession(DatabaseSession):
    """A verified connection, and the abilities of its server."""

    __slots__ = ("server",)

    def __init__(self, verified: DatabaseSession, server: Server) -> None:
        super().__init__(verified.connection, verified.table)
        self.clock_ahead_ms, self.checked, self.server = verified.clock_ahead_ms, verified.checked, server
