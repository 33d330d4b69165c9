"""Offsets that a transaction over homes saves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

from tools.simulated.broker import SimulatedBroker
from tools.simulated.cluster import SimulatedCluster
from txmq.client.transaction.block import Transaction, TransactionAcks
from txmq.model import Outcome
from txmq.protocol.group_rows import OffsetRow


def test_each_home_saves_the_offsets_of_its_own_partitions() -> None:
    cluster = SimulatedCluster()
    for home in cluster.homes:
        home.call("group", "join", "g", extensions={"member": "m", "topics": "orders"}, body=[b"[]"])
    consumer = Consumer(cluster)
    with Transaction(cluster, cluster) as tx:
        for partition in (2, 0):
            tx.ack(consumer.delivered(partition))
        tx.send("orders", b"1", key=b"\x01")
    assert [saved(home) for home in cluster.homes] == [
        [("commit", [["g", 7, [["orders", 0, 1, 11, None]]]])],
        [],
        [("prepare", [["g", 7, [["orders", 2, 1, 11, None]]]])],
    ]
    assert consumer.ended == [Outcome.COMMITTED]
    cluster.talk()
    cluster.check()


def saved(home: SimulatedBroker) -> list[tuple[str, Any]]:
    """The requests that brought offsets to a home, and these."""
    found = ((sent, re.search(r" offsets=(\d+)", sent.line)) for sent in home.sent)
    return [(sent.verb, json.loads(sent.body[: int(match[1])])) for sent, match in found if match]


def test_next_acknowledgement_waits_for_the_answer_to_the_one_before() -> None:
    cluster, waits = SimulatedCluster(), list[float]()
    consumer = Consumer(cluster)
    consumer.earlier = TransactionAcks(cluster, waits.append)
    acks = TransactionAcks(cluster, waits.append)
    acks.add(consumer.delivered(0))
    assert waits == [cluster.clock.monotonic() + cluster.timeout]
    consumer.earlier = acks
    acks.add(consumer.delivered(0))
    assert len(waits) == 1


class Consumer:
    """A consumer's pending acknowledgements, as a block sees them."""

    def __init__(self, client: SimulatedCluster) -> None:
        self.client, self.group, self.pending_acks = client, "g", self
        self.ended: list[Outcome] = []
        self.earlier: TransactionAcks | None = None

    def delivered(self, partition: int) -> Any:
        return SimpleNamespace(consumer=self, topic="orders", partition=partition)

    def saving(self, _message: Any) -> TransactionAcks | None:
        return self.earlier

    def pending_ack(self, message: Any, _owner: object) -> Any:
        return Consumed((message.topic, message.partition))

    def look(self, partitions: Iterable[Any], _owner: object) -> tuple[int, list[OffsetRow]]:
        return 7, [OffsetRow(consumed.slot[0], consumed.slot[1], 1, 11, None) for consumed in partitions]

    def end(self, _partitions: Iterable[Any], _owner: object, outcome: Outcome, _rows: Iterable[OffsetRow]) -> None:
        self.ended.append(outcome)


class Consumed(NamedTuple):
    """A partition of the consumer."""

    slot: tuple[str, int]
