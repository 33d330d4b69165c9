"""Topics of brokers with a registry: created, altered and deleted there, taken over into the journals."""

from __future__ import annotations

import pytest

from tools.images.requests import batch
from tools.simulated.embedded_registry import EmbeddedRegistry
from txmq.broker.cluster import cluster_view
from txmq.broker.cluster.registry_asks import (
    TRIES_MAX,
    Answer,
    Ask,
    DropTopic,
    FindAnchor,
    ReleaseAnchor,
    carry_out,
)
from txmq.broker.verbs.anchors import find_anchor
from txmq.errors import BrokerError, RegistryAwayError, RegistryConflictError
from txmq.model import TopicConfig
from txmq.registry.cluster_metadata import DeletedTopic, PlacedTopic, TopicMap
from txmq.registry.topics import Topic

from ..support import node, values
from .support import CLUSTER, A, B, Broker, alone, pair, puts, with_messages


def placed(name: str, topic_id: int, *homes: int, version: int = 1) -> PlacedTopic:
    """A topic as the registry has it."""
    return PlacedTopic(Topic(topic_id, TopicConfig(name, partitions=len(homes))), homes, version)


# --- create and alter ------------------------------------------------------------------------------------------------


class Contended(EmbeddedRegistry):
    """Others change topics just before this one does."""

    conflicts = 0

    def create_topic(self, topic: Topic, homes: object) -> PlacedTopic:
        """See ``Registry``; the answer may be lost after the change."""
        made = super().create_topic(topic, homes)  # type: ignore[arg-type]
        self._conflict()
        return made

    def alter_topic(self, changed: PlacedTopic) -> PlacedTopic:
        """See ``Registry``."""
        self._conflict()
        return super().alter_topic(changed)

    def _conflict(self) -> None:
        if self.conflicts:
            self.conflicts -= 1
            raise RegistryConflictError("planned")


@pytest.mark.parametrize("action", ["create", "alter"])
def test_change_that_meets_others_is_made_once(action: str) -> None:
    registry = Contended(CLUSTER, A)
    broker = Broker(registry, A).lead()
    if action == "alter":
        broker.ask("topic", "create", "a")
    registry.conflicts = TRIES_MAX - 1
    assert broker.ask("topic", action, "a", partitions=3)[0] == 200
    assert [each.homes for each in registry.topics().topics] == [(A, A, A)]
    registry.conflicts = TRIES_MAX
    assert broker.ask("topic", "alter", "a", partitions=4) == (503, "unavailable planned\n")


# --- delete ----------------------------------------------------------------------------------------------------------


def test_topic_that_was_never_here_is_dropped_at_once() -> None:
    one, two = pair()
    one.registry.create_topic(Topic(1, TopicConfig("a")), [B])
    one.registry.delete_topic(Topic(1, TopicConfig("a")))
    two.refresh()
    assert one.registry.topics().deleted == ()
    assert "topic-deleted" not in two.journaled()


# --- what deletes nothing --------------------------------------------------------------------------------------------


def told(broker: Broker, topic_map: TopicMap) -> None:
    """The registry tells of a map."""
    broker.node.core.registry_changed(topic_map, broker.registry.homes())
    broker.work()


def test_topic_absent_from_the_registry_keeps_its_messages() -> None:
    one, _two = with_messages()
    told(one, TopicMap(50, (), ()))
    assert values(one.node) == [b"0"]
    again = one.again()
    again.draw()
    again.begin(TopicMap(51, (), ()))
    assert values(again.node) == [b"0"]
    assert again.ask("put", "a", 0, body=batch(b"v"))[0] == 200


def test_deletions_too_many_for_one_moment_are_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _two = with_messages()
    monkeypatch.setattr(cluster_view, "ASKS_MAX", 2)
    told_of = [DeletedTopic(topic_id, f"t{topic_id}", (A,)) for topic_id in (1, 2, 3, 4, 5)]
    one.node.core.registry_changed(TopicMap(50, (), tuple(told_of)), [])
    assert list(one.node.state.topics) == []
    dropped: list[int] = []
    while asks := one.asks():
        assert len(asks) <= 2
        for ask in asks:
            assert isinstance(ask, DropTopic)
            dropped.append(ask.topic_id)
            one.node.core.registry_answered(ask.number, Answer())
        left = tuple(each for each in told_of if each.topic_id not in dropped)
        one.node.core.registry_changed(TopicMap(50, (), left), [])
    assert dropped == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("contradiction", "reason"),
    [
        (placed("a", 9, A, A), "topic 'a' has id 9 in the registry, and 1 with messages here"),
        (placed("z", 1, A, B, version=9), "topic 1 is 'z' in the registry, and 'a' here"),
        (placed("a", 1, B, B, version=9), "partition 0 of topic 'a' is here, and another home's in the registry"),
    ],
)  # fmt: skip
def test_registry_that_contradicts_the_journal_changes_nothing(contradiction: PlacedTopic, reason: str) -> None:
    one, _two = with_messages()
    before = dict(one.node.state.placed)
    for version in (50, 51):
        told(one, TopicMap(version, (contradiction, placed("new", 30, A, version=50)), ()))
    assert [alarm["reason"] for alarm in one.node.context.alarms] == [reason]  # told once
    assert one.read("cluster", "describe")["registry"]["refused"] == [reason]
    assert {name: each for name, each in one.node.state.placed.items() if name in before} == before
    assert (puts(one, "a", 1), puts(one, "new", 1)) == ([200], [200])
    told(one, TopicMap(52, tuple(one.node.state.placed.values()), ()))
    assert one.read("cluster", "describe")["registry"]["refused"] == []


def test_map_that_is_older_is_not_taken_over() -> None:
    one, _two = with_messages()
    (first, _keep) = one.node.state.placed.values()
    altered = first._replace(version=1, homes=(*first.homes, A))
    deleted = (DeletedTopic(1, "a", (A,)),)
    told(one, TopicMap(1, (altered,), deleted))
    again = one.again()
    again.draw()
    again.begin(TopicMap(1, (altered,), deleted))  # the version is known from the journal
    for broker in (one, again):
        (alarm,) = broker.node.context.alarms
        assert alarm["reason"] == "its map has version 1, and had 2: it is not taken over"
        assert broker.node.state.placed[1] == first


# --- the registry is away --------------------------------------------------------------------------------------------


# --- anchors ---------------------------------------------------------------------------------------------------------


def test_group_has_one_anchor_for_all_brokers() -> None:
    one, two = pair()
    found: list[int | BrokerError] = []
    for broker in (two, one):
        find_anchor(broker.node.context, "group", "billing", found.append)
        broker.work()
    assert found == [B, B]
    for home, anchor in ((A, B), (B, A)):  # the anchor alone releases it
        for kind in (FindAnchor, ReleaseAnchor):
            ask: Ask = kind(1, "group", "billing")
            carry_out(one.registry, home, ask)
        assert one.registry.anchor("group", "billing", A) == anchor


def test_anchor_is_unknown_while_the_registry_is_away() -> None:
    broker = alone().lead()
    found: list[int | BrokerError] = []
    find_anchor(broker.node.context, "query", "q", found.append)
    (ask,) = broker.asks()
    broker.node.core.registry_answered(ask.number, RegistryAwayError("planned"))
    (error,) = found
    assert isinstance(error, BrokerError)
    assert error.code == 503


def test_lone_broker_is_the_anchor_of_everything() -> None:
    broker = node()
    found: list[int | BrokerError] = []
    find_anchor(broker.context, "group", "billing", found.append)
    assert found == [broker.state.home]
