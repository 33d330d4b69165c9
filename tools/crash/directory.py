"""What the crash campaign's processes agree on: names, files, and how an operation's identity is spelled.

An operation's id is ``<process>-<number><kind>``; its messages are ``<id>.<n>``, its row is ``<id>``. Whoever reads a
message can so tell, without asking anybody, which row must be readable.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import txmq
from tools.checkers.events import History, Log, merge, parse_history
from tools.crash.doors import Grant, may
from txmq.xa import LastResource, MySQLResource

ORDERS, PAYMENTS, AUDIT, SCRAP = "orders", "payments", "audit", "scrap"
PARTITIONS: Final = {ORDERS: 2, PAYMENTS: 3, AUDIT: 1, SCRAP: 1}
RESOURCE: Final = "orders-db"
KEYS: Final = tuple(f"k{number}" for number in range(12))
LAST_RESOURCE, LOCAL, PLAIN = "L", "T", "S"
# Small, so that files roll, checkpoints are taken and segments go within seconds.
BROKER_SETTINGS: Final = {
    "journal_file_size_bytes": 1 << 20,
    "group_size_bytes_max": 1 << 17,
    "request_size_bytes_max": 1 << 17,
    "batch_size_bytes_max": 1 << 17,
    "checkpoint_interval_bytes": 1 << 17,
    "checkpoint_interval_ms": 2000,
    "retention_check_interval_ms": 100,
    "default_segment_size_bytes": 1 << 16,
}
SCRAP_SETTINGS: Final = {"segment_size_bytes": 1 << 12, "retention_size_bytes": 1 << 14}


@dataclass(slots=True, eq=False)
class CampaignDirectory:
    """One campaign's directory.

    Attributes:
        since: offsets of partitions before which messages do not count; all count where none is given.
        since_ns: the same for operations, by the clock of the histories.
    """

    directory: Path
    since: Mapping[Log, int] = field(default_factory=dict)
    since_ns: int = 0

    @property
    def broker(self) -> Path:
        """The broker's data directory."""
        return self.directory / "broker"

    @property
    def database(self) -> Path:
        """The database that all workers share."""
        return self.directory / "orders.db"

    @property
    def histories(self) -> Path:
        """One file per process that ever ran."""
        return self.directory / "history"

    @property
    def resolver_config(self) -> Path:
        """For ``txmq resolver``."""
        return self.directory / "resolver.toml"

    def create(self, address: str) -> None:
        """Directory, databases and the resolver's configuration."""
        self.histories.mkdir()
        self.make_databases()
        self.resolver_config.write_text(f"bootstrap = {json.dumps(address)}\n\n{self.resolver_resources()}", "utf-8")

    def make_databases(self) -> None:
        """With their tables."""
        connection = sqlite3.connect(self.database)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE orders "
            "(id INTEGER PRIMARY KEY AUTOINCREMENT, rowid_text TEXT UNIQUE NOT NULL, key TEXT NOT NULL)"
        )
        connection.close()

    def resolver_resources(self) -> str:
        """The resources, as the resolver's configuration has them."""
        return (
            f'[[resource]]\nname = {json.dumps(RESOURCE)}\ndriver = "sqlite3"\n'
            f"connect = {{ database = {json.dumps(str(self.database))}, timeout = 2.0 }}\n"
        )

    @property
    def partitions(self) -> Mapping[str, int]:
        """The topics."""
        return PARTITIONS

    def install(self, client: txmq.Client) -> dict[str, str]:
        """The resources' tables; the uuid of each database, by the resource's name."""
        return installed(client, self.resource())

    # --- what users need, if there are any; databases are meant by their uuids -------------------------------------

    def service_grants(self, databases: Iterable[str]) -> list[Grant]:
        """Of a worker."""
        return [*may("write", "topic", self.partitions), *may("install,settle", "resource", databases)]

    def resolver_grants(self, databases: Iterable[str]) -> list[Grant]:
        """Of the resolver."""
        return may("settle", "resource", databases)

    def reader_grants(self) -> list[Grant]:
        """Of the reader."""
        return may("read", "topic", (topic for topic in self.partitions if topic != SCRAP))

    def introduce(self, client: txmq.Client) -> None:
        """Let a client know databases that have outcomes to tell; none by itself."""

    def prepared(self) -> set[str]:
        """Transactions with a prepared branch in some database."""
        return set()

    def bring_up(self) -> None:
        """Start the databases that died."""

    def close(self) -> None:
        """End the databases."""

    def rows(self) -> dict[str, list[tuple[str, str]]]:
        """All rows of every resource as (rowid, key), in the order of their commits."""
        with closing(sqlite3.connect(self.database)) as connection:
            return {RESOURCE: connection.execute("SELECT rowid_text, key FROM orders ORDER BY id").fetchall()}

    def resource(self) -> LastResource:
        """The shared database as a last resource."""
        database = str(self.database)
        return LastResource(RESOURCE, connect=lambda: sqlite3.connect(database, timeout=5.0))


def installed(client: txmq.Client, *resources: LastResource | MySQLResource) -> dict[str, str]:
    """Make the tables of resources; the uuid of each database, by the resource's name."""
    for resource in resources:
        resource.install(client)
    return {resource.name: str(resource.uuid) for resource in resources}


def read_history(world: CampaignDirectory) -> History:
    """What all processes of a campaign have written so far, as far as it counts; all faults do."""
    files = sorted(world.histories.iterdir())  # hundreds: read one by one, not held open together
    lines = merge([file.read_text("utf-8").splitlines(keepends=True) for file in files])
    return parse_history(line for line in lines if line["t"] >= world.since_ns or line["f"] == "nemesis")


class HistoryFile:
    """One process's lines. Each is one ``write``: SIGKILL cannot tear it, and what was written survives the process.

    No sync: the machine does not die in this campaign, only processes do.
    """

    def __init__(self, directory: Path, process: str) -> None:
        self.process = process
        self._file = os.open(directory / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def beside(self, process: str) -> HistoryFile:
        """The lines of a task of this process, in the same file."""
        found = copy(self)
        found.process = process
        return found

    def write(self, f: str, ty: str, id: str, v: Sequence[Any], **more: Any) -> None:
        """One line, stamped with the clock that all processes of this machine share."""
        line = {"t": time.monotonic_ns(), "p": self.process, "f": f, "ty": ty, "id": id, "v": v} | more
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
