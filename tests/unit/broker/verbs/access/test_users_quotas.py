"""The verb ``quota``: limits of users and topics survive, and name what they limit."""

from __future__ import annotations

import pytest

from tools.images.node import Answer, Client
from txmq.broker.verbs.access import users

from .access_support import add, lives, node, operator, told


def ask(client: Client, action: str, kind: str, name: str, **limits: int) -> Answer:
    """One action."""
    return client.ask("quota", action, kind, name, extensions=limits)


def test_quotas_survive_kill_and_checkpoint() -> None:
    made = node()
    client = operator(made)
    add(client, "ops")
    row = {"kind": "user", "name": "ops", "limits": {"bytes_per_s": 1000, "unsettled_max": 3}}
    assert told(ask(client, "set", "user", "ops", bytes_per_s=7)) != [row]
    assert told(ask(client, "set", "user", "ops", bytes_per_s=1000, unsettled_max=3)) == [row]
    assert told(ask(client, "set", "topic", "later", requests_per_s=1))
    assert told(ask(client, "remove", "topic", "later")) == []
    for life in lives(made):
        assert told(ask(operator(life), "list", "*", "*")) == [row]
        assert told(ask(operator(life), "list", "topic", "*")) == []


def test_what_changes_nothing_is_not_journaled() -> None:
    made = node()
    client = operator(made)
    ask(client, "set", "topic", "a", bytes_per_s=1)
    before = made.state.principals.version
    assert told(ask(client, "set", "topic", "a", bytes_per_s=1))
    assert told(ask(client, "remove", "topic", "b")) == []
    assert made.state.principals.version == before


def test_quotas_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "QUOTAS_MAX", 1)
    client = operator(node())
    assert ask(client, "set", "topic", "a", bytes_per_s=1).code == 200
    assert ask(client, "set", "topic", "b", bytes_per_s=1).error == "overloaded"
    assert ask(client, "set", "topic", "a", bytes_per_s=2).code == 200


@pytest.mark.parametrize(
    ("action", "kind", "name", "limits", "error"),
    [
        ("set", "topic", "a", {}, "bad-request"), ("set", "topic", "a", {"bytes_per_s": 0}, "bad-request"),
        ("set", "topic", "a", {"connections_max": 1}, "bad-request"),
        ("set", "*", "a", {"bytes_per_s": 1}, "bad-request"),
        ("set", "user", "nobody", {"bytes_per_s": 1}, "unknown-user"),
        ("set", "topic", "*", {"bytes_per_s": 1}, "invalid-name"),
        ("remove", "topic", "a", {"bytes_per_s": 1}, "bad-request"), ("give", "topic", "a", {}, "bad-request"),
        ("list", "group", "a", {}, "bad-request"),
    ],
)  # fmt: skip
def test_what_is_no_quota_is_refused(action: str, kind: str, name: str, limits: dict[str, int], error: str) -> None:
    assert ask(operator(node()), action, kind, name, **limits).error == error
