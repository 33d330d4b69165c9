"""What operators see and change of a group whose partitions have several homes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.client.consumer.homes_fixture import Cluster, Scene
from txmq.client.admin.groups import Groups
from txmq.client.consumer.group_member import GroupMember
from txmq.errors import BrokerAwayError, ConnectionLostError, GroupActiveError, PartialResultError, UnknownGroupError


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupMember, "start", lambda _: None)


def groups_of(cluster: Cluster) -> Groups:
    routes: Any = cluster
    return Groups(routes, 5.0)


def saved(cluster: Cluster) -> dict[int, int | None]:
    """What is saved, by partition."""
    return {row["partition"]: row["offset"] for row in groups_of(cluster).describe("g")["partitions"]}


def left(*owners: int) -> Cluster:
    """A group that one consumer has begun and left, at 7 in each partition."""
    cluster = Cluster(*owners)
    scene = Scene(cluster).rounds(len(cluster.homes) + 1)
    for consumed in scene.assignment.partitions.values():
        consumed.position = 7
    scene.homes.stop(0)
    return cluster


def test_a_group_is_described_as_one() -> None:
    cluster = Cluster(2, 1, 2)
    Scene(cluster).rounds(3)
    Scene(cluster, "two").rounds(3)
    found = groups_of(cluster).describe("g")
    assert [member["member"] for member in found["members"]] == ["one", "two"]
    assert [(row["partition"], row["lag"]) for row in found["partitions"]] == [(0, 0), (1, 0), (2, 0)]
    assert (found["strategy"], found["away"]) == ("sticky", ())
    assert groups_of(cluster).list() == [{"group": "g", "members": 2}]


def test_a_partition_that_was_never_handed_out_has_a_row() -> None:
    cluster = left(1)
    cluster.place(1, 2)
    assert saved(cluster) == {0: 7, 1: None}


def test_a_home_that_is_away_is_named() -> None:
    cluster = left(1, 2, 3)
    cluster.homes[1].is_away = True
    found = groups_of(cluster).describe("g")
    assert [row["partition"] for row in found["partitions"]] == [0, 2]
    assert found["away"] == ("home2",)
    with pytest.raises(PartialResultError, match="home2 did not answer") as caught:
        groups_of(cluster).list()
    assert (caught.value.found, caught.value.away) == ([{"group": "g", "members": 0}], ["home2"])
    with pytest.raises(ConnectionLostError):
        groups_of(cluster).describe("other")
    cluster.homes[1].is_away = False
    with pytest.raises(UnknownGroupError):
        groups_of(cluster).describe("other")


def test_a_reset_goes_to_the_homes_of_its_partitions() -> None:
    cluster = left(1, 2, 1)
    groups_of(cluster).reset("g", [["a", 0, 3], ["a", 1, 4]])
    assert saved(cluster) == {0: 3, 1: 4, 2: 7}


def test_a_group_at_one_home_is_reset_at_another() -> None:
    cluster = left(1)
    cluster.place(1, 2)
    groups_of(cluster).reset("g", [["a", 1, 4]])
    assert saved(cluster) == {0: 7, 1: 4}
    with pytest.raises(UnknownGroupError):
        groups_of(cluster).reset("other", [["a", 1, 4]])
    groups_of(cluster).reset("other", [["a", 1, 4]], create=True)
    assert [row["group"] for row in groups_of(cluster).list()] == ["g", "other"]


def test_a_change_needs_every_home() -> None:
    cluster = left(1, 2)
    cluster.homes[1].is_away = True
    with pytest.raises(BrokerAwayError, match="home2 cannot be reached: nothing was changed"):
        groups_of(cluster).reset("g", [["a", 0, 3]])
    with pytest.raises(BrokerAwayError, match="home2"):
        groups_of(cluster).delete("g")
    cluster.homes[1].is_away = False
    assert saved(cluster) == {0: 7, 1: 7}


def test_a_member_at_any_home_refuses_a_change() -> None:
    cluster = left(1, 2)
    cluster.homes[0].is_away = True
    Scene(cluster).rounds(2)
    cluster.homes[0].is_away = False
    with pytest.raises(GroupActiveError):
        groups_of(cluster).reset("g", [["a", 0, 3]])
    with pytest.raises(GroupActiveError):
        groups_of(cluster).delete("g")
    assert saved(cluster) == {0: 7, 1: 7}


def test_a_change_that_ends_halfway_says_where_it_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = left(1, 2)
    groups = groups_of(cluster)
    ask = Groups._ask

    def asked(self: Groups, link: Any, action: str, *rest: Any) -> Any:
        if action in ("reset", "delete") and link.home == 2:
            raise ConnectionLostError("gone")
        return ask(self, link, action, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Groups, "_ask", asked)
        with pytest.raises(ConnectionLostError, match="gone; done at home1 before: repeat it"):
            groups.reset("g", [["a", 0, 3], ["a", 1, 3]])
        assert saved(cluster) == {0: 3, 1: 7}
        with pytest.raises(ConnectionLostError, match="done at home1"):
            groups.delete("g")
    groups.delete("g")
    with pytest.raises(UnknownGroupError):
        groups.delete("g")


def test_deferred_texts_are_changed_where_they_are() -> None:
    cluster = left(1, 2)
    refused = groups_of(cluster).change_deferred("g", [["a", 0, None, "x"], ["a", 1, "other", "y"]])
    assert refused == [{"topic": "a", "partition": 1, "deferred": None}]
    assert cluster.homes[0].node.state.saved.named["g"].offsets[1, 0].deferred == "x"
