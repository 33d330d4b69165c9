"""A database of its own on a real MariaDB, as an XA resource: what the tests of ``MySQLResource`` share."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import MySQLdb

from txmq.testing.eventually import eventually
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import MySQLResource
from txmq.xa.mysql.branch import MySQLBranch
from txmq.xa.mysql.resource import MySQLRecovery
from txmq.xid import TxId

from .mysql_database import MySQLDatabase

CLUSTER = "00000000000000c1"
NAME = "orders-db"
_numbers = itertools.count(1)


def new_txid() -> str:
    """A transaction id of our cluster."""
    return str(TxId(0xC1, 0xB1, 1, next(_numbers)))


class MySQLOrders(MySQLDatabase):
    """One database with a table ``orders``, installed as a resource."""

    def __init__(self, server: MariaDB, **options: Any) -> None:
        super().__init__(server)
        self.execute("CREATE TABLE orders (id INT PRIMARY KEY, value VARCHAR(200)) ENGINE=InnoDB")
        self.resource = self.new_resource(**options)
        self.resource.install()

    def new_resource(self, **options: Any) -> MySQLResource:
        """The same database as another process sees it."""
        return MySQLResource(NAME, connect=self.connect, **options)

    def enlist(self, timeout: float = 30.0, connection: Any = None, txid: str | None = None) -> MySQLBranch:
        """Begin a branch."""
        return self.resource.enlist(CLUSTER, txid or new_txid(), timeout, connection)

    def insert(self, branch: MySQLBranch, number: int) -> None:
        """A row in the body of a block."""
        branch.connection.cursor().execute("INSERT INTO orders VALUES (%s, 'x')", (number,))

    def prepared(self, number: int, connection: Any = None) -> MySQLBranch:
        """A branch with one row, prepared."""
        branch = self.enlist(connection=connection)
        self.insert(branch, number)
        branch.end_body()
        branch.prepare()
        return branch

    def recovery(self) -> MySQLRecovery:
        """A recovery, in another process."""
        return self.new_resource().open_recovery(CLUSTER)

    def let_recover(self, user: str) -> None:
        """Grant what XA RECOVER needs."""
        if self.server.program.recovery_privilege:
            self.execute(f"GRANT {self.server.program.recovery_privilege} ON *.* TO {user}")

    def rows(self) -> list[int]:
        """The committed rows."""
        return [number for (number,) in self.execute("SELECT id FROM orders ORDER BY id")]

    def markers(self) -> dict[str, str]:
        """The marker table."""
        return dict(self.execute("SELECT txid, outcome FROM txmq_marker WHERE outcome <> 'touch'"))

    def listed(self) -> list[tuple[Any, ...]]:
        """All prepared branches of the server."""
        return self.execute("XA RECOVER")

    def end_session(self, branch: MySQLBranch) -> None:
        """The owner dies: its connection ends, and the server has noticed."""
        number = branch.details()["connection"]
        branch.abandon()
        eventually(
            lambda: not self.execute(f"SELECT 1 FROM information_schema.processlist WHERE id = {number}"),
            "the server has ended the session",
        )

    def resolve_everything(self) -> None:
        """Roll back what a test left prepared, so that the next one starts on a clean server."""
        self.disconnect()
        eventually(self._nothing_is_prepared, "nothing is prepared")

    def _nothing_is_prepared(self) -> bool:
        for xid in self.server.prepared():
            with suppress(MySQLdb.Error):  # its owner's session has not ended yet
                self.execute(f"XA ROLLBACK {xid}")
        return not self.listed()
