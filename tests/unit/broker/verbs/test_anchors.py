"""The anchors of groups: fixed by the registry, forgotten with the group, and chosen anew when their home is lost."""

from __future__ import annotations

import json

import pytest

from txmq.broker.cluster.registry_asks import FindAnchor, ReleaseAnchor
from txmq.broker.state import group_membership
from txmq.broker.state.group_membership import PendingGroups

from .support import A, B, Broker, pair


def with_topic() -> tuple[Broker, Broker]:
    """Two homes with a topic, each with one of its partitions."""
    one, two = pair()
    assert one.ask("topic", "create", "a", partitions=2)[0] == 200
    two.refresh()
    return one, two


def _words(action: str, group: str) -> tuple[str, ...]:
    return "group", action, group


def join(broker: Broker, group: str = "g", member: str = "m", grant: int = 0) -> tuple[int, str]:
    """One consumer that must be the only one."""
    words = {"member": member, "topics": "a", "strategy": "exclusive", "grant": grant}
    return broker.ask(*_words("join", group), body=b"[]", **words)  # type: ignore[arg-type]


def leave_and_delete(broker: Broker, group: str = "g") -> tuple[int, str]:
    """The consumer leaves in order, and an operator deletes the group."""
    assert broker.ask(*_words("leave", group), body=b"[]", member="m")[0] == 200
    return broker.ask(*_words("delete", group), body=b"[]")


def anchor(broker: Broker, group: str = "g") -> int | None:
    """As the registry has it."""
    return broker.registry.anchors("group", [group]).get(group)


def view(answered: tuple[int, str]) -> dict[str, object]:
    """What a member was told."""
    code, text = answered
    assert code == 200, text
    found: dict[str, object] = json.loads(text)
    return found


def test_deleted_group_releases_its_anchor() -> None:
    """The registry kept a node for each name that a group ever had."""
    one, two = with_topic()
    first = view(join(one))
    assert (first["anchor"], anchor(one)) == (f"{A:016x}", A)
    assert leave_and_delete(one)[0] == 200
    assert anchor(one) is None
    again = view(join(two))
    assert (again["anchor"], anchor(one)) == (f"{B:016x}", B)
    elsewhere = view(join(one))
    assert (elsewhere["anchor"], elsewhere["view"]) == (f"{B:016x}", 0)


def test_anchor_restarted_since_releases_it_as_well() -> None:
    one, _ = with_topic()
    join(one)
    one.ask(*_words("leave", "g"), body=b"[]", member="m")
    one = one.again().lead()
    assert one.ask(*_words("delete", "g"), body=b"[]")[0] == 200
    assert anchor(one) is None


def test_anchor_of_another_home_stays() -> None:
    one, two = with_topic()
    grant = view(join(one))["grant"]
    assert isinstance(grant, int)
    view(join(two, grant=grant))
    assert leave_and_delete(two)[0] == 200
    assert anchor(one) == A


def test_group_that_shares_asks_for_no_release() -> None:
    one, _ = with_topic()
    assert one.ask(*_words("join", "g"), body=b"[]", member="m", topics="a")[0] == 200
    assert one.ask(*_words("leave", "g"), body=b"[]", member="m")[0] == 200
    one.client.send(*_words("delete", "g"), body=b"[]")
    assert one.asks() == []


def test_anchor_is_asked_for_behind_its_release() -> None:
    one, _ = with_topic()
    join(one)
    one.ask(*_words("leave", "g"), body=b"[]", member="m")
    one.client.send(*_words("delete", "g"), body=b"[]")
    fields = {"member": "m", "topics": "a", "strategy": "exclusive"}
    one.client.send(*_words("join", "g"), body=b"[]", extensions=fields)
    assert one.node.core.take_registry_asks() == []  # that the group is deleted is not durable
    asks = one.asks()
    assert [type(ask) for ask in asks] == [ReleaseAnchor, FindAnchor]
    for ask in asks:
        one.carry_out(ask)
    assert anchor(one) == A


def test_grants_of_next_anchor_are_above_those_of_former() -> None:
    one, two = with_topic()
    former = view(join(one))["grant"]
    assert isinstance(former, int)
    view(join(two, grant=former))
    for broker in (one, two):
        assert leave_and_delete(broker)[0] == 200
    following = view(join(two))["grant"]
    assert isinstance(following, int)
    assert following > former


def test_group_whose_anchor_is_lost_chooses_another() -> None:
    """Homes that had heard of the anchor named it until they were restarted, and nobody was granted anything."""
    one, two = with_topic()
    join(one)
    assert view(join(two))["view"] == 0
    one.registry.close()
    two.refresh()
    assert two.ask("cluster", "retire", home=f"{A:016x}", reason="burnt")[0] == 200
    found = view(join(two))
    assert (found["anchor"], anchor(two)) == (f"{B:016x}", B)
    assert found["grant"]


def test_anchor_that_is_lost_and_not_released_is_asked_again() -> None:
    """The home is given up before its anchors are released, and the home that gave it up may have died in between."""
    one, two = with_topic()
    join(one)
    one.registry.close()
    two.refresh()
    assert two.ask("cluster", "retire", home=f"{A:016x}", reason="burnt")[0] == 200
    assert two.registry.anchor("group", "late", A) == A
    assert view(join(two, "late"))["view"] == 0
    two.registry.release_anchor("group", "late", A)
    assert view(join(two, "late"))["anchor"] == f"{B:016x}"


def test_nothing_is_kept_of_groups_that_come_and_go() -> None:
    one, _ = with_topic()
    for number in range(20):
        join(one, f"g{number}")
        assert leave_and_delete(one, f"g{number}")[0] == 200
    kept = one.node.context.pending_groups
    assert (kept.anchors, kept.left_in_order, one.view.releasing) == ({}, set(), {})


def test_newest_anchors_are_known_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_membership, "ANCHORS_MAX", 2)
    pending = PendingGroups()
    for name in ("a", "b", "b", "c"):
        pending.note_anchor(name, A)
    assert list(pending.anchors) == ["b", "c"]
