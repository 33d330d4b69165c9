"""The verb ``user``: keys are journaled and never told, the first user is an administrator, the last one stays."""

from __future__ import annotations

import json

import pytest

from txmq.broker.verbs.access import users
from txmq.redo import entries, inspect

from .access_support import add, keys, lives, node, operator, told

OPS = {"user": "ops", "password": True, "certificate": None, "administrator": True, "grants": 1}
SHOP = {"user": "shop", "password": False, "certificate": "CN=shop", "administrator": False, "grants": 0}


def test_users_survive_kill_and_checkpoint() -> None:
    made = node()
    client = operator(made)
    assert told(add(client, "ops")) == [OPS]
    assert told(add(client, "shop", keys=None, certificate="CN=shop")) == [SHOP]
    before = made.state.principals.freeze()
    for life in lives(made):
        assert told(operator(life).ask("user", "list", "*", body=b"")) == [OPS, SHOP]
        assert json.dumps(life.state.principals.freeze()) == json.dumps(before)


def test_first_user_and_grant_share_one_record() -> None:
    made = node()
    add(operator(made), "ops")
    groups = [list(entries.split(record.payload)) for record in inspect.dump(made.kill()) if record.kind == "group"]
    assert [kind for kind, _, _ in groups[-1]] == [entries.USER, entries.GRANTED]


def test_neither_answers_nor_dumps_hold_keys_or_secret() -> None:
    made = node()
    client = operator(made)
    texts = [add(client, "ops").text, client.ask("user", "list", "*", body=b"").text, client.ask("stats", "json").text]
    secrets = [str(keys()["stored_key"]), str(keys()["server_key"]), made.state.principals.secret]
    assert len(secrets[2]) == 64
    texts += [json.dumps(record.describe()) for record in inspect.dump(made.kill())]
    assert [secret for secret in secrets for text in texts if secret in text] == []


def test_passwd_changes_what_is_stated_and_nothing_else() -> None:
    made = node()
    client = operator(made)
    add(client, "ops", certificate="CN=ops")
    assert told(add(client, "ops", action="passwd", keys=keys("other")))[0]["certificate"] == "CN=ops"
    known = made.state.principals.known("ops")
    assert known.keys is not None
    assert known.keys.to_json() == keys("other")
    assert told(add(client, "ops", action="passwd", keys=None, certificate="CN=new"))[0]["password"]
    assert known.is_administrator


def test_last_administrator_is_not_removed() -> None:
    made = node()
    client = operator(made)
    add(client, "ops")
    add(client, "shop")
    assert client.ask("user", "remove", "ops", body=b"").error == "bad-request"
    assert client.ask("acl", "grant", "shop", extensions={"cluster": None}).code == 200
    assert told(client.ask("user", "remove", "ops", body=b"")) == [OPS]
    for life in lives(made):
        assert [row["user"] for row in told(operator(life, "shop").ask("user", "list", "*", body=b""))] == ["shop"]


def test_who_is_given_a_removed_name_has_no_connection_yet() -> None:
    made = node()
    client = operator(made)
    add(client, "ops")
    add(client, "shop")
    former, other = operator(made, "shop"), operator(made, "ops")
    assert former.hello().code == 200
    client.ask("user", "remove", "shop", body=b"")
    add(client, "shop", keys=keys("another"))  # in the same turn: nothing was refused in between
    client.ask("acl", "grant", "shop", extensions={"cluster": None})
    assert former.ask("stats", "json").error == "unauthenticated"
    assert former.client.user == ""
    assert other.ask("stats", "json").code == 200
    former.client.binding = bytes(32)
    assert former.ask("auth", "plain", body=b"\0shop\0another").code == 200
    assert former.ask("stats", "json").code == 200


def test_a_name_is_taken_once() -> None:
    client = operator(node())
    add(client, "ops")
    assert add(client, "ops").error == "user-exists"
    assert add(client, "shop", certificate="CN=a").code == 200
    assert "shop" in add(client, "twin", certificate="CN=a").text


def test_users_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "USERS_MAX", 1)
    client = operator(node())
    add(client, "ops")
    assert add(client, "shop").error == "overloaded"


@pytest.mark.parametrize("action", ["passwd", "remove", "list"])
def test_an_unknown_user_is_refused(action: str) -> None:
    client = operator(node())
    body = json.dumps({"keys": keys(), "certificate": None}) if action == "passwd" else ""
    assert client.ask("user", action, "nobody", body=body.encode()).error == "unknown-user"


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "{}", '{"keys": null, "certificate": null}', '{"keys": {}, "certificate": null}',
        '{"keys": null, "certificate": 7}', '{"keys": null, "certificate": ""}', "[" * 4000,
        '{"keys": null, "certificate": "CN=\\ud800"}', json.dumps({"keys": None, "certificate": "x" * 501}),
    ],
)  # fmt: skip
def test_what_is_no_user_is_refused_and_nothing_journaled(body: str) -> None:
    made = node()
    assert operator(made).ask("user", "add", "ops", body=body.encode()).error == "bad-request"
    assert made.state.principals.freeze() is None


def test_wrong_names_and_actions_are_refused() -> None:
    client = operator(node())
    assert add(client, "*").error == "invalid-name"
    assert add(client, ".ops").error == "invalid-name"
    assert client.ask("user", "make", "ops", body=b"").error == "bad-request"


@pytest.mark.parametrize(("action", "error"), [("add", "user-exists"), ("remove", "unknown-user")])
def test_refusal_waits_for_the_change_that_it_tells(action: str, error: str) -> None:
    made = node()
    first, second = operator(made), operator(made)
    add(first, "ops")
    if action == "remove":
        add(first, "shop")
    body = json.dumps({"keys": keys(), "certificate": None}).encode() if action == "add" else b""
    first.send("user", action, "shop", body=body)
    asked = second.send("user", action, "shop", body=body)
    made.flush()
    assert asked not in second.received  # a crash now would make it false
    made.pump()
    assert second.received[asked].error == error
