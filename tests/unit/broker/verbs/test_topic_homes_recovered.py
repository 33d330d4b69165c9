"""A change of a topic goes on: after a kill of the broker between any two of its steps, after a lost connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tools.simulated.zookeeper import SimSession, SimZooKeeper
from txmq.broker.cluster.registry_asks import DropTopic, carry_out
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.registry.zookeeper.session import SessionState

from .support import A, B, Broker, pair, puts, with_messages, zookeeper


class Step(NamedTuple):
    """How far a change of a topic got before the broker died."""

    reaches_registry: bool
    is_accepted: bool = False
    is_durable: bool = False


STEPS = {
    "nobody was asked": Step(False), "the registry has it": Step(True), "the core has it": Step(True, True),
    "it is durable": Step(True, True, True),
}  # fmt: skip


@pytest.mark.parametrize("loses_power", [False, True], ids=["killed", "without power"])
@pytest.mark.parametrize("action", ["create", "alter"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_change_of_a_topic_goes_on_after_a_kill(step: Step, action: str, loses_power: bool) -> None:
    one, two = pair()
    if action == "alter":
        one.ask("topic", "create", "a", partitions=2)
    opaque = one.client.send("topic", action, "a", extensions={"partitions": 4})
    (ask,) = one.asks()
    if step.reaches_registry:
        answer = carry_out(one.registry, A, ask)
        if step.is_accepted:
            one.node.core.registry_answered(ask.number, answer)
        if step.is_durable:
            one.node.pump()
    assert (opaque in one.client.received) is step.is_durable
    again = one.again(one.node.disk.crash() if loses_power else one.node.kill())
    known = again.node.state.topics.find("a")
    assert (known is not None and known.config.partitions == 4) is step.is_durable
    again.lead()
    if not step.reaches_registry:
        assert again.ask("topic", action, "a", partitions=4)[0] == 200
    two.refresh()
    (topic,) = again.registry.topics().topics
    assert (topic.homes, topic.topic.topic_id) == ((A, B, A, B), 1)
    for broker in (again, two):
        assert broker.node.state.placed == {1: topic}
    assert (puts(again, "a", 4), puts(two, "a", 4)) == ([200, 409] * 2, [409, 200] * 2)


@pytest.mark.parametrize("is_carried_out", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(("action", "partitions"), [("create", 3), ("alter", 3), ("delete", 0)])
def test_connection_lost_at_any_change_makes_no_difference(action: str, partitions: int, is_carried_out: bool) -> None:
    settings = {"partitions": partitions} if partitions else {}
    for changes in range(10):
        broker = Broker(zookeeper(SimZooKeeper()), A).lead()
        if action != "create":
            broker.ask("topic", "create", "a", partitions=2)
        assert isinstance(broker.registry, ZooKeeperRegistry)
        session = broker.registry._session
        assert isinstance(session, SimSession)
        states: list[SessionState] = []
        session.listen(states.append)
        session.lose_next(after=changes, is_carried_out=is_carried_out)
        assert broker.ask("topic", action, "a", body=None, **settings)[0] == 200
        found = broker.registry.topics()
        assert [placed.homes for placed in found.topics] == ([(A,) * partitions] if partitions else [])
        assert (found.deleted, len(broker.node.state.topics)) == ((), len(found.topics))
        if not states:
            assert changes > 0
            return
    raise AssertionError("the change takes more calls than are tried here")


def _tombstone_seen_by_no_one(one: Broker) -> None:
    pass


def _deletion_is_accepted(one: Broker) -> None:
    one.node.core.registry_changed(one.registry.topics(), one.registry.homes())
    assert one.node.core.take_registry_asks() == []  # it is not durable yet


def _deletion_is_durable(one: Broker) -> None:
    _deletion_is_accepted(one)
    (ask,) = one.asks()
    assert ask == DropTopic(ask.number, 1)


def _registry_is_told(one: Broker) -> None:
    _deletion_is_accepted(one)
    (ask,) = one.asks()
    carry_out(one.registry, A, ask)


@pytest.mark.parametrize(
    ("steps", "is_durable"),
    [
        (_tombstone_seen_by_no_one, False), (_deletion_is_accepted, False), (_deletion_is_durable, True),
        (_registry_is_told, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loses_power", [False, True])
def test_deletion_goes_on_after_a_kill(steps: Callable[[Broker], None], is_durable: bool, loses_power: bool) -> None:
    one, two = with_messages()
    two.ask("topic", "delete", "a")
    steps(one)
    disk = one.node.disk.crash() if loses_power else one.node.kill()
    again = one.again(disk)
    assert ("a" in {topic.config.name for topic in again.node.state.topics}) is not is_durable
    assert bool(again.node.disk.list_directory("log/1")) is not is_durable
    again.lead()
    assert again.node.state.topics.find("a") is None
    assert again.registry.topics().deleted == ()
