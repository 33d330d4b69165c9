"""A consumer joins its group at every home, and a home that is away costs its own partitions alone."""

from __future__ import annotations

import pytest

from tests.unit.client.consumer.homes_fixture import Cluster, Scene
from txmq.broker.state.state import State
from txmq.client.consumer.group_member import GroupMember
from txmq.errors import GroupActiveError
from txmq.model import TopicPartition


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupMember, "start", lambda _: None)


def partitions(*numbers: int) -> list[TopicPartition]:
    return [("a", number) for number in numbers]


def members_at(cluster: Cluster) -> list[list[str]]:
    """The members that each home knows."""
    groups = [home.node.context.groups.get("g") for home in cluster.homes]
    return [sorted(group.members) if group is not None else [] for group in groups]


def test_homes_are_joined_one_after_another_in_their_order() -> None:
    cluster = Cluster(1, 2, 3, 1)
    scene = Scene(cluster)
    assert len(scene.members) == 1
    scene.members[0]._round()
    assert (scene.held, members_at(cluster)) == (partitions(0, 3), [["one"], [], []])
    scene.homes.look()
    scene.rounds(3)
    assert (scene.held, members_at(cluster)) == (partitions(0, 1, 2, 3), [["one"]] * 3)


def test_a_home_that_appears_later_is_joined() -> None:
    cluster = Cluster(1, 1)
    scene = Scene(cluster).rounds(2)
    cluster.place(1, 1, 2)
    assert scene.rounds(2).held == partitions(0, 1, 2)


def test_two_consumers_share_all_homes_evenly() -> None:
    cluster = Cluster(1, 2, 1, 2, 3, 3)
    one = Scene(cluster).rounds(4)
    two = Scene(cluster, "two").rounds(4)
    for _ in range(6):
        cluster.clock.advance(1.1)
        one.rounds()
        two.rounds()
    assert (len(one.held), len(two.held)) == (3, 3)
    assert sorted(one.held + two.held) == partitions(*range(6))


def test_a_home_that_is_away_costs_its_partitions_alone() -> None:
    cluster = Cluster(1, 2, 1)
    scene = Scene(cluster).rounds(2)
    cluster.homes[1].is_away = True
    for _ in range(30):
        cluster.clock.advance(0.1)
        scene.rounds()
    assert scene.held == partitions(0, 1, 2), "the session timeout is not over"
    for _ in range(40):
        cluster.clock.advance(0.1)
        scene.rounds()
    assert scene.held == partitions(0, 2)
    scene.assignment.partitions["a", 0].position = 7
    cluster.clock.advance(1.1)
    scene.rounds()
    assert cluster.homes[0].node.state.saved.named["g"].offsets[1, 0].offset == 7
    cluster.homes[1].is_away = False
    assert scene.rounds(2).held == partitions(0, 1, 2)


def test_a_first_home_that_is_away_holds_up_no_other() -> None:
    cluster = Cluster(1, 2)
    cluster.homes[0].is_away = True
    scene = Scene(cluster).rounds(2)
    assert scene.held == partitions(1)


def test_each_home_gets_the_offsets_of_its_partitions() -> None:
    cluster = Cluster(1, 2)
    scene = Scene(cluster).rounds(2)
    for number in (0, 1):
        scene.assignment.partitions["a", number].position = 5 + number
    scene.homes.save(scene.assignment.partitions["a", 1])
    saved = [home.node.state.saved.named["g"].offsets for home in cluster.homes]
    assert (list(saved[0]), saved[1][1, 1].offset) == ([], 6)
    scene.homes.stop(0)
    assert saved[0][1, 0].offset == 5


def test_leaving_leaves_every_home() -> None:
    cluster = Cluster(1, 2, 3)
    scene = Scene(cluster).rounds(3)
    scene.homes.stop(0)
    assert members_at(cluster) == [[], [], []]
    scene.homes.look()
    assert len(scene.members) == 3


def test_a_consumer_that_one_home_refuses_ends_everywhere() -> None:
    cluster = Cluster(1, 2)
    scene = Scene(cluster).rounds(2)
    scene.assignment.fail(GroupActiveError("another one"))
    scene.homes.look()
    assert [member._is_closing for member in scene.members] == [True, True]


