"""Topics of brokers with a registry: created, altered and deleted there, taken over into the journals."""

from __future__ import annotations

import json

import pytest

from tools.images.requests import batch
from tools.simulated.embedded_registry import EmbeddedRegistry
from txmq.broker.cluster import cluster_view
from txmq.broker.cluster.cluster_view import ASKS_MAX
from txmq.broker.cluster.registry_asks import (
    TRIES_MAX,
    Answer,
    Ask,
    CreateTopic,
    DropTopic,
    FindAnchor,
    ReleaseAnchor,
    Room,
    carry_out,
)
from txmq.broker.state.principals import of_nobody
from txmq.broker.verbs.anchors import find_anchor
from txmq.errors import BrokerError, OverloadedError, RegistryAwayError, RegistryConflictError
from txmq.model import TopicConfig
from txmq.redo import entries
from txmq.registry.cluster_metadata import DeletedTopic, HomeEntry, PlacedTopic, TopicMap
from txmq.registry.topics import Topic

from ..support import node, values
from .support import CLUSTER, A, B, Broker, alone, pair, puts, with_messages

OTHER = 0xABC


def placed(name: str, topic_id: int, *homes: int, version: int = 1) -> PlacedTopic:
    """A topic as the registry has it."""
    return PlacedTopic(Topic(topic_id, TopicConfig(name, partitions=len(homes))), homes, version)


# --- create and alter ------------------------------------------------------------------------------------------------


def test_topic_is_spread_over_the_homes_that_are_led() -> None:
    one, two = pair()
    told = one.read("topic", "create", "a", partitions=4)
    assert told["homes"] == [f"{home:016x}" for home in (A, B, A, B)]
    assert (told["topic_id"], told["version"], [row["partition"] for row in told["watermarks"]]) == (1, 1, [0, 2])
    assert told["leaders"] == {f"{home:016x}": f"10.0.0.{home}:8123" for home in (A, B)}
    two.refresh()
    assert (puts(one, "a", 4), puts(two, "a", 4)) == ([200, 409, 200, 409], [409, 200, 409, 200])
    refusal = f"not-owner leader=10.0.0.{A}:8123 home={A:016x} owns partition 0 of topic 'a'\n"
    assert two.ask("get", "a", 0, 0, 100) == (409, refusal)
    assert two.ask("offset", "a", 0, "latest") == (409, refusal)


def test_topic_is_answered_when_it_is_durable_here() -> None:
    broker = alone().lead()
    broker.client.send("topic", "create", "a", opaque=b"x")
    (ask,) = broker.asks()
    assert isinstance(ask, CreateTopic)
    broker.node.core.registry_answered(ask.number, carry_out(broker.registry, A, ask))
    assert not broker.client.client.out
    again = broker.again().lead()
    assert again.read("meta", "a")["topics"][0]["topic_id"] == 1
    assert broker.node.disk is not again.node.disk


def test_topic_counts_for_its_user_until_it_is_deleted() -> None:
    broker = alone().lead()
    principals = broker.node.state.principals
    for kind, fields in (
        (entries.USER, {"user": "shop", "keys": None, "certificate": "CN=shop"}),
        (entries.GRANTED, {"user": "shop", "grants": [[may, "topic", "*"] for may in ("create", "alter", "delete")]}),
    ):
        principals.fold(kind, fields)
    broker.client.client.user, broker.client.client.permissions = "shop", of_nobody()
    broker.read("topic", "create", "a", partitions=2)
    assert principals.made == {("topic", "a"): ("shop", 2)}
    assert broker.ask("topic", "create", "a", partitions=2)[0] == 409
    broker.read("topic", "alter", "a", partitions=3)
    assert "made" in broker.journaled()
    assert principals.made_sizes == {("topic", "shop"): 3}
    half = broker.node.settings.partitions_max // 2
    assert broker.ask("topic", "create", "b", partitions=half - 2)[0] == 429
    broker.read("topic", "delete", "a")
    broker.refresh()
    assert principals.made == {}


def test_meta_tells_homes_leaders_and_versions() -> None:
    one, two = pair()
    one.ask("topic", "create", "a", partitions=2)
    one.ask("topic", "create", "b")
    two.refresh()
    told = two.read("meta", "*")
    homes = [[f"{A:016x}", f"{B:016x}"], [f"{A:016x}"]]
    assert [(topic["name"], topic["version"], topic["homes"]) for topic in told["topics"]] == [
        ("a", 1, homes[0]), ("b", 2, homes[1]),
    ]  # fmt: skip
    assert (told["map_version"], told["leaders"][f"{A:016x}"]) == (2, f"10.0.0.{A}:8123")
    assert two.read("topic", "list", "*")["topics"] == told["topics"]


def test_meta_of_a_lone_broker_says_nothing_of_homes() -> None:
    told = json.loads(node().connect().ask("meta", "a").body)
    assert list(told) == ["topics"]
    assert not {"homes", "version"} & set(told["topics"][0])


def test_added_partitions_go_where_the_topic_has_few() -> None:
    one, two = pair()
    one.ask("topic", "create", "a", partitions=3)
    two.refresh()
    told = two.read("topic", "alter", "a", partitions=6, retention_ms=5000)
    assert told["homes"] == [f"{home:016x}" for home in (A, B, A, B, A, B)]
    one.refresh()
    assert (puts(one, "a", 6), puts(two, "a", 6)) == ([200, 409] * 3, [409, 200] * 3)
    assert {broker.node.state.topics.named("a").config.retention_ms for broker in (one, two)} == {5000}


