"""What an idle tick and a heartbeat cost: nothing that grows with groups, topics, members or polls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.images.node import Client, Node
from txmq.broker.state.group_membership import GroupMembership
from txmq.broker.verbs import partition_handover as group_handover

from ...growth import growth
from .support import node

MEMBER_WORDS = {"timeout": 600_000, "topics": "a,b"}


def _join(client: Client, group: str, **words: object) -> None:
    given = {"member": "m", **MEMBER_WORDS, **words}
    assert client.ask("group", "join", group, extensions=given, body=b"[]").code == 200  # type: ignore[arg-type]


def _with_groups(count: int, topics: int = 0) -> tuple[Node, Client]:
    broker = node(groups_max=100_000, partitions_max=100_000)
    client = broker.connect()
    for number in range(topics):
        client.ask("topic", "create", f"t{number}")
    wanted = ",".join(["a", "b", *(f"t{number}" for number in range(topics))])
    for number in range(count):
        _join(client, f"g{number}", topics=wanted)
    for _ in range(40):  # what a former life's members may still claim is over
        _tick(broker)
    return broker, client


def _tick(broker: Node, ms: int = 50) -> None:
    broker.clock.advance(ms / 1000)
    broker.core.tick(broker.clock.now_ms())
    broker.pump()


def _ticks(broker: Node, count: int = 300) -> Callable[[], None]:
    def tick() -> None:
        for _ in range(count):
            broker.core.tick(broker.clock.now_ms())

    return tick


def test_idle_tick_cost_does_not_grow_with_groups() -> None:
    # A step is one group's share of 300 ticks: a tenth of it for ten times the groups is the same cost in all.
    assert growth(lambda count: _ticks(_with_groups(count)[0]), 20, 200) < 0.4


def test_idle_tick_cost_does_not_grow_with_topics() -> None:
    assert growth(lambda count: _ticks(_with_groups(5, count)[0]), 20, 200) < 0.4


def test_a_heartbeat_that_tells_nothing_new_walks_over_no_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, client = _with_groups(1)
    walked: list[str] = []
    monkeypatch.setattr(GroupMembership, "due", lambda _self: [walked.append("due")][:0])  # type: ignore[func-returns-value]
    monkeypatch.setattr(GroupMembership, "set_partitions", lambda _self, _partitions, _ids: walked.append("topics"))
    version = broker.context.groups["g0"].members["m"].version
    words: dict[str, str | int | None] = {"member": "m", "view": version, "wait": 30_000}
    for _ in range(10):
        client.send("group", "heartbeat", "g0", extensions=words, body=b"[]")
    broker.pump()
    assert walked == []


def test_idle_tick_cost_does_not_grow_with_polls_and_heartbeats() -> None:
    def waiting(count: int) -> Callable[[], None]:
        broker, client = _with_groups(1)
        for _ in range(count):
            client.send("get", "a", 0, 0, 1000, extensions={"wait": 30_000})
            client.send("group", "heartbeat", "g0", extensions={"member": "m", "view": 3, "wait": 30_000}, body=b"[]")
        broker.pump()
        return _ticks(broker)

    assert growth(waiting, 50, 1_000) < 0.2  # even is 0.05


def test_idle_tick_settles_no_group_and_looks_at_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, _ = _with_groups(10)
    touched: list[str] = []

    def expired(_self: GroupMembership, _now_ms: int) -> list[str]:
        touched.append("members")
        return []

    monkeypatch.setattr(group_handover, "_hand_over", lambda _context, name, _membership: touched.append(name))
    monkeypatch.setattr(GroupMembership, "expired", expired)
    for _ in range(100):
        _tick(broker)
    assert touched == []


def test_failed_handover_is_tried_until_it_succeeds() -> None:
    """A transaction holds the offset; nothing of the group changes meanwhile."""
    broker, client = _with_groups(1)
    membership = broker.context.groups["g0"]
    place = (broker.partition("a").topic_id, 0)
    broker.state.saved.held["g0", *place] = (1, 1)
    membership.take_back(("a", 0))
    for _ in range(5):
        _tick(broker)
        client.ask("group", "heartbeat", "g0", extensions={"member": "m"}, body=b"[]")
    assert ("a", 0) not in membership.owned
    del broker.state.saved.held["g0", *place]
    _tick(broker)
    assert membership.owned["a", 0].member == "m"


def test_new_topics_and_partitions_are_handed_over_with_next_tick() -> None:
    broker, client = _with_groups(1)
    _join(client, "g0", topics="a,b,late")
    client.ask("topic", "create", "late")
    client.ask("topic", "alter", "a", extensions={"partitions": 4})
    _tick(broker)
    assert {("late", 0), ("a", 3)} <= broker.context.groups["g0"].owned.keys()


def test_silent_member_is_removed_on_time_among_many_live_ones() -> None:
    broker, client = _with_groups(0)
    for number in range(5):
        _join(client, "g", member=f"m{number}", timeout=1000)
    for _ in range(19):
        _tick(broker)
        for number in range(1, 5):
            client.ask("group", "heartbeat", "g", extensions={"member": f"m{number}"}, body=b"[]")
    assert len(broker.context.groups["g"].members) == 5
    for _ in range(2):
        _tick(broker)
    assert sorted(broker.context.groups["g"].members) == ["m1", "m2", "m3", "m4"]
    for _ in range(20):
        _tick(broker)
    assert broker.context.groups == {}
