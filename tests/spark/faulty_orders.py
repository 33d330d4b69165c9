"""Orders in MariaDB and their messages in a real topic, with faults of every kind planted among them.

Each fault is planted so that it is one finding and no other: they take disjoint orders, the orders that are swapped are
neighbours of one customer, and a transaction that is torn lacks one message. What is planted is kept as it must be
found: the kind, and the identity, the transaction, or the place.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import txmq
from txmq import Xid
from txmq.spark.audit.spec import Kind
from txmq.testing.processes.mariadb import MariaDB

TOPIC = "orders"
PARTITIONS = 4
CUSTOMERS = 1000
PER_TRANSACTION = 50
TABLE = (
    "CREATE TABLE orders (id BIGINT PRIMARY KEY, customer VARCHAR(20) NOT NULL, version BIGINT NOT NULL, "
    "amount DECIMAL(12,2) NOT NULL, created DATETIME(6) NOT NULL, txid VARCHAR(80))"
)

Planted = tuple[str, object]  # kind, and the identity, transaction or (partition, offset)


class Order(NamedTuple):
    """One order, as row and message have it."""

    id: int

    @property
    def customer(self) -> str:
        return f"c{self.id % CUSTOMERS}"

    @property
    def amount(self) -> str:
        return f"{self.id % 9973}.{self.id % 100:02d}"

    @property
    def pair(self) -> tuple[bytes, bytes]:
        return self.customer.encode(), json.dumps({"id": self.id, "amount": self.amount}).encode()


@dataclass(slots=True)
class FaultyOrders:
    """``orders`` orders with ``faults`` faults of every kind; see the module's docstring."""

    client: txmq.Client
    database: MariaDB
    orders: int
    faults: int
    seed: int = 1
    planted: set[Planted] = field(default_factory=set)
    hidden: set[tuple[int, int]] = field(default_factory=set)  # places that the reader is kept from: gaps
    started_ms: int = 0
    extra: Iterator[int] = field(init=False)  # ids that no order has

    def __post_init__(self) -> None:
        self.extra = itertools.count(self.orders)

    def make(self, directory: Path) -> None:
        """Send everything and load the table."""
        self.client.topics.create(TOPIC, partitions=PARTITIONS)
        self.database.execute(TABLE)
        chosen = self._chosen()
        self.started_ms = time.time_ns() // 1_000_000
        rows = directory / "rows.csv"
        with rows.open("w", encoding="utf-8") as file, self.client.producer() as producer:
            for line in self._sent(producer, chosen):
                file.write(line)
            for line in self._aged(producer):
                file.write(line)
        self._load(rows)
        rows.unlink()
        self._hang()

    def _chosen(self) -> dict[str, list[int]]:
        """Disjoint orders for each kind, at least two transactions apart."""
        rng = random.Random(self.seed)
        last = self.orders - 2 * CUSTOMERS
        wanted = ("torn", "duplicate", "swapped", "differs", "hidden", "forged", "slipped")
        slots = rng.sample(range(last // (2 * CUSTOMERS)), min(self.faults, last // (2 * CUSTOMERS)))
        places = [2 * CUSTOMERS * slot for slot in slots]
        chosen: dict[str, list[int]] = {kind: [] for kind in wanted}
        for number in range(self.faults):
            base = places[number % len(places)]
            # Customers apart by their place in the slot: no two faults share a customer there, or a transaction.
            lap = number // len(places)
            for place, kind in enumerate(wanted):
                chosen[kind].append(base + (lap * len(wanted) + place) * PER_TRANSACTION + PER_TRANSACTION // 2)
        return chosen

    def _sequence(self, chosen: dict[str, list[int]]) -> Iterator[Order]:
        """All orders as they are sent: those that are swapped stand in each other's place."""
        swapped = {order: order + CUSTOMERS for order in chosen["swapped"]}
        swapped |= {later: earlier for earlier, later in swapped.items()}
        self.planted |= {(Kind.OUT_OF_ORDER.value, str(order)) for order in chosen["swapped"]}
        return (Order(swapped.get(number, number)) for number in range(self.orders))

    def _sent(self, producer: txmq.Producer, chosen: dict[str, list[int]]) -> Iterator[str]:
        torn, differs = set(chosen["torn"]), set(chosen["differs"])
        plain = {kind: set(chosen[kind]) for kind in ("duplicate", "hidden", "forged", "slipped")}
        self.planted |= {(Kind.DIFFERS.value, str(order)) for order in differs}
        block: list[Order] = []
        for order in self._sequence(chosen):
            block.append(order)
            if len(block) < PER_TRANSACTION and order.id != self.orders - 1:
                continue
            with producer.transaction() as tx:
                producer.send_many(TOPIC, [each.pair for each in block if each.id not in torn])
            txid = str(tx.txid)
            if any(each.id in torn for each in block):
                self.planted.add((Kind.TORN.value, txid))
            yield from (_row(each, txid, "0.01" if each.id in differs else each.amount) for each in block)
            for each in block:
                yield from self._beside(producer, each, plain)
            block = []

    def _beside(self, producer: txmq.Producer, order: Order, plain: dict[str, set[int]]) -> Iterator[str]:
        """Faults that are messages or rows of their own."""
        if order.id in plain["duplicate"]:
            producer.send(TOPIC, order.pair[1], key=order.pair[0])
            self.planted.add((Kind.DUPLICATE.value, str(order.id)))
        if order.id in plain["hidden"]:
            extra = Order(next(self.extra))
            result = producer.send(TOPIC, extra.pair[1], key=extra.pair[0])
            assert result.offset is not None
            self.hidden.add((result.partition, result.offset))
            self.planted.add((Kind.GAP.value, (result.partition, result.offset)))
        if order.id in plain["forged"]:
            extra = Order(next(self.extra))
            producer.send(TOPIC, extra.pair[1], key=extra.pair[0])
            self.planted.add((Kind.PHANTOM.value, str(extra.id)))
        if order.id in plain["slipped"]:
            extra = Order(next(self.extra))
            self.planted.add((Kind.MISSING.value, str(extra.id)))
            yield _row(extra, f"slipped-in-{extra.id}", extra.amount)

    def _aged(self, producer: txmq.Producer) -> Iterator[str]:
        """Rows of yesterday whose messages come today."""
        for _ in range(self.faults):
            order = Order(next(self.extra))
            producer.send(TOPIC, order.pair[1], key=order.pair[0])
            self.planted.add((Kind.LATE.value, str(order.id)))
            yield _row(order, "\\N", order.amount, timedelta(days=1))

    def _load(self, rows: Path) -> None:
        self.database.execute(
            f"LOAD DATA INFILE '{rows}' INTO TABLE orders (id, customer, version, amount, created, txid)"
        )

    def _hang(self) -> None:
        """Transactions that nobody decides."""
        resource = self.client.xa_resource()
        with self.client.producer() as producer:
            for number in range(self.faults):
                xid = Xid(4711, b"audit-%d" % number, b"branch")
                resource.start(xid)
                producer.send(TOPIC, b'{"id": -1}', key=b"hangs")
                resource.end(xid)
                resource.prepare(xid)
        hanging = self.client.transactions.list("in-doubt")
        self.planted |= {(Kind.IN_DOUBT.value, str(row["txid"])) for row in hanging}


def _row(order: Order, txid: str, amount: str, age: timedelta = timedelta()) -> str:
    created = (datetime.now(UTC) - age).strftime("%Y-%m-%d %H:%M:%S.%f")
    return f"{order.id}\t{order.customer}\t{order.id // CUSTOMERS}\t{amount}\t{created}\t{txid}\n"


def found_of(findings: Sequence[dict[str, object]]) -> set[Planted]:
    """Findings, written as what was planted is."""
    found: set[Planted] = set()
    for line in findings:
        kind = str(line["kind"])
        if kind in (Kind.TORN.value, Kind.IN_DOUBT.value):
            found.add((kind, line["txid"]))
        elif kind == Kind.GAP.value:
            found.add((kind, (line["partition"], line["offset"])))
        else:
            found.add((kind, line["identity"]))
    return found
