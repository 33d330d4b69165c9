"""Topics that the registry has and this broker has not heard of; and those that it has deleted."""

from __future__ import annotations

from tools.images.requests import batch
from tools.simulated.zookeeper import SimSession
from txmq.registry.zookeeper.registry import ZooKeeperRegistry

from ..verbs.support import pair


def test_topic_is_found_behind_a_server_that_lags() -> None:
    one, two = pair()
    assert isinstance(two.registry, ZooKeeperRegistry)
    session = two.registry._session
    assert isinstance(session, SimSession)
    session.lag()
    one.ask("topic", "create", "a", partitions=2)
    assert session.children("/prod/txmq/topics") == []
    assert two.ask("put", "a", 1, body=batch(b"v"))[0] == 200


def test_poll_of_a_topic_deleted_elsewhere_is_refused() -> None:
    one, two = pair()
    one.ask("topic", "create", "a", partitions=2)
    opaque = one.client.send("get", "a", 0, 0, 100, extensions={"wait": 30_000})
    two.ask("topic", "delete", "a")
    one.node.core.registry_changed(two.registry.topics(), two.registry.homes())
    assert one.client.client.out == []  # the deletion is not durable yet
    one.work()
    assert one.client.received[opaque].error == "unknown-topic"
