"""A consumer that must be the only one of its group is so over all homes: whatever of them it can reach."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.client.consumer.homes_fixture import Cluster, Scene
from tools.simulated.disk import SimDisk
from txmq.client.consumer.group_member import GroupMember
from txmq.client.consumer.offsets.file_store import FileOffsetStore
from txmq.errors import GroupActiveError
from txmq.model import TopicPartition


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupMember, "start", lambda _: None)


def alone(cluster: Cluster, name: str = "one", **given: Any) -> Scene:
    return Scene(cluster, name, strategy="exclusive", **given)


def together(cluster: Cluster, *scenes: Scene, seconds: float = 3.0) -> None:
    """Time passes, in which each consumer's threads do a round, and the brokers' timers run."""
    for _ in range(round(seconds / 0.25)):
        for scene in scenes:
            scene.rounds()
        for home in cluster.homes:
            home.pass_time()
        cluster.clock.advance(0.25)
        never_two(cluster, *scenes)


def never_two(cluster: Cluster, *scenes: Scene) -> None:
    """At most one consumer has anything that it could save."""
    owners = [scene for scene in scenes if any(owns(cluster, scene, slot) for slot in scene.held)]
    assert len(owners) <= 1, [scene.held for scene in scenes]


def owns(cluster: Cluster, scene: Scene, slot: TopicPartition) -> bool:
    """Whether the partition's home would save its offset for this consumer."""
    group = cluster.link_for(*slot).node.context.groups.get("g")
    owned = group.owned.get(slot) if group is not None else None
    return owned is not None and (owned.member, owned.generation) == (
        scene.homes._membership.name, scene.assignment.partitions[slot].generation,
    )  # fmt: skip


EVERYTHING = [("a", number) for number in range(4)]


def test_one_has_everything_and_the_other_stands_by() -> None:
    cluster = Cluster(1, 2, 3, 1)
    one, two = alone(cluster).rounds(4), alone(cluster, "two")
    together(cluster, one, two)
    assert (one.held, two.held) == (EVERYTHING, [])
    assert cluster.anchors == {("group", "g"): 1}
    assert [sorted(home.node.context.groups["g"].members) for home in cluster.homes] == [
        ["one", "two"],
        ["one"],
        ["one"],
    ]


def test_the_registry_is_asked_once_for_an_anchor() -> None:
    cluster = Cluster(1, 2)
    one, two = alone(cluster).rounds(4), alone(cluster, "two").rounds(4)
    one.homes.stop(0)
    together(cluster, two)
    alone(cluster, "three").rounds(4)
    assert [home.asked for home in cluster.homes] == [1, 1]


def test_who_stands_by_takes_over_from_one_that_left() -> None:
    """Also if a home is away: the one that left consumes nothing there."""
    cluster = Cluster(1, 2, 3, 1)
    one, two = alone(cluster).rounds(4), alone(cluster, "two").rounds(4)
    cluster.homes[2].is_away = True
    one.homes.stop(0)
    together(cluster, two)
    assert two.held == [EVERYTHING[0], EVERYTHING[1], EVERYTHING[3]]
    cluster.homes[2].is_away = False
    together(cluster, two)
    assert two.held == EVERYTHING


def test_who_stands_by_takes_over_from_one_that_died() -> None:
    cluster = Cluster(1, 2, 1, 2)
    one, two = alone(cluster).rounds(4), alone(cluster, "two").rounds(4)
    one.assignment.partitions.clear()
    together(cluster, two, seconds=9)
    assert two.held == EVERYTHING


def test_one_alive_here_and_dead_there_is_not_beside_another() -> None:
    """It cannot reach the anchor, and goes on at the other home until that has heard of its successor."""
    cluster = Cluster(1, 2, 1, 2)
    one, two = alone(cluster).rounds(4), alone(cluster, "two").rounds(4)
    one.cut_off(1)
    together(cluster, one, two, seconds=12)
    assert (one.held, two.held) == ([], EVERYTHING)
    one.cut_off()
    together(cluster, one, two)
    assert (one.held, two.held) == ([], EVERYTHING)


def test_a_successor_waits_for_a_home_that_it_cannot_reach() -> None:
    """One that was paused comes back there, and nobody else has anything."""
    cluster = Cluster(1, 2, 1, 2)
    one, two = alone(cluster).rounds(4), alone(cluster, "two").rounds(4)
    two.cut_off(2)
    together(cluster, two, seconds=9)
    assert two.held == []
    never_two(cluster, one, two)
    two.cut_off()
    together(cluster, two)
    assert two.held == EVERYTHING
    never_two(cluster, one, two)
    assert one.homes._homes[1].offsets.save(everything=True) is not None
    together(cluster, one, two)
    assert (one.held, two.held) == ([], EVERYTHING)


def test_a_late_save_under_an_old_grant_is_refused() -> None:
    cluster = Cluster(1, 2)
    one, two = alone(cluster).rounds(4), alone(cluster, "two").rounds(4)
    together(cluster, two, seconds=9)
    one.assignment.partitions["a", 1].position = 50
    one.homes.save(one.assignment.partitions["a", 1])
    assert cluster.homes[1].node.state.saved.named["g"].offsets.get((1, 1)) is None
    assert two.held == [("a", 0), ("a", 1)]


def test_an_anchor_that_restarts_leaves_the_grant_where_it_was() -> None:
    cluster = Cluster(1, 2, 1, 2)
    one, two = alone(cluster).rounds(4), alone(cluster, "two").rounds(4)
    before = one.homes._grant
    assert before is not None
    assert before.number == 1
    cluster.homes[0].restart()
    two.rounds(2)
    together(cluster, one, two)
    assert (before.number, one.held, two.held) == (1, EVERYTHING, [])


def test_a_file_of_offsets_has_one_consumer_over_all_homes() -> None:
    cluster = Cluster(1, 2)
    stores = [FileOffsetStore("offsets", disk=SimDisk()) for _ in range(2)]
    for store in stores:
        store.enter("g")
    one, two = Scene(cluster, store=stores[0]).rounds(4), Scene(cluster, "two", store=stores[1])
    assert one.held == [("a", 0), ("a", 1)]
    for _ in range(40):
        cluster.clock.advance(0.25)
        one.rounds()
        with pytest.raises(GroupActiveError):
            two.members[0]._round()
    assert two.held == []


def test_members_that_share_are_not_put_out() -> None:
    cluster = Cluster(1, 2)
    one = Scene(cluster).rounds(3)
    two = Scene(cluster, "two", store=FileOffsetStore("offsets", disk=SimDisk()))
    with pytest.raises(GroupActiveError):
        two.members[0]._round()
    assert one.rounds(2).held == [("a", 0), ("a", 1)]
