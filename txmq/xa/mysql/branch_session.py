"""What is known of a connection to MySQL or MariaDB that serves branches. Not compiled: its base is not either."""

from __future__ import annotations

from txmq.xa.database.installation import DatabaseSession
from txmq.xa.database.mysql_driver import mysql_driver
from txmq.xa.database.mysql_server import Server
from txmq.xa.database.thread_connection import of_driver


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
