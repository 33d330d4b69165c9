"""``partition_lookup``: the door to a partition, and the partitions that another home owns."""

from __future__ import annotations

import json

import pytest

from tools.images.node import Node, small_settings
from tools.images.requests import UUID, batch, part
from tools.simulated.disk import SimDisk
from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.state.broker_identity import INCARNATIONS_MAX, Registration
from txmq.broker.verbs.appending import check_parts
from txmq.broker.verbs.topic import delete_topic
from txmq.errors import ConfigError, NotOwnerError, StaleTopicError
from txmq.model import TopicConfig
from txmq.protocol.transaction_bodies import split_parts
from txmq.redo import entries, inspect
from txmq.registry.cluster_metadata import HomeEntry, PlacedTopic
from txmq.registry.topics import Topic

from ..support import node, put, values

OTHER = 0xABC
TEXT = "not-owner leader=10.0.0.7:7700 home=0000000000000abc owns partition 1 of topic 'a'\n"


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
    broker = Node(disk or SimDisk(), small_settings(), incarnation="1" * 32)
    broker.context.cluster = view = ClusterView()
    view.homes = {OTHER: HomeEntry(OTHER, "other", 1, "10.0.0.7:7700")}
    return broker


def sharing() -> Node:
    """A broker that owns ``a-0`` and ``b-0``; another home owns ``a-1``."""
    broker = started()
    put_topic(broker, placed(broker, "a", 1, 0, OTHER))
    put_topic(broker, placed(broker, "b", 2, 0))
    return broker


@pytest.mark.parametrize(
    ("words", "body", "extensions"),
    [
        (("put", "a", 1), batch(b"v"), {}),
        (("get", "a", 1, 0, 100), None, {}),
        (("offset", "a", 1, "latest"), None, {}),
        (("commit", "{txid}"), part("a", 0, batch(b"v")) + part("a", 1, batch(b"v")), {}),
        (
            ("prepare", "{txid}", "last-resource"), part("a", 1, batch(b"v"), "*"),
            {"resource": "db", "uuid": UUID, "table": "t"},
        ),
    ],
    ids=lambda given: str(given[0]) if isinstance(given, tuple) else "",
)  # fmt: skip
def test_request_to_a_foreign_partition_names_its_leader(
    words: tuple[object, ...], body: bytes | None, extensions: dict[str, str | int | None]
) -> None:
    broker = sharing()
    client = broker.session()
    named = [str(word).format(txid=broker.txid(1, 1)) for word in words]
    answer = client.ask(*named, body=body, extensions=extensions)
    assert (answer.code, answer.body.decode()) == (409, TEXT)
    assert not broker.state.transactions
    assert values(broker) == []


def test_pipelined_put_to_a_foreign_partition_is_refused_alone() -> None:
    broker = sharing()
    client = broker.connect()
    lines = [(0, b"1"), (1, b"2"), (0, b"3")]
    contents = [batch(value) for _, value in lines]
    client.send_bytes(
        b"".join(
            b"put a %d %d %d\r\n%s" % (number, len(content), token, content)
            for token, ((number, _), content) in enumerate(zip(lines, contents, strict=True), 1)
        )
    )
    broker.pump()
    assert {opaque: answer.code for opaque, answer in client.received.items()} == {b"1": 200, b"2": 409, b"3": 200}
    assert values(broker) == [b"1", b"3"]


def test_part_for_a_former_topic_is_stale_at_any_home() -> None:
    """Its partition may be elsewhere now: whoever brings the part must not look for it there."""
    broker, client = sharing(), ClientConnection(1, "")
    with pytest.raises(StaleTopicError, match="topic 'a' has id 1 now, not 9"):
        check_parts(broker.context, client, split_parts(part("a", 1, batch(b"v"), topic_id=9)))
    with pytest.raises(NotOwnerError):
        check_parts(broker.context, client, split_parts(part("a", 1, batch(b"v"), topic_id=1)))


def test_group_hands_out_only_partitions_of_this_home() -> None:
    client = sharing().session()
    joined = json.loads(client.ask("group", "join", "g", extensions={"member": "m", "topics": "a"}, body=b"[]").body)
    assert [row[:2] for row in joined["assigned"]] == [["a", 0]]


