"""The outbox campaign's world: a broker, and two databases that keep messages while it is away.

Resources, by the last letter of an operation's id: ``orders-db``, a SQLite file (L), and ``ledger``, a MariaDB server
(M). Rows of ``ledger`` carry a version that their key's counter gave them under its lock. A topic without keys stands
beside the two with keys: what is sent to it waits for its whole partition.

A campaign is a sequence of *rounds*: behind a check the history, the rows and the offsets that count begin anew. They
do so behind a restore, too: a broker that is restored from a backup lacks what came after that.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import txmq
from tools.crash.directory import KEYS, LAST_RESOURCE, ORDERS, RESOURCE, CampaignDirectory, installed
from tools.crash.doors import Grant
from tools.crash.plan import WORKERS
from tools.crash.xa.directory import LEDGER, XaCampaignDirectory, mysql_resource
from txmq.client.transaction.background_resolver import resolver_of
from txmq.testing.checkers.events import Log
from txmq.xa import LastResource
from txmq.xa.database.marker_table import ENCLOSED
from txmq.xa.last_resource.outbox import OutboxOptions

PARCELS, NOTES = "parcels", "notes"  # the latter without keys
OUTBOX_PARTITIONS: Final = {ORDERS: 2, PARCELS: 2, NOTES: 1}
LEDGER_DB: Final = "ledger"
# Threads of a worker: what is added to its name, and its resource. Each resource has a client of its own: a block does
# not go to an outbox behind unanswered commits of the same client and another resource.
THREADS: Final = {"": LAST_RESOURCE, "m": LEDGER, "n": LEDGER}
# Shorter than the defaults, so that a paused broker is away soon, and slow ones trip the breaker.
OPTIONS: Final = OutboxOptions(away_after_ms=300, slow_after_ms=100)
When = Literal["away", "always"]
_SHARED = 4
_WAITING = "SELECT id FROM {}_outbox"
_MARKERS = {RESOURCE: "txmq_marker", LEDGER_DB: "txmq_ledger"}


class OutboxCampaignDirectory(XaCampaignDirectory):
    """One campaign's directory; the server runs in the process that called ``create``."""

    server_names = "a"

    @property
    def partitions(self) -> Mapping[str, int]:
        return OUTBOX_PARTITIONS

    def make_databases(self) -> None:
        CampaignDirectory.make_databases(self)
        super().make_databases()
        self.resting.mkdir()

    def resolver_resources(self) -> str:
        tables = CampaignDirectory.resolver_resources(self), mysql_resource(LEDGER_DB, self.connect_arguments()[0])
        return "\n".join(f"{table}outbox = true\n" for table in tables)

    def resource(self, when: When = "away") -> LastResource:
        database, options = str(self.database), replace(OPTIONS, when=when)
        return LastResource(RESOURCE, connect=lambda: sqlite3.connect(database, timeout=5.0), outbox=options)

    def ledger(self, when: When = "away") -> LastResource:
        table, options = _MARKERS[LEDGER_DB], replace(OPTIONS, when=when)
        return LastResource(LEDGER_DB, connect=lambda: self.connect(0), table=table, outbox=options)

    def install(self, client: txmq.Client) -> dict[str, str]:
        return installed(client, self.resource(), self.ledger())

    def resolver_grants(self, databases: Iterable[str]) -> list[Grant]:
        return self.service_grants(databases)  # it drains, too

    def introduce(self, client: txmq.Client) -> None:
        """A broker says of what went to an outbox behind its prepare that it was rolled back; the database knows."""
        for resource in (self.resource(), self.ledger()):
            resolver_of(client).add(resource)

    def prepared(self) -> set[str]:
        """What waits in the outboxes; nothing else is left in these databases."""
        return {f"{row} in {name}" for name, rows in self.waiting().items() for row in rows}

    def waiting(self) -> dict[str, list[str]]:
        """The rows in the outbox of each resource."""
        query = {name: _WAITING.format(table) for name, table in _MARKERS.items()}
        with closing(sqlite3.connect(self.database, timeout=5.0)) as connection:
            here = [str(row) for (row,) in connection.execute(query[RESOURCE])]
        return {RESOURCE: here, LEDGER_DB: [str(row) for (row,) in self.servers[0].execute(query[LEDGER_DB])]}

    def enclosed(self) -> dict[str, int]:
        """How many blocks of each resource have used the outbox always, lately."""
        query = {name: f"SELECT COUNT(*) FROM {table} WHERE outcome = '{ENCLOSED}'" for name, table in _MARKERS.items()}
        with closing(sqlite3.connect(self.database, timeout=5.0)) as connection:
            ((here,),) = connection.execute(query[RESOURCE]).fetchall()
        ((there,),) = self.servers[0].execute(query[LEDGER_DB])
        return {RESOURCE: int(here), LEDGER_DB: int(there)}

    def rows(self) -> dict[str, list[tuple[str, str]]]:
        found = self.servers[0].execute("SELECT rowid_text, k FROM entries ORDER BY k, version")
        return {**CampaignDirectory.rows(self), LEDGER_DB: [(str(row), str(key)) for row, key in found]}

    # --- rounds and rests --------------------------------------------------------------------------------------------

    def begin_round(self, offsets: Mapping[Log, int]) -> None:
        """From here on nothing earlier counts; the workers are at rest."""
        self.since, self.since_ns = offsets, time.monotonic_ns()
        with closing(sqlite3.connect(self.database, timeout=5.0)) as connection, connection:
            connection.execute("DELETE FROM orders")
        self.servers[0].execute("DELETE FROM entries")

    @property
    def resting(self) -> Path:
        """A folder: a file for each thread of a worker that is at rest."""
        return self.directory / "resting"

    @property
    def rest(self) -> Path:
        """As long as this file is there, workers rest."""
        return self.directory / "rest"

    def rest_while_told(self, name: str, pause: Callable[[float], bool]) -> None:
        """Called by a worker's thread between two operations.

        Args:
            name: the thread's.
            pause: waits for so many seconds; true at the end of the process.
        """
        if self.rest.exists():
            at_rest = self.resting / name
            at_rest.touch()
            while self.rest.exists() and not pause(_LOOK_S):
                """Wait."""
            at_rest.unlink()


_LOOK_S = 0.02


def keys_of(worker: int) -> tuple[str, ...]:
    """Keys that all workers share, and two of its own."""
    own = _SHARED + 2 * (worker % WORKERS)
    return (*KEYS[:_SHARED], *KEYS[own : own + 2])