def test_a_partition_added_at_a_home_is_consumed() -> None:
    cluster = Cluster(1, 2)
    scene = Scene(cluster).rounds(2)
    cluster.place(1, 2, 2)
    assert scene.rounds(2).held == partitions(0, 1, 2)


# --- where a group begins --------------------------------------------------------------------------------------------


def begun_at(scene: Scene) -> dict[int, int]:
    """Where it began in each partition; each has messages 0 to 99."""
    return {number: consumed.position for (_, number), consumed in scene.assignment.partitions.items()}


def test_a_group_that_is_new_begins_at_the_end_everywhere() -> None:
    cluster = Cluster(1, 2, 3, 1)
    one = Scene(cluster, start="latest").rounds(4)
    assert begun_at(one) == dict.fromkeys(range(4), 100)


def test_members_that_come_together_begin_at_the_end_everywhere() -> None:
    """The second one finds that the group has begun at the first home."""
    cluster = Cluster(1, 1, 2, 2)
    one, two = Scene(cluster, start="latest").rounds(), Scene(cluster, "two", start="latest").rounds(2)
    for _ in range(8):
        cluster.clock.advance(1.1)
        one.rounds()
        two.rounds()
    assert begun_at(one) | begun_at(two) == dict.fromkeys(range(4), 100)


def test_a_partition_added_under_members_is_later() -> None:
    cluster = Cluster(1)
    Scene(cluster, start="latest").rounds(2)
    cluster.place(1, 2)
    one = Scene(cluster, start="latest").rounds(3)
    assert begun_at(one)[1] == 0


def test_a_partition_added_while_all_are_away_is_later() -> None:
    """The offsets are at one home, the partition is at another one."""
    cluster = Cluster(1, 2)
    before = Scene(cluster, start="latest").rounds(3)
    before.homes.stop(0)
    cluster.place(1, 2, 3)
    after = Scene(cluster, start="latest").rounds(4)
    assert begun_at(after) == {0: 100, 1: 100, 2: 0}


def test_a_partition_that_a_consumer_did_not_find_is_later() -> None:
    """No home has handed anything to the group by then."""
    cluster = Cluster(1, 2)
    cluster.homes[0].is_away = cluster.homes[1].is_away = True
    scene = Scene(cluster, start="latest").rounds(2)
    cluster.place(1, 2, 3)
    assert begun_at(scene.rounds(2)) == {2: 0}


def test_a_home_that_is_away_may_hide_a_beginning() -> None:
    cluster = Cluster(1, 2)
    cluster.is_map_away = True
    before = Scene(cluster, start="latest").rounds(3)
    before.homes.stop(0)
    cluster.place(1, 2, 3)
    cluster.homes[0].is_away = cluster.homes[1].is_away = True
    after = Scene(cluster, start="latest").rounds(4)
    assert begun_at(after) == {}
    cluster.homes[1].is_away = False
    assert begun_at(after.rounds(4)) == {1: 100, 2: 0}


def test_a_member_whose_partition_waits_stays_in_the_group() -> None:
    cluster = Cluster(1, 2)
    cluster.is_map_away = cluster.homes[0].is_away = True
    scene = Scene(cluster, start="latest")
    for _ in range(100):
        cluster.clock.advance(0.1)
        scene.rounds()
    assert (begun_at(scene), scene.members[1]._is_joined) == ({}, True)
    cluster.homes[0].is_away = False
    assert begun_at(scene.rounds(2)) == {0: 100, 1: 100}


def test_a_deleted_group_begins_anew() -> None:
    cluster = Cluster(1)
    before = Scene(cluster, start="latest").rounds(2)
    before.homes.stop(0)
    cluster.place(1, 2)
    answer = cluster.homes[0].node.connect().ask("group", "delete", "g", body=b"")
    assert answer.code == 200, answer
    assert begun_at(Scene(cluster, start="latest").rounds(3)) == {0: 100, 1: 100}


def test_the_beginning_survives_a_restart_of_its_home() -> None:
    cluster = Cluster(1)
    Scene(cluster, start="latest").rounds(2).homes.stop(0)
    state = cluster.homes[0].node.state
    again = State()
    again.saved.restore(state.saved.snapshot())
    assert again.saved.named["g"].began == {1: 1}
