"""A registry is made from facts, in an ensemble that is empty, or older, or dies on the way."""

from __future__ import annotations

import pytest

from tests.unit.registry.contract import CLUSTER, USER, A, B, candidate, topic
from tests.unit.registry.zookeeper.test_rebuild_from_journals_facts import ORDERS, facts
from tests.unit.registry.zookeeper.tree import values
from tools.simulated.zookeeper import SimZooKeeper
from txmq.errors import ForeignClusterError, HomeInUseError, HomeSupersededError, RegistryError
from txmq.registry.cluster_metadata import Access, DeletedTopic, PlacedTopic, Standing
from txmq.registry.zookeeper.rebuild_from_journals import Facts, Rebuilding, rebuilt
from txmq.registry.zookeeper.registry import ZooKeeperRegistry

CALLS_MAX = 200
WITH_USERS = facts(
    A, queries=("totals",), last_query_epoch=7, grants={"billing": 4}, last_topic_id=9,
    access=Access(3, {"user.ops": USER, "secret": {"mock": "5ec", "between_brokers": "b07"}}),
)  # fmt: skip


def rebuild(ensemble: SimZooKeeper, *each: Facts, lost: dict[int, str] | None = None) -> ZooKeeperRegistry:
    Rebuilding(ensemble.open()).rebuild(rebuilt(each, lost or {}))
    return ZooKeeperRegistry(ensemble.open())


def test_an_empty_ensemble_gets_all_that_the_facts_have() -> None:
    registry = rebuild(SimZooKeeper(), WITH_USERS, facts(B))
    assert registry.join(CLUSTER, Standing.MEMBER) == CLUSTER
    assert (registry.topics().topics, registry.topics().version) == ((ORDERS,), 2)
    assert registry.access() == WITH_USERS.access
    assert registry.anchors("group", ["billing"]) == {"billing": A}
    assert registry.anchors("query", ["totals"]) == {"totals": A}
    assert (registry.reserve_topic_ids(1)[0], registry.draw_query_epoch()) == (10, 8)


def test_each_home_leads_again_and_copies_are_refused() -> None:
    registry = rebuild(SimZooKeeper(), facts(A), facts(B))
    with pytest.raises(HomeSupersededError, match="does not know"):
        registry.lead(candidate(A, 9, former=(1,), epoch=2))  # from before the newest start
    leadership = registry.lead(candidate(A, 9, former=(1, 2), epoch=3))
    assert leadership.epoch == 4
    registry.announce(leadership)
    assert [home.name for home in registry.homes()] == ["broker-a0", f"{B:016x}"]


def test_a_home_that_is_lost_is_given_up_at_once() -> None:
    registry = rebuild(SimZooKeeper(), facts(A), lost={B: "burnt"})
    assert [home.retired for home in registry.homes()] == ["", "burnt"]
    with pytest.raises(HomeSupersededError, match="retired, as lost"):
        registry.lead(candidate(B, 9, former=(1, 2), epoch=3))


def test_what_is_newer_in_the_ensemble_stays() -> None:
    ensemble = SimZooKeeper()
    registry = ZooKeeperRegistry(ensemble.open())
    registry.join(CLUSTER, Standing.USED)
    for home in (A, B):
        registry.lead(candidate(home, 2))
    placed = registry.create_topic(topic(1), [A, B])
    altered = registry.alter_topic(PlacedTopic(topic(1, retention_ms=5), (A, B), placed.version))
    registry.create_topic(topic(2, "gone"), [A, B])
    registry.delete_topic(topic(2, "gone"))
    gone = PlacedTopic(topic(2, "gone"), (A, B), 3)
    registry.change_access(A, 0, {"quota.topic.a": {"n": 1}})
    registry = rebuild(ensemble, facts(A, topics=(ORDERS, gone)), facts(B, topics=(gone,)))
    found = registry.topics()
    assert (found.topics, found.deleted) == ((altered,), (DeletedTopic(2, "gone", (A, B)),))
    assert found.version == 5
    assert registry.access().version == 1


def test_an_ensemble_that_does_not_fit_is_refused() -> None:
    ensemble = SimZooKeeper()
    registry = ZooKeeperRegistry(ensemble.open())
    registry.join(CLUSTER, Standing.USED)
    registry.announce(registry.lead(candidate(A, 2)))
    with pytest.raises(HomeInUseError, match="stop all brokers first"):
        rebuild(ensemble, facts(A), facts(B))
    registry.lead(candidate(A, 3, former=(2,)))
    registry.close()
    with pytest.raises(HomeSupersededError, match="make them anew"):
        rebuild(ensemble, facts(A), facts(B))
    with pytest.raises(ForeignClusterError):
        rebuild(ensemble, facts(A, cluster=0xAA), facts(B, cluster=0xAA))


def test_users_are_written_to_closed_nodes_only() -> None:
    session = SimZooKeeper().open()
    session.has_credentials = False
    with pytest.raises(RegistryError, match="nodes are open"):
        Rebuilding(session).rebuild(rebuilt([WITH_USERS, facts(B)], {}))


def test_a_rebuild_that_ends_anywhere_is_finished_by_the_next() -> None:
    made = rebuilt([WITH_USERS, facts(B)], {})
    whole = SimZooKeeper()
    Rebuilding(whole.open()).rebuild(made)
    for calls in range(CALLS_MAX):
        ensemble = SimZooKeeper()
        session = ensemble.open()
        session.lose_next(after=calls, is_carried_out=bool(calls % 2))
        states: list[object] = []
        session.listen(states.append)
        Rebuilding(session).rebuild(made)
        left, wanted = values(ensemble.open()), values(whole.open())
        assert left.pop("/txmq/topics") >= wanted.pop("/txmq/topics")  # its version rises each time
        assert left == wanted, calls
        if not states:
            return
    pytest.fail("each call lost its connection")
