"""Where new partitions of a topic are placed."""

from __future__ import annotations

import pytest

from txmq.errors import OverloadedError
from txmq.model import TopicConfig
from txmq.registry.cluster_metadata import HomeEntry, PlacedTopic
from txmq.registry.placement import Room
from txmq.registry.topics import Topic


def placed(name: str, topic_id: int, *homes: int) -> PlacedTopic:
    return PlacedTopic(Topic(topic_id, TopicConfig(name, partitions=len(homes))), homes, 1)


def test_spread_prefers_homes_with_few_partitions() -> None:
    homes = [HomeEntry(home, "", 1, "address" if home < 4 else None) for home in (1, 2, 3, 4)]
    room = Room([placed("a", 1, 1, 1), placed("b", 2, 2)], homes, 3)
    assert room.spread((), 4, 100) == (3, 2, 1, 3)
    assert room.spread((3, 3), 2, 100) == (2, 1)
    assert Room([], [], 7).spread((), 2, 100) == (7, 7)  # the own leader's node may be gone for a moment
    assert Room([placed("a", 1, 1, 1)], homes, 3).spread((), 4, 2) == (2, 3, 2, 3)
    with pytest.raises(OverloadedError, match="partitions_max 2 would be passed"):
        Room([placed("a", 1, 1, 1)], homes, 3).spread((), 5, 2)