def test_group_gets_a_partition_that_is_added_at_this_home() -> None:
    broker = sharing()
    client = broker.session()
    client.ask("group", "join", "g", extensions={"member": "m", "topics": "a"}, body=b"[]")
    put_topic(broker, placed(broker, "a", 1, 0, OTHER, OTHER, 0, version=2))
    seen = json.loads(client.ask("group", "heartbeat", "g", extensions={"member": "m"}, body=b"[]").body)
    assert [row[:2] for row in seen["assigned"]] == [["a", 0], ["a", 3]]


def test_leader_of_a_home_that_is_away_is_not_named() -> None:
    broker = sharing()
    put_topic(broker, placed(broker, "c", 3, 0, 0xDEF))
    told = put(broker.connect(), b"v", topic="c", partition=1).text
    assert told == "not-owner leader=- home=0000000000000def owns partition 1 of topic 'c'\n"


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_own_and_foreign_partitions_are_the_same_after_a_restart(with_checkpoint: bool) -> None:
    broker = sharing()
    put_topic(broker, placed(broker, "a", 1, 0, OTHER, OTHER, 0, version=2))
    client = broker.connect()
    assert [put(client, b"%d" % number, partition=number).code for number in range(4)] == [200, 409, 409, 200]
    if with_checkpoint:
        broker.checkpoint()
    again = started(broker.kill())
    assert again.state.placed == broker.state.placed
    assert sorted(again.state.partitions) == [(b"a", b"0"), (b"a", b"3"), (b"b", b"0")]
    assert [values(again, "a", number) for number in (0, 3)] == [[b"0"], [b"3"]]
    assert put(again.connect(), b"v", partition=2).text == TEXT.replace("partition 1", "partition 2")


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
        if kind in (entries.STARTED, entries.TOPIC)
    }
    assert set(said[entries.STARTED]) == {"epoch", "life", "time_ms"}
    assert not {"homes", "version"} & set(said[entries.TOPIC])
    assert "registration" not in broker.state.snapshot()
    assert not any("homes" in topic for topic in broker.state.snapshot()["topics"])


# --- what the journal says of the registry ---------------------------------------------------------------------------


def register(broker: Node, epoch: int, incarnation: str) -> None:
    fields = {"cluster": "0" * 16, "epoch": epoch, "incarnation": incarnation}
    broker.store.journal.raise_epoch(epoch)
    broker.context.group.add_entry(entries.json_entry(entries.REGISTERED, fields))
    broker.state.registered(epoch, incarnation)
    broker.pump()


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_starts_of_a_home_survive_a_restart(with_checkpoint: bool) -> None:
    disk = SimDisk()
    for number in (1, 2, 3, 4):
        broker = Node(disk, small_settings(), incarnation=f"{number:032x}")
        if number == 2:
            register(broker, 8, f"{number:032x}")
        if with_checkpoint:
            broker.checkpoint()
        disk = broker.kill()
    assert broker.state.registration.epoch == 8
    assert broker.state.registration.incarnations == [f"{number:032x}" for number in (1, 2, 3, 4)]
    assert broker.state.epoch == 10  # each start is above the epoch that the registry gave out


def test_starts_that_are_kept_are_bounded() -> None:
    known = Registration()
    for number in range(INCARNATIONS_MAX + 5):
        known.started(str(number))
    assert (len(known.incarnations), known.incarnations[0]) == (INCARNATIONS_MAX, "5")


def test_member_of_a_cluster_does_not_start_without_a_registry() -> None:
    broker = Node(SimDisk(), small_settings(), incarnation="1" * 32)
    register(broker, 2, "1" * 32)
    disk = broker.kill()
    with pytest.raises(ConfigError, match=r"belongs to cluster .*: start the broker with --registry"):
        Node(disk, small_settings())
    again = Node(disk, small_settings(), incarnation="2" * 32)
    assert again.state.epoch == 3  # nothing was journaled by the start that was refused


def test_topic_with_partitions_of_another_home_is_deleted() -> None:
    broker = sharing()
    delete_topic(broker.context, 1)
    broker.pump()
    assert list(broker.state.partitions) == [(b"b", b"0")]
    again = started(broker.kill())
    assert [topic.config.name for topic in again.state.topics] == ["b"]
    assert list(again.state.placed) == [2]
