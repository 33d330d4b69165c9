"""``partition_lookup``: the door to a partition, and the partitions that another home owns."""

from __future__ import annotations

import json

import pytest

from tools.images.node import Node, small_settings
from tools.simulated.disk import SimDisk
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.errors import ConfigError
from txmq.model import TopicConfig
from txmq.redo import entries, inspect
from txmq.registry.cluster_metadata import HomeEntry, PlacedTopic
from txmq.registry.topics import Topic

from ..support import node, put, values

OTHER = 0xABC


def placed(broker: Node, name: str, topic_id: int, *homes: int, version: int = 1) -> PlacedTopic:
    """A topic of the cluster; home 0 stands for this broker's."""
    topic = Topic(topic_id, TopicConfig(name, partitions=len(homes)))
    return PlacedTopic(topic, tuple(home or broker.state.home for home in homes), version)


def put_topic(broker: Node, topic: PlacedTopic) -> None:
    """Journal a topic as a broker with a registry does."""
    broker.context.group.add_entry(entries.json_entry(entries.TOPIC, topic.to_json()))
    broker.state.place_topic(topic)
    broker.pump()


def started(disk: SimDisk | None = None) -> Node:
    """A broker with a registry that knows where one other home is led."""
    broker = Node(disk or SimDisk(), small_settings(), is_member=True)
    broker.context.cluster = view = ClusterView()
    view.homes = {OTHER: HomeEntry(OTHER, "other", 1, "10.0.0.7:7700")}
    return broker


def test_topic_that_gets_homes_keeps_its_messages() -> None:
    broker = node()
    put(broker.connect(), b"1", partition=1)
    put_topic(broker, placed(broker, "a", 1, 0, 0, OTHER))
    assert [partition.number for partition in broker.state.all_partitions()] == [0, 1, 0]
    assert values(broker, "a", 1) == [b"1"]
    again = started(broker.kill())
    assert values(again, "a", 1) == [b"1"]
    assert [topic.config.partitions for topic in again.state.topics] == [3, 1]


def test_files_of_a_lone_broker_say_nothing_of_homes() -> None:
    broker = node()
    put(broker.connect(), b"1")
    said = {
        kind: json.loads(bytes(body))
        for record in inspect.dump(broker.disk)
        for kind, _, body in entries.split(record.payload)
        if kind in (entries.LED, entries.TOPIC)
    }
    assert said[entries.LED]["is_member"] is False
    assert not {"homes", "version"} & set(said[entries.TOPIC])
    assert "registration" not in broker.state.snapshot()
    assert not any("homes" in topic for topic in broker.state.snapshot()["topics"])


# --- what the journal says of the registry ---------------------------------------------------------------------------


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_membership_of_a_home_survives_a_restart(with_checkpoint: bool) -> None:
    disk, starts = SimDisk(), []
    for number in (1, 2, 3, 4):
        broker = Node(disk, small_settings(), is_member=True, identity_seed=number)
        starts.append(broker.recovered.identity.start)
        if with_checkpoint:
            broker.checkpoint()
        disk = broker.kill()
    assert (broker.state.registration.epoch, broker.state.epoch) == (4, 4)
    assert broker.state.registration.starts == starts


def test_member_of_a_cluster_does_not_start_without_a_registry() -> None:
    broker = Node(SimDisk(), small_settings(), is_member=True)
    disk = broker.kill()
    with pytest.raises(ConfigError, match=r"belongs to cluster .*: start the broker with --registry"):
        Node(disk, small_settings())
    again = Node(disk, small_settings(), is_member=True)
    assert again.state.epoch == 2  # nothing was journaled by the start that was refused
