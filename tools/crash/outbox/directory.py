"""What the processes of the outbox campaign agree on: names, files, and how an operation's identity is spelled.

An operation's id is ``service-<database>.<run>.<thread>-<number><kind><count>``; its messages are ``<id>.<n>``, its
rows ``<id>/<n>``, one for each key. The kind says which of its messages are one unit: each alone, or all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import txmq
from tools.crash.directory import CampaignDirectory
from tools.crash.doors import Grant, may
from tools.crash.outbox.databases import Place

SERVICE: Final = "service"
KEYS: Final = tuple(f"k{number}" for number in range(6))
ALONE, MANY, JOINED, BLOCK = "B", "M", "J", "T"  # ways to send: ``Service`` has them
KINDS: Final = (ALONE, MANY, JOINED, BLOCK)
_OPERATION = re.compile(r"([A-Z])([0-9]+)$")
_TABLES = (
    "CREATE TABLE counters (k VARCHAR(20) PRIMARY KEY, version BIGINT NOT NULL)",
    "CREATE TABLE orders (rowid_text VARCHAR(80) PRIMARY KEY, k VARCHAR(20) NOT NULL, version BIGINT NOT NULL)",
)


class OutboxCampaignDirectory(CampaignDirectory):
    """One campaign's directory. Its databases belong to the process of the campaign."""

    @property
    def _places(self) -> Path:
        return self.directory / "databases.json"

    def write_places(self, places: Mapping[str, Place]) -> None:
        """Where services and reader find the databases."""
        self._places.write_text(json.dumps(places), "utf-8")

    @property
    def places(self) -> dict[str, Place]:
        """The databases, by name; an outbox has the name of its database."""
        return {name: Place(*place) for name, place in json.loads(self._places.read_text("utf-8")).items()}

    @property
    def partitions(self) -> Mapping[str, int]:
        return {topic: count for name in self.places for topic, count in topics_of(name).items()}

    def config(self, name: str) -> Path:
        """Of a relay, for ``txmq outbox``."""
        return self.directory / f"{name}.toml"

    def write_config(self, name: str, address: str, places: Mapping[str, Place]) -> None:
        """The file that a relay is started with."""
        outboxes = "\n".join(place.toml(outbox) for outbox, place in places.items())
        self.config(name).write_text(f"bootstrap = {json.dumps(address)}\n\n{outboxes}", "utf-8")

    def rows(self) -> dict[str, list[tuple[str, str]]]:
        question = "SELECT rowid_text, k FROM orders ORDER BY version"
        return {name: [(str(row), str(key)) for row, key in place.ask(question)] for name, place in self.places.items()}

    def relay_grants(self, uuids: Sequence[str]) -> list[Grant]:
        """Of the user of all relays."""
        return [*may("write", "topic", self.partitions), *may("install", "resource", uuids)]


def topics_of(name: str) -> dict[str, int]:
    """The topics of an outbox: what is sent through another one has no order with it."""
    return {f"orders-{name}": 3, f"notes-{name}": 1}


def make_tables(name: str, place: Place) -> str:
    """The service's tables and the outbox's, in an empty database; the outbox's uuid."""
    with closing(place.connect()) as connection:
        for statement in _TABLES:
            place.run(connection, statement)
        for key in KEYS:
            place.run(connection, "INSERT INTO counters (k, version) VALUES (?, 0)", (key,))
        connection.commit()
        txmq.Outbox(name).install(connection)
        ((uuid,),) = place.run(connection, "SELECT uuid FROM txmq_outbox_relay")
    return str(uuid)


# --- identities -------------------------------------------------------------------------------------------------------


def operation_of(value: str) -> str:
    """The operation of a message."""
    return value.rpartition(".")[0]


def database_of(operation: str) -> str:
    """The database of an operation; empty if it is not a service's."""
    head, _, rest = operation.partition("-")
    return rest.partition(".")[0] if head == SERVICE else ""


def count_of_unit(operation: str) -> int:
    """How many messages readers see together with one of this operation."""
    found = _OPERATION.search(operation)
    return 1 if found is None or found[1] == ALONE else int(found[2])