@pytest.mark.parametrize(
    ("words", "settings", "text"),
    [
        (("create", "a"), {}, "topic-exists topic 'a' exists\n"),
        (("create", "__x"), {}, "invalid-name '__x': names that start with __ are reserved\n"),
        (("alter", "a"), {"partitions": 1}, "bad-request partitions can only grow; topic 'a' has 2\n"),
        (("alter", "a"), {"storage": "memory"}, "bad-request storage cannot be altered; create another topic\n"),
        (("alter", "a"), {"partitions": 90}, "overloaded partitions_max 9 would be passed in every home that is led\n"),
    ],
)  # fmt: skip
def test_change_that_is_wrong_is_refused(words: tuple[str, str], settings: dict[str, int | str], text: str) -> None:
    one, two = pair()
    for broker in (one, two):
        object.__setattr__(broker.node.settings, "partitions_max", 9)
    one.ask("topic", "create", "a", partitions=2)
    two.refresh()
    before = one.registry.topics()
    assert two.ask("topic", *words, body=None, **settings)[1] == text
    assert one.registry.topics() == before


def test_name_that_is_taken_draws_no_id() -> None:
    one, two = pair()
    one.ask("topic", "create", "a")
    assert two.ask("topic", "create", "a") == (409, "topic-exists topic 'a' exists\n")
    assert one.registry.reserve_topic_ids(1) == range(2, 3)


def test_name_is_free_when_all_homes_have_dropped_the_topic() -> None:
    one, two = pair()
    one.ask("topic", "create", "a")
    one.ask("put", "a", 0, body=batch(b"old"))
    two.refresh()
    assert two.ask("topic", "delete", "a") == (200, "{}\n")
    code, text = one.ask("topic", "create", "a")  # this home has not heard of the deletion, and would take messages
    assert (code, "has yet to drop its messages" in text) == (503, True)
    one.refresh()
    assert one.read("topic", "create", "a")["topic_id"] == 2
    assert values(one.node) == []
    assert one.registry.topics().deleted == ()


def test_spread_prefers_homes_with_few_partitions() -> None:
    homes = [HomeEntry(home, "", 1, "address" if home < 4 else None) for home in (1, 2, 3, 4)]
    room = Room([placed("a", 1, 1, 1), placed("b", 2, 2)], homes, 3)
    assert room.spread((), 4, 100) == (3, 2, 1, 3)
    assert room.spread((3, 3), 2, 100) == (2, 1)
    assert Room([], [], 7).spread((), 2, 100) == (7, 7)  # the own leader's node may be gone for a moment
    assert Room([placed("a", 1, 1, 1)], homes, 3).spread((), 4, 2) == (2, 3, 2, 3)
    with pytest.raises(OverloadedError, match="partitions_max 2 would be passed"):
        Room([placed("a", 1, 1, 1)], homes, 3).spread((), 5, 2)


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


def test_deleted_topic_is_dropped_by_each_home_and_then_forgotten() -> None:
    one, two = with_messages()
    assert two.ask("topic", "delete", "a") == (200, "{}\n")
    assert one.registry.topics().deleted == (DeletedTopic(1, "a", (A,)),)
    assert two.node.disk.list_directory("log") == []
    assert values(one.node) == [b"0"]
    one.refresh()
    assert one.registry.topics().deleted == ()
    assert one.ask("put", "a", 0, body=batch(b"v"))[1].startswith("unknown-topic")
    for broker in (one, two):
        assert [topic.config.name for topic in broker.again().node.state.topics] == ["keep"]


def test_drop_that_the_registry_did_not_hear_is_told_again() -> None:
    one, two = with_messages()
    two.ask("topic", "delete", "a")
    one.node.core.registry_changed(one.registry.topics(), one.registry.homes())
    (ask,) = one.asks()
    one.node.core.registry_changed(one.registry.topics(), one.registry.homes())
    assert one.asks() == []  # it is being told
    one.node.core.registry_answered(ask.number, RegistryAwayError("planned"))
    one.refresh()
    assert one.registry.topics().deleted == ()


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


def test_topic_without_a_partition_here_is_forgotten_with_the_registry() -> None:
    one, two = pair()
    one.ask("topic", "create", "a")
    two.refresh()
    assert two.node.state.topics.find("a") is not None
    one.ask("topic", "delete", "a")
    two.refresh()
    assert two.node.state.topics.find("a") is None
    assert two.again().node.state.topics.find("a") is None


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


@pytest.mark.parametrize("words", [("create", "b"), ("alter", "a"), ("delete", "a")])
def test_change_without_an_answer_of_the_registry_is_unknown(words: tuple[str, str]) -> None:
    broker = alone().lead()
    broker.ask("topic", "create", "a")
    opaque = broker.client.send("topic", *words)
    (ask,) = broker.asks()
    broker.node.core.registry_answered(ask.number, RegistryAwayError("planned"))
    broker.node.pump()
    answer = broker.client.received[opaque]
    text = "unavailable the registry does not answer: whether it was done is not known (planned)\n"
    assert (answer.code, answer.text) == (503, text)


def test_answer_to_a_connection_that_is_gone_is_dropped() -> None:
    broker = alone().lead()
    broker.client.send("topic", "create", "a")
    (ask,) = broker.asks()
    broker.client.disconnect()
    broker.carry_out(ask)
    assert broker.node.state.topics.find("a") is not None


def test_requests_that_wait_for_the_registry_are_bounded() -> None:
    broker = alone().lead()
    for number in range(ASKS_MAX):
        broker.client.send("topic", "create", f"t{number}")
    assert broker.ask("topic", "create", "more")[0] == 429
    assert broker.ask("topic", "create", "now")[0] == 200


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
