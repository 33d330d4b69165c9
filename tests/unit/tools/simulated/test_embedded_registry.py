"""The embedded registry keeps the contract, for one broker."""

from __future__ import annotations

import pytest

from tests.unit.registry.contract import CLUSTER, A, B, RegistryContract, candidate, topic
from tools.simulated.embedded_registry import EmbeddedRegistry
from txmq.errors import RegistryError
from txmq.registry.cluster_metadata import PlacedTopic, Registry, TopicMap


class TestEmbeddedRegistry(RegistryContract):
    """See ``RegistryContract``."""

    def fresh(self) -> Registry:
        """See ``RegistryContract``."""
        return EmbeddedRegistry(CLUSTER, A)


def test_it_begins_with_the_topics_of_the_journal() -> None:
    registry = EmbeddedRegistry(CLUSTER, A, [topic(5), topic(3, "audit", 1)])
    placed = (PlacedTopic(topic(3, "audit", 1), (A,), 0), PlacedTopic(topic(5), (A, A), 0))
    assert registry.topics() == TopicMap(0, placed, ())
    assert registry.reserve_topic_ids(1) == range(6, 7)


def test_there_is_no_other_home() -> None:
    with pytest.raises(RegistryError, match=r"home 0+b0 is not in the registry: this broker is alone"):
        EmbeddedRegistry(CLUSTER, A).lead(candidate(B))
