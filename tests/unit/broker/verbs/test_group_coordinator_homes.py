"""A consumer group whose partitions have several homes: each home hands out its own, as if it handed out all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.broker.group_support import Consumer
from tools.images.node import Node
from tools.simulated.disk import SimDisk
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.model import TopicConfig, TopicPartition
from txmq.registry.assignors import ASSIGNORS
from txmq.registry.cluster_metadata import PlacedTopic
from txmq.registry.topics import Topic


def homes(*owners: int) -> list[Node]:
    """Homes 1, 2, ... with a topic ``a``, whose partitions they own."""
    made = []
    for home in range(1, max(owners) + 1):
        node = Node(SimDisk())
        node.state.home, node.context.cluster = home, ClusterView()
        place(node, *owners)
        made.append(node)
    return made


def place(node: Node, *owners: int) -> None:
    """The topic, or a new version of it."""
    node.state.place_topic(PlacedTopic(Topic(1, TopicConfig("a", len(owners))), owners, len(owners)))


class Everywhere:
    """One consumer, with a member at each home."""

    def __init__(self, nodes: list[Node], name: str, **words: Any) -> None:
        self.members = [Consumer(node, name, **{"topics": "a", **words}) for node in nodes]
        for number, member in enumerate(self.members):
            member.join(*self.elsewhere(number))

    def elsewhere(self, number: int) -> list[list[Any]]:
        """What it has at the other homes."""
        return [slot for other, member in enumerate(self.members) if other != number and member.view
                for slot in member.held]  # fmt: skip

    def look(self) -> None:
        """One heartbeat at each home."""
        for number, member in enumerate(self.members):
            answer = member.ask("elsewhere", self.elsewhere(number), member=member.name)
            assert answer.code == 200, answer
            member.heartbeat(*member.revoked)

    @property
    def held(self) -> set[TopicPartition]:
        """Its partitions, of all homes."""
        return {(topic, number) for member in self.members for topic, number in member.held}


def settled(*consumers: Everywhere) -> list[set[TopicPartition]]:
    """What each has when nothing moves any more."""
    before: list[set[TopicPartition]] = []
    while before != (now := [consumer.held for consumer in consumers]):
        before = now
        for _ in range(3):
            for consumer in consumers:
                consumer.look()
    assert sum(map(len, now)) == len(set().union(*now))
    return now


def test_members_share_partitions_of_one_home_each() -> None:
    nodes = homes(1, 2, 3)
    consumers = [Everywhere(nodes, name) for name in ("one", "two", "three")]
    assert [len(held) for held in settled(*consumers)] == [1, 1, 1]


@pytest.mark.parametrize("owners", [(1, 1, 1, 1, 2, 2, 2, 2), (1, 2, 1, 2, 1, 2, 1, 2), (2, 1, 1, 1, 1, 1, 1, 1)])
def test_a_second_member_takes_half_and_no_more_moves(owners: tuple[int, ...]) -> None:
    nodes = homes(*owners)
    one = Everywhere(nodes, "one")
    (everything,) = settled(one)
    two = Everywhere(nodes, "two")
    first, second = settled(one, two)
    assert (len(everything), len(first), len(second)) == (8, 4, 4)
    for consumer in (one, two):
        for member in consumer.members:
            assert {row[2] for row in member.view["assigned"]} <= {1, 2}, "a partition moved twice"


@pytest.mark.parametrize("strategy", ["range", "round-robin", "consistent-hash"])
def test_other_strategies_assign_as_one_broker_would(strategy: str) -> None:
    nodes = homes(1, 2, 1, 3, 2, 1, 1)
    consumers = [Everywhere(nodes, name, strategy=strategy) for name in ("one", "two", "three")]
    owners = ASSIGNORS[strategy]({name: ["a"] for name in ("one", "two", "three")}, {"a": 7}, {})
    expected = [{slot for slot, owner in owners.items() if owner == name} for name in ("one", "two", "three")]
    assert settled(*consumers) == expected


def test_a_home_that_is_away_costs_balance_at_most() -> None:
    nodes = homes(1, 2, 1, 2)
    one, two = Everywhere(nodes, "one"), Everywhere(nodes[:1], "two")
    first, second = settled(one, two)
    assert first | second == {("a", number) for number in range(4)}
    assert second <= {("a", 0), ("a", 2)}


def test_what_a_member_tells_counts_only_for_partitions_of_others() -> None:
    (node, _) = homes(1, 2)
    one = Consumer(node, "one", topics="a").join()
    told = [["a", 0], ["a", 1], ["a", 2], ["b", 0]]
    assert one.ask("elsewhere", told, member="one").code == 200
    assert node.context.groups["billing"].elsewhere == {("a", 1): "one"}
    assert one.ask("elsewhere", [], member="one", more=None).code == 200
    assert node.context.groups["billing"].elsewhere == {("a", 1): "one"}
    one.ask("leave", [], member="one")
    two = Consumer(node, "two", topics="a").join(["a", 1])
    assert (two.held, node.context.groups["billing"].elsewhere) == ([["a", 0]], {("a", 1): "two"})
    assert json.loads(two.ask("elsewhere", [], member="two").body) == {}
    assert node.context.groups["billing"].elsewhere == {}


def test_a_stranger_tells_nothing() -> None:
    (node,) = homes(1)
    Consumer(node, "one", topics="a", incarnation="1").join()
    assert Consumer(node, "two").ask("elsewhere", [], member="two").error == "unknown-member"
    late = Consumer(node, "one").ask("elsewhere", [], member="one", incarnation="0")
    assert late.error == "fenced"
