"""Anchors of groups that come and go, and of a home that is lost before its anchors are released."""

from __future__ import annotations

import json

import pytest

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


def view(answered: tuple[int, str]) -> dict[str, object]:
    """What a member was told."""
    code, text = answered
    assert code == 200, text
    found: dict[str, object] = json.loads(text)
    return found


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
