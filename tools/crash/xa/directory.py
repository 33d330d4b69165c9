"""The XA campaign's world: a broker and two MariaDB servers, a bank whose money is spread over both.

Resources: ``bank-a`` and ``bank-b``, the servers as XA resources; ``ledger``, server a as a last resource. Rows carry a
version that their key's counter gave them under its lock, so that the order of commits is known. An operation's id says
by its last letter which resources hold its row (``RESOURCES``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import MySQLdb

import txmq
from tools.crash.directory import CampaignDirectory, installed
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource, MySQLResource

TRANSFERS, RECEIPTS = "transfers", "receipts"
XA_PARTITIONS: Final = {TRANSFERS: 3, RECEIPTS: 2}
TRANSFER, SINGLE, LEDGER = "X", "Y", "M"
RESOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    TRANSFER: ("bank-a", "bank-b"), SINGLE: ("bank-b",), LEDGER: ("ledger",),
}  # fmt: skip
SERVER_OF: Final = {"bank-a": 0, "bank-b": 1, "ledger": 0}
ACCOUNTS, BALANCE = 12, 1000
TOTAL = 2 * ACCOUNTS * BALANCE
LOCK_WAIT_S = 2
_TABLES = (
    "CREATE TABLE entries (rowid_text VARCHAR(80) PRIMARY KEY, resource VARCHAR(20) NOT NULL, k VARCHAR(20) NOT NULL, "
    "version BIGINT NOT NULL) ENGINE=InnoDB CHARACTER SET ascii",
    "CREATE TABLE accounts (id INT PRIMARY KEY, k VARCHAR(20) NOT NULL UNIQUE, balance BIGINT NOT NULL, "
    "version BIGINT NOT NULL) ENGINE=InnoDB CHARACTER SET ascii",
)


class XaCampaignDirectory(CampaignDirectory):
    """One XA campaign's directory; the servers run in the process that called ``create``."""

    server_names = "ab"

    @property
    def partitions(self) -> Mapping[str, int]:
        return XA_PARTITIONS

    @property
    def _addresses(self) -> Path:
        return self.directory / "databases.json"

    def make_databases(self) -> None:
        self.servers.extend(start_bank(self.directory / f"db-{name}") for name in self.server_names)
        self._addresses.write_text(json.dumps([server.connect_arguments() for server in self.servers]), "utf-8")

    def resolver_resources(self) -> str:
        return "\n".join(mysql_resource(name, self.connect_arguments()[number]) for name, number in SERVER_OF.items())

    @property
    def servers(self) -> list[MariaDB]:
        """The servers this process started; there is one world a directory."""
        return _servers.setdefault(self.directory, [])

    def connect_arguments(self) -> list[dict[str, Any]]:
        """How any process reaches the servers."""
        found: list[dict[str, Any]] = json.loads(self._addresses.read_text("utf-8"))
        return found

    def connect(self, number: int) -> Any:
        """A new connection to a server."""
        return MySQLdb.connect(**self.connect_arguments()[number])

    def xa(self, name: str) -> MySQLResource:
        """A server as an XA resource."""
        return MySQLResource(name, connect=lambda: self.connect(SERVER_OF[name]))

    def ledger(self) -> LastResource:
        """Server a as a last resource, with tables of its own."""
        return LastResource("ledger", connect=lambda: self.connect(0), table="txmq_ledger")

    def install(self, client: txmq.Client) -> dict[str, str]:
        return installed(client, self.xa("bank-a"), self.xa("bank-b"), self.ledger())

    def bring_up(self) -> None:
        for server in self.servers:
            if not server.is_running:
                server.start()

    def close(self) -> None:
        for server in _servers.pop(self.directory, []):
            server.kill()

    def rows(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for resource, number in SERVER_OF.items():
            query = "SELECT rowid_text, k FROM entries WHERE resource = %s ORDER BY version"
            found[resource] = [(str(row), str(key)) for row, key in self.servers[number].execute(query, (resource,))]
        return found

    def total(self) -> int:
        """All the money."""
        return sum(int(server.execute("SELECT SUM(balance) FROM accounts")[0][0]) for server in self.servers)

    def prepared(self) -> set[str]:
        return {txid for server in self.servers for txid in listed_by(server)}


_servers: dict[Path, list[MariaDB]] = {}


def start_bank(directory: Path) -> MariaDB:
    """A new server with accounts."""
    server = MariaDB(directory, options=(f"--innodb-lock-wait-timeout={LOCK_WAIT_S}",)).start()
    for statement in _TABLES:
        server.execute(statement)
    for number in range(ACCOUNTS):
        server.execute("INSERT INTO accounts VALUES (%s, %s, %s, 0)", (number, f"k{number}", BALANCE))
    return server


def listed_by(server: MariaDB) -> set[str]:
    """Transactions with a prepared branch there."""
    found = set()
    for _format_id, size, _, both in server.execute("XA RECOVER"):
        text = both if isinstance(both, bytes) else both.encode()
        found.add(text[:size].decode())
    return found


def mysql_resource(name: str, database: dict[str, Any]) -> str:
    """A resource in the resolver's configuration."""
    kind = "last-resource" if name == "ledger" else "mysql-xa"
    connect = ", ".join(f"{key} = {json.dumps(value)}" for key, value in database.items())
    table = '\ntable = "txmq_ledger"' if name == "ledger" else ""
    return f'[[resource]]\nname = "{name}"\nkind = "{kind}"\ndriver = "MySQLdb"{table}\nconnect = {{ {connect} }}\n'
