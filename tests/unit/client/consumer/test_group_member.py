"""What a member reports of a broker that refuses, of one that is away, and of a topic that is missing."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.logged import said
from tools.simulated.clock import SimClock
from tools.simulated.stand_in import StandIn
from txmq.client.consumer.group_member import Assigned, GroupMember, GroupRequests, OtherHomes, SupersededError
from txmq.client.consumer.offsets.offset_store import StoredOffset
from txmq.client.consumer.options import MemberSettings
from txmq.errors import (
    ConnectionLostError,
    FencedError,
    ForbiddenError,
    OverloadedError,
    StorageError,
    TxmqError,
    UnknownTopicError,
)
from txmq.model import TopicPartition
from txmq.runtime.logging import Sparingly
from txmq.testing.eventually import eventually

DEADLINE_S = 30.0
SETTINGS = MemberSettings("g", "one", ("orders",), "sticky", 1.0, 6.0, 1.0)


class BrokerWithoutTopic:
    """Takes the member in, and has no topic."""

    def call(self, verb: str, *_: Any, **__: Any) -> bytes:
        """One answer."""
        if verb == "meta":
            raise UnknownTopicError
        return json.dumps({"view": 1, "members": 1, "assigned": [], "revoked": [], "logs": []}).encode()


def member(broker: Any) -> GroupMember:
    """That has not been started, and has two partitions."""
    partitions = StandIn(held=lambda: [(("orders", 0), 3), (("orders", 1), 3)], claims=list, lost=lambda _: None)
    offsets = StandIn(is_shared=True, save=lambda **_: broker.call())
    acks = StandIn()
    return GroupMember(GroupRequests(broker, SETTINGS), SimClock(), SETTINGS, partitions, offsets, acks)


def test_missing_topic_and_absent_broker_are_reported_once() -> None:
    reported: list[str] = []
    joining = member(BrokerWithoutTopic())
    joining._log = SimpleNamespace(warning=lambda event, **_: reported.append(event), debug=lambda *_, **__: None)
    for _ in range(2):
        joining._join()
    assert reported == ["there is no such topic yet: it is waited for"]
    for _ in range(70):
        joining._cannot_reach(ConnectionLostError("gone"))
    assert reported[1:] == ["the broker cannot be reached: partitions are given up"]


class BrokerWithPartition:
    """Has given the member a partition."""

    def call(self, *_: Any, **__: Any) -> bytes:
        """One answer."""
        assigned = [["orders", 0, 3, 5, None]]
        return json.dumps(
            {"view": 1, "members": 1, "assigned": assigned, "revoked": [], "logs": [None] * len(assigned)}
        ).encode()


def test_partition_that_cannot_be_begun_is_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    """Found: the thread ended, and the consumer went on with partitions that others were given."""
    told: list[tuple[str, TopicPartition]] = []
    joining = member(BrokerWithPartition())

    def assigned(item: Assigned) -> None:
        told.append(("assigned", item.slot))
        joining._is_closing = len(told) > 1
        if not joining._is_closing:
            raise RuntimeError("can't start new thread")

    joining._offsets = StandIn(
        is_shared=True, load=lambda _slot, _generation, found: found, load_many=lambda _: {}, save=lambda **_: ()
    )
    joining._partitions = StandIn(
        assigned=assigned, lost=lambda slot: told.append(("lost", slot)), held=list, claims=list, drained=list
    )
    joining._acks = StandIn(resolve=lambda: None)
    joining._run()
    assert told == [("assigned", ("orders", 0)), ("lost", ("orders", 0)), ("assigned", ("orders", 0))]
    assert [line["event"] for line in said(caplog)] == ["the member's thread failed; it goes on"]


@pytest.mark.parametrize("code", [FencedError, ForbiddenError])
def test_member_that_is_ended_has_lost_its_partitions_before(code: type[TxmqError]) -> None:
    """Found: an application that was told that another one has its name still had partitions by ``assignment``."""
    told: list[object] = []
    ending = member(SimpleNamespace())

    def end() -> None:
        raise SupersededError if code is FencedError else code

    ending._round = end  # type: ignore[method-assign]
    ending._partitions = StandIn(
        held=lambda: [(("orders", 0), 3)], lost=told.append, refused=lambda error: told.append(type(error))
    )
    ending._run()
    assert told == [("orders", 0), code]


class FullBroker:
    """Keeps as much of groups as there may be."""

    def call(self, *_: Any, **__: Any) -> bytes:
        """Refused."""
        raise OverloadedError("groups_bytes_max")


def test_full_group_is_reported_once_and_heartbeats_go_on() -> None:
    reported: list[str] = []
    refused = member(FullBroker())
    refused._log = SimpleNamespace(warning=lambda event, **_: reported.append(event), debug=lambda *_, **__: None)
    refused._sparingly = Sparingly(refused._log, refused._clock)
    for _ in range(3):
        with pytest.raises(OverloadedError) as caught:
            refused._join()
        refused._cannot_reach(caught.value)
    assert reported == ["the broker refuses the group for now; it is tried again"]
    assert refused._is_saved() is False
    assert reported[1:] == ["offsets could not be saved; it is tried again"]


class BrokerWithMany:
    """Has given the member 600 partitions."""

    def __init__(self) -> None:
        self.heartbeats: list[dict[str, Any]] = []

    def call(self, *words: Any, extensions: dict[str, Any] | None = None, **__: Any) -> bytes:
        """One answer."""
        if "heartbeat" in words:
            self.heartbeats.append(extensions or {})
        assigned = [["orders", number, 3, 5, None] for number in range(600)]
        return json.dumps(
            {"view": 1, "members": 1, "assigned": assigned, "revoked": [], "logs": [None] * len(assigned)}
        ).encode()


@pytest.mark.parametrize("loads_many", [True, False])
def test_many_partitions_are_begun_between_heartbeats(loads_many: bool) -> None:
    """Found: with 600 and a database 5 ms away two members expelled each other for ever."""
    broker = BrokerWithMany()
    joining = member(broker)
    clock = joining._clock
    assert isinstance(clock, SimClock)
    begun: list[int] = []
    silent_s: list[float] = []

    def load(_: object, generation: int, __: object) -> StoredOffset:
        clock.advance(0.02)
        return StoredOffset(generation)

    def load_many(wanted: Sequence[tuple[TopicPartition, int]]) -> dict[TopicPartition, StoredOffset | None]:
        clock.advance(0.1)
        return {slot: StoredOffset(number) for slot, number in wanted} if loads_many else {}

    def assigned(item: Assigned) -> None:
        clock.advance(0.005)
        begun.append(item.slot[1])

    joining._offsets = StandIn(is_shared=True, load=load, load_many=load_many, save=lambda **_: ())
    joining._partitions = StandIn(
        assigned=assigned, held=lambda: [(("orders", number), 3) for number in begun],
        claims=list, kept=lambda *_: None, drained=list, lost=lambda _: None,
    )  # fmt: skip
    joining._acks = StandIn(resolve=lambda: None)
    while len(begun) < 600:
        before = clock.monotonic()
        joining._round()
        silent_s.append(clock.monotonic() - before)
    assert begun == list(range(600))
    assert max(silent_s) < 2 * SETTINGS.heartbeat_interval_s
    assert not any("wait" in fields for fields in broker.heartbeats)
    joining._round()
    assert "wait" in broker.heartbeats[-1]


def test_partitions_that_cannot_be_loaded_hold_up_no_other() -> None:
    joining = member(BrokerWithMany())
    clock = joining._clock
    assert isinstance(clock, SimClock)
    begun: set[int] = set()

    def load(slot: TopicPartition, generation: int, _: object) -> StoredOffset:
        if slot[1] < 10:
            clock.advance(1.0)  # a transaction of the former owner holds the row
            raise StorageError("lock wait timeout")
        return StoredOffset(generation)

    joining._offsets = StandIn(is_shared=True, load=load, load_many=lambda _: {}, save=lambda **_: ())
    joining._partitions = StandIn(
        assigned=lambda item: begun.add(item.slot[1]), held=lambda: [(("orders", number), 3) for number in begun],
        claims=list, kept=lambda *_: None, drained=list, lost=lambda _: None,
    )  # fmt: skip
    joining._acks = StandIn(resolve=lambda: None)
    for _ in range(12):
        joining._round()
    assert begun == set(range(10, 600))


def test_offset_that_cannot_be_loaded_is_said_rarely(caplog: pytest.LogCaptureFixture) -> None:
    """Found: a line for each partition and second, while a database was away."""
    joining = member(BrokerWithPartition())
    clock = joining._clock
    assert isinstance(clock, SimClock)

    def load(*_: object) -> StoredOffset:
        raise StorageError("away")

    def save(**_: object) -> None:
        raise StorageError("away")

    joining._offsets = StandIn(is_shared=True, load=load, load_many=lambda _: {}, save=save)
    joining._partitions = StandIn(held=list, claims=list, drained=list, kept=lambda *_: None)
    joining._acks = StandIn(resolve=lambda: None)
    for _ in range(30):
        joining._round()
        clock.advance(1.0)
    lines = said(caplog)
    events = ["offset could not be loaded; it is tried again", "offsets could not be saved; it is tried again"]
    assert sorted(line["event"] for line in lines) == events
    for _ in range(31):
        joining._round()
        clock.advance(1.0)
    assert [(line["event"], line["more"]) for line in said(caplog) if "loaded" in line["event"]] == [(events[0], 59)]


def waiting(enter: Any, broker: Any) -> tuple[GroupMember, list[object]]:
    """A member whose consumer is not in its offset store yet; and what it has told."""
    told: list[object] = []
    made = member(broker)
    made._others = OtherHomes(enter=enter)
    made._partitions = StandIn(held=list, claims=list, drained=list, lost=told.append, refused=told.append)
    return made, told


def test_member_joins_when_its_offset_store_is_there() -> None:
    answers = iter([False, False, True])
    verbs: list[str] = []

    class Broker(BrokerWithoutTopic):
        def call(self, verb: str, *words: Any, **fields: Any) -> bytes:
            verbs.extend(words[:1] if verb == "group" else ())
            return super().call(verb, *words, **fields)

    made, told = waiting(lambda: next(answers), Broker())
    for joined in ([], [], ["join"]):
        made._round()
        assert verbs == joined
    assert told == []


def test_member_ends_whose_offset_store_refuses_at_last() -> None:
    answers: list[Any] = [False, StorageError("user or password are refused")]

    def enter() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    made, told = waiting(enter, SimpleNamespace())
    made._run()
    assert [str(error) for error in told] == ["user or password are refused"]


def test_member_that_waits_for_its_store_ends_at_once() -> None:
    """Whether the store says so or is in the middle of connecting."""
    entering, is_silent = threading.Event(), threading.Event()
    ends: list[bool] = []
    closed = SimpleNamespace(close=lambda: None)

    def connect() -> bool:
        entering.set()
        is_silent.wait(DEADLINE_S)
        return False

    def fail() -> bool:
        entering.set()
        return False

    for enter in (fail, connect):
        entering.clear()
        made, _ = waiting(enter, closed)
        made.start()
        assert entering.wait(DEADLINE_S)
        made.stop(DEADLINE_S)
        ends.append(is_silent.is_set())
        if enter is connect:
            is_silent.set()
        eventually(made._ended._lock.acquire, "its thread has ended")
    assert ends == [False, False]
