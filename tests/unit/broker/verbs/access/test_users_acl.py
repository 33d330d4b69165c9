"""The verb ``acl``: what is granted survives, the last administrator keeps ``cluster``."""

from __future__ import annotations

import pytest

from tools.images.node import Answer, Client
from txmq.broker.verbs.access import users

from .access_support import add, lives, node, operator, told

CLUSTER = {"may": "cluster", "kind": "cluster", "name": "*"}


def ask(client: Client, action: str, name: str, **words: str | None) -> Answer:
    """One action."""
    return client.ask("acl", action, name, extensions=words)


def _may(*words: str, kind: str = "topic", name: str = "a*") -> list[dict[str, str]]:
    return [{"may": word, "kind": kind, "name": name} for word in words]


def test_grants_survive_kill_and_checkpoint() -> None:
    made = node()
    client = operator(made)
    add(client, "ops")
    add(client, "shop")
    granted = told(ask(client, "grant", "shop", may="read,write", topic="a*"))
    assert granted == [{"user": "shop", "grants": _may("read", "write")}]
    assert told(ask(client, "revoke", "shop", may="write", topic="a*")) == [{"user": "shop", "grants": _may("read")}]
    for life in lives(made):
        rows = told(ask(operator(life), "list", "*"))
        assert rows == [{"user": "ops", "grants": [CLUSTER]}, {"user": "shop", "grants": _may("read")}]


def test_what_changes_nothing_is_not_journaled() -> None:
    made = node()
    client = operator(made)
    add(client, "ops")
    ask(client, "grant", "ops", may="read", group="g")
    before = made.state.principals.version
    assert told(ask(client, "grant", "ops", may="read", group="g"))[0]["grants"][1:] == _may(
        "read", kind="group", name="g"
    )
    assert told(ask(client, "revoke", "ops", may="write", topic="b"))
    assert made.state.principals.version == before


def test_last_administrator_keeps_cluster() -> None:
    client = operator(node())
    add(client, "ops")
    add(client, "shop")
    assert ask(client, "revoke", "ops", cluster=None).error == "bad-request"
    assert ask(client, "grant", "shop", cluster=None).code == 200
    assert told(ask(client, "revoke", "ops", cluster=None)) == [{"user": "ops", "grants": []}]


def test_grants_of_a_user_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "GRANTS_MAX", 2)
    client = operator(node())
    add(client, "ops")
    assert ask(client, "grant", "ops", may="read", topic="a").code == 200
    assert ask(client, "grant", "ops", may="read", topic="b").error == "overloaded"


@pytest.mark.parametrize(
    "words",
    [
        {}, {"may": "read"}, {"topic": "a"}, {"may": "read", "topic": "a", "group": "g"},
        {"may": "read", "topic": "a", "cluster": None}, {"may": "cluster", "cluster": None}, {"may": "x", "topic": "a"},
        {"may": "settle", "resource": "a"},
    ],
)  # fmt: skip
def test_what_is_no_grant_is_refused(words: dict[str, str | None]) -> None:
    client = operator(node())
    add(client, "ops")
    assert client.ask("acl", "grant", "ops", extensions=words).error == "bad-request"
    assert client.ask("acl", "grant", "nobody", extensions={"may": "read", "topic": "a"}).error == "unknown-user"


def test_list_takes_no_grants_and_knows_its_actions() -> None:
    client = operator(node())
    add(client, "ops")
    assert ask(client, "list", "ops", may="read", topic="a").error == "bad-request"
    assert ask(client, "allow", "ops").error == "bad-request"
    assert ask(client, "list", "nobody").error == "unknown-user"
