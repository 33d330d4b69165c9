"""What was tried and what was told, by clients of either kind; and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.images.node import Node
from txmq.model import TopicPartition
from txmq.runtime.tls import ClientTls

from .bank import Bank
from .broker import Broker
from .database import Database
from .rows import Rows
from .world import Simulation, Violation

XA_ROW = "xa-"


@dataclass(slots=True)
class Put:
    """What a client knows of one batch."""

    place: TopicPartition
    values: tuple[bytes, ...]
    told: int | str = "unknown"  # the base offset, "spooled", "not stored" or "unknown"


@dataclass(slots=True)
class Transaction:
    """What a client knows of one transaction."""

    txid: str
    parts: list[tuple[TopicPartition, tuple[bytes, ...]]]
    told: str = "unknown"
    lines: bytes = b""
    row: str = ""
    key: int = 0
    version: int = 0
    is_xa: bool = False
    placed: dict[bytes, tuple[TopicPartition, int]] = field(default_factory=dict)  # value: its place, as told


@dataclass(slots=True)
class History:
    """Everything that was tried, and what was told."""

    puts: list[Put] = field(default_factory=list)
    transactions: dict[str, Transaction] = field(default_factory=dict)
    seen: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # topic id, partition, offset
    topics: dict[str, int] = field(default_factory=dict)  # topic: partitions
    deleted: set[str] = field(default_factory=set)
    owners: dict[bytes, Transaction] = field(default_factory=dict)  # value: whose it is


@dataclass(slots=True)
class Shared:
    """What all clients of a world share.

    Attributes:
        brokers: all of them; ``broker`` is the first one.
        addresses: where real clients look for a broker.
        user: the one that everybody logs in as; empty: there are no users.
        tls: how real clients speak to brokers; None: in plaintext.
    """

    world: Simulation
    broker: Broker
    database: Database
    history: History
    rows: Rows | None = None  # the real clients' database
    bank: Bank | None = None  # their XA databases
    stopping: bool = False
    brokers: Sequence[Broker] = ()
    addresses: Sequence[tuple[str, int]] = (("broker", 8123),)
    user: str = ""
    tls: ClientTls | None = None

    @property
    def may_forget(self) -> bool:
        """Whether a broker may have lost what it acknowledged."""
        return any(broker.may_forget for broker in self.brokers)

    def nodes(self) -> list[Node]:
        """What lives at the end: every broker."""
        nodes = [broker.node for broker in self.brokers if broker.node is not None]
        if len(nodes) < len(self.brokers):
            raise Violation("a broker is not there after healing")
        return nodes

    def check_row(self, value: bytes) -> None:
        """P4: what a reader sees has its row by now."""
        transaction = self.history.owners.get(value)
        if transaction is None or not transaction.row:
            return
        is_there = self._of_bank(transaction.row).is_readable if transaction.is_xa else self.has_row
        if not is_there(transaction.row):
            raise Violation(f"P4: {value[:12]!r} is visible before its row")

    def has_row(self, row: str) -> bool:
        """Whether a row is committed, in whatever database."""
        if row.startswith(XA_ROW):
            return self._of_bank(row).has(row)
        return row in self.database.rows or (self.rows is not None and self.rows.has(row))

    def _of_bank(self, _row: str) -> Bank:
        assert self.bank is not None
        return self.bank
