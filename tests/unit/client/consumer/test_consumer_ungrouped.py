"""A consumer that shares with nobody: what it finds, in which order it is told, and what a broker's absence changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.logged import said
from txmq.client.consumer.consumer import UngroupedConsumer
from txmq.client.consumer.group_member import Assigned
from txmq.client.consumer.options import MemberSettings
from txmq.errors import ConnectionLostError, UnknownTopicError
from txmq.model import TopicConfig, TopicPartition
from txmq.registry.topics import Topic

SETTINGS = MemberSettings("caches", "me", ("a", "b"), "exclusive", 1.0, 6.0, 1.0)


class Topics:
    """What a broker would say."""

    def __init__(self) -> None:
        self.there: dict[str, tuple[int, int]] = {}  # id, partitions
        self.is_away = False

    def refresh(self, name: str) -> Topic:
        """As ``client.topics``."""
        if self.is_away:
            raise ConnectionLostError("away")
        if name not in self.there:
            raise UnknownTopicError(name)
        topic_id, partitions = self.there[name]
        return Topic(topic_id, TopicConfig(name, partitions))


class Partitions:
    """What a consumer is told."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, TopicPartition, bool]] = []
        self.fails_at: TopicPartition | None = None

    def assigned(self, assigned: Assigned) -> None:
        """See ``member.Partitions``."""
        if assigned.slot == self.fails_at:
            raise ConnectionLostError("away")
        assert (assigned.offset, assigned.deferred) == (None, None)
        self.reported.append(("assigned", assigned.slot, assigned.is_later))

    def lost(self, slot: TopicPartition) -> None:
        """See ``member.Partitions``."""
        self.reported.append(("lost", slot, False))


class Scene:
    """A consumer that looks when it is told to."""

    def __init__(self) -> None:
        self.topics, self.partitions = Topics(), Partitions()
        given: Any = (self.topics, SETTINGS, self.partitions)
        self.alone = UngroupedConsumer(*given)

    def look(self) -> list[tuple[str, TopicPartition, bool]]:
        """One look; what was told."""
        self.partitions.reported.clear()
        self.alone._look()
        return list(self.partitions.reported)


def test_present_partitions_begin_at_start_later_ones_at_first_message() -> None:
    scene = Scene()
    scene.topics.there["a"] = 1, 2
    assert scene.look() == [("assigned", ("a", 0), False), ("assigned", ("a", 1), False)]
    assert scene.look() == []
    scene.topics.there |= {"a": (1, 3), "b": (2, 1)}
    assert scene.look() == [("assigned", ("a", 2), True), ("assigned", ("b", 0), True)]


def test_where_nothing_is_there_at_first_everything_comes_later() -> None:
    scene = Scene()
    assert scene.look() == []
    scene.topics.there["a"] = 1, 1
    assert scene.look() == [("assigned", ("a", 0), True)]


def test_deleted_topic_is_lost_and_a_recreated_one_is_another() -> None:
    scene = Scene()
    scene.topics.there["a"] = 1, 1
    scene.look()
    scene.topics.there["a"] = 7, 1
    assert scene.look() == [("lost", ("a", 0), False), ("assigned", ("a", 0), True)]
    del scene.topics.there["a"]
    assert scene.look() == [("lost", ("a", 0), False)]


def test_absent_broker_takes_nothing_and_pending_partitions_begin_next_look() -> None:
    scene = Scene()
    scene.topics.there["a"] = 1, 2
    scene.partitions.fails_at = "a", 1
    with pytest.raises(ConnectionLostError):
        scene.look()
    assert scene.partitions.reported == [("assigned", ("a", 0), False)]
    scene.partitions.fails_at, scene.topics.is_away = None, True
    with pytest.raises(ConnectionLostError):
        scene.look()
    assert scene.partitions.reported == []
    scene.topics.is_away = False
    assert scene.look() == [("assigned", ("a", 1), False)]


def test_thread_goes_on_behind_an_error_of_any_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Scene().alone

    def look() -> None:
        consumer._is_closing = bool(caplog.records)
        consumer._wake.set()
        if not consumer._is_closing:
            raise MemoryError

    monkeypatch.setattr(consumer, "_look", look)
    consumer._run()
    assert [line["event"] for line in said(caplog)] == ["the consumer's thread failed; it goes on"]
