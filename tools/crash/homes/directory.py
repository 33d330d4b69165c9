"""The world of the campaign over homes: topics that are spread over two brokers, a SQLite file, a MariaDB server.

By the last letter of an operation's id: local (T) and last-resource (L) transactions, XA (X), branches of an external
transaction manager (F), consumed and produced in one (A), half messages (H). The row of F is the manager's decision,
that of H is what the checker looks for.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import MySQLdb

import txmq
from tools.crash.directory import ORDERS, PAYMENTS, RESOURCE, CampaignDirectory, installed
from tools.crash.doors import Grant, may
from tools.crash.xa.directory import listed_by, mysql_resource, start_bank
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import MySQLResource

INBOX, DONE = "inbox", "done"  # an output in DONE has its input's value as its key
HOMES_PARTITIONS: Final = {ORDERS: 2, PAYMENTS: 2, INBOX: 2, DONE: 2}
INPUTS: Final = 5000
GROUP, CHECKERS = "billing", "shop"
BANK: Final = "bank"
XA, EXTERNAL, ACKED, HALF = "X", "F", "A", "H"
COMMIT, ROLLBACK = "commit", "rollback"


class HomesCampaignDirectory(CampaignDirectory):
    """One campaign's directory; the server runs in the process that called ``create``."""

    @property
    def partitions(self) -> Mapping[str, int]:
        return HOMES_PARTITIONS

    @property
    def _bank(self) -> Path:
        return self.directory / "bank.json"

    def make_databases(self) -> None:
        super().make_databases()
        with closing(sqlite3.connect(self.database)) as connection:
            connection.execute("CREATE TABLE halves (id TEXT PRIMARY KEY, outcome TEXT NOT NULL)")
        server = _servers[self.directory] = start_bank(self.directory / "db")
        self._bank.write_text(json.dumps(server.connect_arguments()), "utf-8")

    def resolver_resources(self) -> str:
        return f"{super().resolver_resources()}\n{mysql_resource(BANK, self._connect_arguments())}"

    def _connect_arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._bank.read_text("utf-8"))
        return found

    def bank(self) -> MySQLResource:
        """The server as an XA resource."""
        return MySQLResource(BANK, connect=lambda: MySQLdb.connect(**self._connect_arguments()))

    def install(self, client: txmq.Client) -> dict[str, str]:
        return super().install(client) | installed(client, self.bank())

    def service_grants(self, databases: Iterable[str]) -> list[Grant]:
        written = may("write", "topic", (topic for topic in self.partitions if topic != INBOX))
        consumed = [Grant("read", "topic", INBOX), Grant("read", "group", GROUP)]
        return [
            *written,
            *consumed,
            Grant("read,settle", "group", CHECKERS),
            *may("install,settle", "resource", databases),
        ]

    def prepared(self) -> set[str]:
        return listed_by(_servers[self.directory])

    def close(self) -> None:
        server = _servers.pop(self.directory, None)
        if server is not None:
            server.kill()

    def rows(self) -> dict[str, list[tuple[str, str]]]:
        query = "SELECT rowid_text, k FROM entries ORDER BY version"
        rows = _servers[self.directory].execute(query)
        return {**super().rows(), BANK: [(str(row), str(key)) for row, key in rows]}

    def decide(self, operation: str, outcome: str) -> str:
        """Decide about an operation once and for all. A commit is also its row.

        Returns:
            What was decided, perhaps before.
        """
        with closing(sqlite3.connect(self.database, timeout=10.0)) as connection, connection:
            connection.execute("INSERT OR IGNORE INTO halves VALUES (?, ?)", (operation, outcome))
            ((decided,),) = connection.execute("SELECT outcome FROM halves WHERE id = ?", (operation,))
            if decided == COMMIT:
                connection.execute("INSERT OR IGNORE INTO orders (rowid_text, key) VALUES (?, '')", (operation,))
            return str(decided)

    def rows_of(self, operation: str) -> list[list[str]]:
        """Its row, as the history has it."""
        return [["row", RESOURCE, operation]]


_servers: dict[Path, MariaDB] = {}
