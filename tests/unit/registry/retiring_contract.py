"""What every registry of several brokers keeps of homes that are given up as lost, as tests to inherit."""

from __future__ import annotations

import pytest

from tests.unit.registry.contract import A, B, ClusterContract, candidate, topic
from txmq.errors import HomeSupersededError
from txmq.registry.cluster_metadata import DeletedTopic, HomeEntry, Registry


class RetiringContract(ClusterContract):
    """Home B is lost; the other rules of several brokers hold, too."""

    def test_nothing_waits_for_a_home_that_is_retired(self, registry: Registry, other: Registry) -> None:
        for number, name in enumerate(("orders", "gone"), 1):
            registry.create_topic(topic(number, name), [A, B])
        registry.delete_topic(topic(2, "gone"))
        registry.drop_topic(2, A)
        for kind in ("group", "query"):
            other.anchor(kind, "billing", B)
        other.close()
        told: list[str] = []
        registry.topics(lambda: told.append("topics"))
        for _ in range(2):
            registry.retire_home(B, "ada: disk burnt")
        self.settle(registry)
        assert told == ["topics"]
        assert registry.homes()[1] == HomeEntry(B, "broker-b0", 2, None, "ada: disk burnt")
        assert registry.topics().deleted == ()
        registry.create_topic(topic(3, "gone"), [A, A])
        registry.delete_topic(topic(1))
        assert registry.topics().deleted == (DeletedTopic(1, "orders", (A,)),)
        assert registry.anchor("group", "billing", A) == A
        assert registry.anchor("query", "billing", A) == B  # what it has decided of batches nobody else knows

    def test_a_home_that_is_retired_is_never_led_again(self, registry: Registry, other: Registry) -> None:
        again = candidate(B, 2, former=(0, 1), epoch=7)
        leadership = other.lead(again)
        other.close()
        registry.retire_home(B, "ada: disk burnt")
        with pytest.raises(HomeSupersededError):
            registry.announce(leadership)
        for returned in (again, candidate(B, 3, former=(0, 1, 2), epoch=8)):
            with pytest.raises(HomeSupersededError, match=r"retired, as lost .ada: disk burnt.*empty directory"):
                registry.lead(returned)
        assert registry.lead(candidate(0xC0)._replace(name="broker-b0")).epoch == 1  # its name is free
