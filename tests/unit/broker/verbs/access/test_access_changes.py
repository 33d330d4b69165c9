"""What the homes of a cluster know of users, and their journals: the same; none goes back to an older registry."""

from __future__ import annotations

import json
from typing import Any

import pytest

from txmq.broker.verbs.access.access_changes import PLANS_MAX
from txmq.registry.cluster_metadata import Access

from ..support import Broker, pair
from .access_support import keys

CERTIFICATE = json.dumps({"keys": None, "certificate": "CN=other"}).encode()
PASSWORD = json.dumps({"keys": keys(), "certificate": None}).encode()


def _with_users(*brokers: Broker) -> None:
    """The first administrator is ``ops``; all of the brokers know, and are asked in this name."""
    assert brokers[0].ask("user", "add", "ops", body=PASSWORD)[0] == 200
    for broker in brokers:
        broker.refresh()
        broker.client.client.user = "ops"


def _state(broker: Broker) -> dict[str, Any]:
    return broker.node.state.principals.freeze() or {}


def test_homes_and_their_journals_have_the_same_users_and_secrets() -> None:
    one, two = pair()
    _with_users(one, two)
    for broker, verb, words, body, limits in (
        (one, "user", ("add", "shop"), PASSWORD, {}), (two, "quota", ("set", "topic", "a"), None, {"bytes_per_s": 9}),
        (two, "acl", ("grant", "shop"), None, {"may": "read", "topic": "a*"}),
        (one, "user", ("passwd", "shop"), CERTIFICATE, {}), (two, "user", ("remove", "shop"), b"", {}),
        (one, "user", ("add", "shop"), CERTIFICATE, {}),
    ):  # fmt: skip
        assert broker.ask(verb, *words, body=body, **limits)[0] == 200
        one.refresh()
        two.refresh()
        assert _state(one) == _state(two)
    secrets = _state(one)["secret"], _state(one)["between_brokers"]
    assert (len(set(secrets)), [len(secret) for secret in secrets]) == (2, [64, 64])
    assert [key for key in one.registry.access().records if "shop" in key] == ["user.shop"]
    for broker in (one, two):
        assert broker.again().node.state.principals.freeze() == _state(broker)


def test_plans_without_end_are_given_up() -> None:
    one, two = pair()
    _with_users(one, two)
    opaque = one.client.send("user", "add", "shop", body=PASSWORD)
    for number in range(PLANS_MAX):
        assert two.ask("quota", "set", "topic", "a", bytes_per_s=number + 1)[0] == 200
        [ask] = one.asks()
        one.carry_out(ask)
    assert one.client.received.pop(opaque).code == 503
    assert "shop" not in one.registry.access().records


def test_users_of_an_older_registry_are_not_taken_over() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=PASSWORD)[0] == 200
    before = _state(one)
    for _ in range(2):
        one.node.core.registry_changed(one.registry.topics(), one.registry.homes(), Access(1, {}))
    assert _state(one) == before
    [alarm] = one.node.core.context.alarms
    assert alarm["reason"] == "its users have version 1, and had 2: not taken over"


def test_a_journal_that_differs_at_the_same_version_is_mended() -> None:
    one, two = pair()
    _with_users(one, two)
    principals = one.node.state.principals
    del principals.users["ops"]
    one.node.core.registry_changed(one.registry.topics(), one.registry.homes(), one.registry.access())
    assert not principals.users  # the same version is not compared again
    next_life = one.again().lead()
    assert "ops" in next_life.node.state.principals.users


@pytest.mark.parametrize("is_ticked", [False, True])
@pytest.mark.parametrize("are_journaled", [False, True])
def test_stillness_between_reading_users_and_serving_counts(*, is_ticked: bool, are_journaled: bool) -> None:
    one, two = pair()
    if are_journaled:
        _with_users(one, two)
    again = one.again()
    if not are_journaled:
        _with_users(two)
    assert two.ask("user", "add", "shop", body=CERTIFICATE)[0] == 200
    leadership = again.draw()
    known = again.registry.topics(), again.registry.homes(), again.registry.access()
    assert two.ask("user", "remove", "shop", body=b"")[0] == 200
    again.node.clock.advance(5)
    if is_ticked:
        again.node.core.tick(again.node.clock.now_ms())
    again.node.lead(leadership.epoch, *known)
    theirs = again.node.connect()
    theirs.client.certificates = frozenset({"CN=other"})
    opaque = theirs.send("auth", "external", body=b"")
    again.node.pump()
    assert opaque not in theirs.received
    again.work()
    assert theirs.received.pop(opaque).code == 401
