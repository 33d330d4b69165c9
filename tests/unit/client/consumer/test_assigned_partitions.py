"""Delivery from several partitions: a consumer taking one by one stays with one for a short while, and no longer."""

from __future__ import annotations

from collections.abc import Callable

from tools.simulated.clock import SimClock
from txmq.client.consumer.assigned_partitions import TURN_S, AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.options import ConsumerOptions, ConsumerSettings
from txmq.model import Message
from txmq.runtime.logging import get_logger


def _share(*counts: int) -> AssignedPartitions:
    """Partitions with so many messages ahead."""
    settings = ConsumerSettings("g", ("orders",), "earliest", 5, ConsumerOptions())
    share = AssignedPartitions("consumer", settings, SimClock(), get_logger())
    for partition, count in enumerate(counts):
        slot = ("orders", partition)
        consumed = share.partitions[slot] = ConsumedPartition(slot, 1, 0, 0)
        consumed.fetch = 1
        messages = [Message("orders", partition, at, b"k", b"v", {}, None, 1, None) for at in range(count)]
        consumed.fetched(1, messages)
    return share


def _places(*messages: Message | None) -> list[tuple[int, int] | None]:
    return [None if message is None else (message.partition, message.offset) for message in messages]


def test_turn_of_one_partition_ends_in_time() -> None:
    share = _share(3, 3)
    assert share.take_again(0.0) is None
    (first,) = share.take(1, 0.0)
    share.begin_turn(first, 0.0)
    following = [share.take_again(TURN_S / 2), share.take_again(TURN_S)]
    (other,) = share.take(1, TURN_S)
    assert _places(first, *following, other) == [(0, 0), (0, 1), None, (1, 0)]
    assert following[0] is not None
    assert following[0].consumer == "consumer"


def test_turn_ends_with_messages_retries_and_the_partition() -> None:
    share = _share(2)
    (first,) = share.take(1, 0.0)
    share.begin_turn(first, 0.0)
    consumed = share.partitions["orders", 0]
    slot = consumed.slot
    hindrances: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: consumed.retries.append((0.0, first)), consumed.retries.clear),
        (lambda: setattr(consumed, "is_busy", True), lambda: setattr(consumed, "is_busy", False)),
        (lambda: setattr(consumed, "is_paused", True), lambda: setattr(consumed, "is_paused", False)),
        (share.partitions.clear, lambda: share.partitions.update({slot: consumed})),
    ]
    for begin, end in hindrances:
        begin()
        assert share.take_again(0.0) is None
        end()
    assert _places(share.take_again(0.0), share.take_again(0.0)) == [(0, 1), None]
