"""What a saver makes of the broker's answer to ``group save``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tools.simulated.clock import SimClock
from tools.simulated.stand_in import StandIn
from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.group_member import GroupRequests
from txmq.client.consumer.offsets.offset_store import BrokerOffsetStore, NoOffsetStore, OffsetStore
from txmq.client.consumer.offsets.saver import OffsetSaver
from txmq.client.consumer.options import ConsumerOptions, ConsumerSettings, MemberSettings
from txmq.errors import StorageError
from txmq.runtime.logging import get_logger

A, B = ("orders", 0), ("orders", 1)
MEMBER = MemberSettings("g", "one", ("orders",), "sticky", 1.0, 6.0, 1.0)


class SaverFixture:
    """Two partitions under generation 3, with something to save, and a broker that refuses some."""

    def __init__(self, *refused: list[Any], store: OffsetStore | None = None) -> None:
        self.refused = refused
        self.meanwhile: Callable[[], None] = lambda: None
        settings = ConsumerSettings("g", ("orders",), "earliest", 5, ConsumerOptions())
        self.assignment = AssignedPartitions(None, settings, SimClock(), get_logger())
        requests = GroupRequests(StandIn(call=self.call), MEMBER)
        contents = StandIn(remove=lambda *_: None)
        kept_in = store if store is not None else BrokerOffsetStore(requests.save)
        self.saver = OffsetSaver(self.assignment, kept_in, contents, "g", get_logger())
        for slot in (A, B):
            self.assignment.partitions[slot] = ConsumedPartition(slot, 3, 10, 0)

    def call(self, *_: object, **__: object) -> bytes:
        """The broker's answer."""
        self.meanwhile()
        return json.dumps({"refused": self.refused}).encode()

    @property
    def saved(self) -> dict[tuple[str, int], int | None]:
        """What is consumed now, and what the group is taken to know of it."""
        return {slot: consumed.saved for slot, consumed in self.assignment.partitions.items()}


def test_a_partition_refused_under_a_newer_generation_is_lost() -> None:
    world = SaverFixture([*A, 4])
    assert world.saver.save() == {A}
    assert world.saved == {B: 10}


def test_a_refused_partition_that_was_handed_over_again_stays() -> None:
    world = SaverFixture([*A, 5])
    world.meanwhile = lambda: world.assignment.partitions.update({A: ConsumedPartition(A, 5, 10, 7)})
    assert world.saver.save() == {A}
    assert world.saved == {A: 7, B: 10}


@pytest.mark.parametrize("newest", [0, 3], ids=["nobody has it: join again", "a transaction holds it"])
def test_what_nobody_else_has_is_neither_saved_nor_lost(newest: int) -> None:
    """Else it would be begun anew, from the offset before that transaction, or without what is acknowledged by now."""
    world = SaverFixture([*A, newest])
    with pytest.raises(StorageError, match="orders-0"):
        world.saver.save()
    assert world.saved == {A: 0, B: 0}


def test_without_a_group_everything_counts_as_saved() -> None:
    world = SaverFixture([*A, 4], store=NoOffsetStore())
    assert world.saver.save() == ()
    assert world.saved == {A: 10, B: 10}
