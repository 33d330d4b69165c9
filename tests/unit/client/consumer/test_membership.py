"""What a member makes of the broker's answer to ``group save``."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from txmq.client.consumer.membership import GroupMember, MemberSettings
from txmq.client.consumer.offsets.store import OffsetPosition
from txmq.errors import ConnectionLostError, OverloadedError, StorageError, UnknownTopicError
from txmq.model import TopicPartition
from txmq.testing.simulated.clock import SimClock

A, B = ("orders", 0), ("orders", 1)


class Broker:
    """Answers ``save``."""

    def __init__(self, *refused: list[Any]) -> None:
        self.refused = refused

    def call(self, *_: Any, **__: Any) -> bytes:
        """One answer."""
        return json.dumps({"refused": self.refused}).encode()


class BrokerWithoutTopic(Broker):
    """Takes the member in, and has no topic."""

    def call(self, verb: str, *_: Any, **__: Any) -> bytes:
        """One answer."""
        if verb == "meta":
            raise UnknownTopicError
        return json.dumps({"view": 1, "members": 1, "assigned": [], "revoked": []}).encode()


class Held:
    """Two partitions under generation 3, with something to save."""

    def __init__(self) -> None:
        self.saved: list[TopicPartition] = []
        self.gone: list[TopicPartition] = []
        self.generation = 3

    def to_save(self, *, everything: bool) -> list[OffsetPosition]:
        """Of both."""
        return [OffsetPosition(slot, 3, 10, None, 7) for slot in (A, B)]

    def were_saved(self, positions: Any) -> None:
        """Noted."""
        self.saved += [position.slot for position in positions]

    def lost(self, slot: TopicPartition) -> None:
        """Noted."""
        self.gone.append(slot)

    def held(self) -> list[tuple[TopicPartition, int]]:
        """Both."""
        return [(A, self.generation), (B, 3)]


def member(broker: Broker, held: Held) -> GroupMember:
    """That has not been started."""
    settings = MemberSettings("g", "one", ("orders",), "sticky", 1.0, 6.0, 1.0)
    return GroupMember(broker, SimClock(), settings, held)  # type: ignore[arg-type]


def test_what_was_refused_under_a_newer_generation_is_lost() -> None:
    held = Held()
    assert member(Broker([*A, 4]), held).save() == {A}
    assert (held.saved, held.gone) == ([B], [A])


def test_what_was_refused_and_is_ours_anew_meanwhile_stays_ours() -> None:
    held = Held()
    held.generation = 5
    assert member(Broker([*A, 5]), held).save() == {A}
    assert (held.saved, held.gone) == ([B], [])


@pytest.mark.parametrize("newest", [0, 3], ids=["nobody has it: join again", "a transaction holds it"])
def test_what_nobody_else_has_is_neither_saved_nor_lost(newest: int) -> None:
    """Else it would be begun anew, from the offset before that transaction, or without what is acknowledged by now."""
    held = Held()
    with pytest.raises(StorageError, match="orders-0"):
        member(Broker([*A, newest]), held).save()
    assert (held.saved, held.gone) == ([], [])


def test_a_topic_that_is_not_there_and_a_broker_that_stays_away_are_told_once() -> None:
    told: list[str] = []
    joining = member(BrokerWithoutTopic(), Held())
    joining._log = SimpleNamespace(warning=lambda event, **_: told.append(event), debug=lambda *_, **__: None)
    for _ in range(2):
        joining._join()
    assert told == ["there is no such topic yet: it is waited for"]
    for _ in range(70):
        joining._cannot_reach(ConnectionLostError("gone"))
    assert told[1:] == ["the broker cannot be reached: partitions are given up"]


class FullBroker(Broker):
    """Keeps as much of groups as there may be."""

    def call(self, *_: Any, **__: Any) -> bytes:
        """Refused."""
        raise OverloadedError("groups_bytes_max")


def test_a_broker_that_keeps_no_more_of_groups_is_told_of_once_and_a_save_does_not_stop_the_beat() -> None:
    told: list[str] = []
    refused = member(FullBroker(), Held())
    refused._log = SimpleNamespace(warning=lambda event, **_: told.append(event), debug=lambda *_, **__: None)
    for _ in range(3):
        with pytest.raises(OverloadedError) as caught:
            refused._join()
        refused._cannot_reach(caught.value)
    assert told == ["the broker refuses the group for now; it is tried again"]
    assert refused._is_saved() is False
    assert told[1:] == ["offsets could not be saved; it is tried again"]
