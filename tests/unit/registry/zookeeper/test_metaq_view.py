"""MetaQ's nodes: written by each leader, gone with its session or its topic, and none left behind."""

from __future__ import annotations

import json

import pytest

from tests.unit.registry.contract import CLUSTER, A, B, candidate, topic
from txmq.registry.port import Leadership, Standing
from txmq.registry.zookeeper import metaq_view
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.testing.simulated.zookeeper import SimZooKeeper

BROKERS = "/txmq/brokers"


class Leader:
    """A leader of a home, with a session of its own."""

    def __init__(self, ensemble: SimZooKeeper, home: int) -> None:
        self.session = ensemble.open()
        self.registry = ZooKeeperRegistry(self.session)
        self.registry.join(CLUSTER, Standing.USED)
        self.leadership: Leadership = self.registry.lead(candidate(home))

    def show(self) -> bool:
        return self.registry.show(self.leadership, self.registry.topics())


@pytest.fixture
def ensemble() -> SimZooKeeper:
    return SimZooKeeper()


@pytest.fixture
def leaders(ensemble: SimZooKeeper) -> tuple[Leader, Leader]:
    return Leader(ensemble, A), Leader(ensemble, B)


def _nodes(ensemble: SimZooKeeper) -> dict[str, str]:
    """The ephemeral nodes below ``brokers``, and what is in them."""
    found = {path: node for path, node in ensemble.nodes.items() if path.startswith(BROKERS) and node.owner}
    return {path.removeprefix(BROKERS): node.value.decode() for path, node in sorted(found.items())}


def _topics(ensemble: SimZooKeeper) -> list[str]:
    return [path for path in ensemble.nodes if path.startswith(f"{BROKERS}/topics-") and path.count("/") == 4]


def test_each_leader_shows_its_partitions(ensemble: SimZooKeeper, leaders: tuple[Leader, Leader]) -> None:
    leaders[0].registry.create_topic(topic(1, partitions=3), [A, B, A])
    assert all(leader.show() for leader in leaders)
    shown = _nodes(ensemble)
    assert shown["/ids/broker-a0/master"] == "txmq://10.0.0.1:8123"
    assert json.loads(shown["/topics-pub/orders/broker-a0-m"]) == {"numParts": 2, "broker": "broker-a0-m"}
    assert json.loads(shown["/topics-sub/orders/broker-b0-m"]) == {"numParts": 1, "broker": "broker-b0-m"}
    assert len(shown) == 6


def test_a_topic_that_accepts_no_messages_is_not_published(ensemble: SimZooKeeper) -> None:
    leader = Leader(ensemble, A)
    leader.registry.create_topic(topic(1, partitions=1, accept_publish=False), [A])
    leader.show()
    assert [path for path in _nodes(ensemble) if "topics" in path] == ["/topics-sub/orders/broker-a0-m"]


def test_what_changed_is_shown_and_what_went_is_removed(ensemble: SimZooKeeper, leaders: tuple[Leader, Leader]) -> None:
    one, other = leaders
    placed = one.registry.create_topic(topic(1, partitions=2), [A, B])
    assert one.show()
    assert other.show()
    one.registry.alter_topic(placed._replace(topic=topic(1, partitions=3), homes=(A, B, A)))
    one.show()
    assert '"numParts": 2' in _nodes(ensemble)["/topics-pub/orders/broker-a0-m"]
    one.registry.delete_topic(topic(1))
    one.show()
    assert len(_topics(ensemble)) == 2
    other.show()
    assert _topics(ensemble) == []
    assert len(_nodes(ensemble)) == 2


def test_nodes_of_a_former_session_are_made_anew(ensemble: SimZooKeeper) -> None:
    leader = Leader(ensemble, A)
    leader.registry.create_topic(topic(1, partitions=1), [A])
    leader.show()
    before = _nodes(ensemble)
    leader.session.expire()
    assert _nodes(ensemble) == {}
    leader.show()
    assert _nodes(ensemble) == before
    again = Leader(ensemble, A)
    again.show()
    assert {node.owner for node in ensemble.nodes.values() if node.owner} == {again.session.number}


def test_nodes_left_behind_are_removed_by_the_next_leader(
    ensemble: SimZooKeeper, leaders: tuple[Leader, Leader]
) -> None:
    one, other = leaders
    one.registry.create_topic(topic(1, partitions=1), [A])
    one.show()
    ensemble.end_session(one.session.number)
    other.registry.delete_topic(topic(1, partitions=1))
    assert _topics(ensemble)
    other.show()
    assert _topics(ensemble) == []


def test_many_changes_are_made_piece_by_piece(ensemble: SimZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaq_view, "CHANGES_MAX", 3)
    leader = Leader(ensemble, A)
    for number in range(1, 4):
        leader.registry.create_topic(topic(number, f"t{number}", partitions=1), [A])
    assert [leader.show() for _ in range(3)] == [False, False, True]
    assert len(_nodes(ensemble)) == 7


def test_a_broker_takes_another_name_while_one_is_shown(ensemble: SimZooKeeper) -> None:
    leader = Leader(ensemble, A)
    leader.show()
    renamed = candidate(A, 2, former=(1,))._replace(name="renamed")
    leader.registry.show(leader.registry.lead(renamed), leader.registry.topics())
    assert list(_nodes(ensemble)) == ["/ids/renamed/master"]
