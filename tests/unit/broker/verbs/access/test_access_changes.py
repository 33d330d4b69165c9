"""Users, grants and quotas of a cluster: the registry has the truth, each home folds it, none serves an older one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.images.node import Client
from tools.simulated.embedded_registry import EmbeddedRegistry
from tools.simulated.zookeeper import SimZooKeeper
from txmq.broker.cluster.cluster_view import RegistryState
from txmq.broker.cluster.registry_asks import Answer, ChangeAccess, Refresh
from txmq.broker.verbs.access.access_changes import PLANS_MAX
from txmq.errors import RegistryAwayError
from txmq.protocol.scram import ScramAttempt, keys_of
from txmq.registry.cluster_metadata import Access

from ..support import CLUSTER, A, B, Broker, pair, zookeeper

PASSWORD = "pencil"
CERTIFICATE = json.dumps({"keys": None, "certificate": "CN=other"}).encode()


def _keys(password: str = PASSWORD) -> bytes:
    keys = keys_of(password, bytes(16)).to_json()
    return json.dumps({"keys": keys, "certificate": None}).encode()


def _log_in(client: Client, user: str = "ops", password: str = PASSWORD) -> int:
    attempt = ScramAttempt(user, password, "nonce" + user)
    answer = client.ask("auth", "scram-sha-256", body=attempt.first())
    if answer.code != 200:
        return answer.code
    answer = client.ask("auth", "scram-sha-256", body=attempt.final(answer.body.removesuffix(b"\n")))
    return answer.code


def _with_users(*brokers: Broker) -> None:
    """The first administrator is ``ops``; all of the brokers know, and are asked in this name."""
    assert brokers[0].ask("user", "add", "ops", body=_keys())[0] == 200
    for broker in brokers:
        broker.refresh()
        assert _log_in(broker.client) == 200


def _users(broker: Broker) -> list[dict[str, Any]]:
    code, text = broker.ask("user", "list", "*", body=b"")
    assert code == 200, text
    users: list[dict[str, Any]] = json.loads(text)["users"]
    return users


def _sent(broker: Broker, *words: str, body: bytes | None = None) -> bytes:
    """Ask, and carry nothing out."""
    return broker.client.send(*words, body=body)


def _heard(broker: Broker, opaque: bytes) -> tuple[int, str]:
    answer = broker.client.received.pop(opaque)
    return answer.code, answer.text


def _state(broker: Broker) -> dict[str, Any]:
    return broker.node.state.principals.freeze() or {}


def test_first_user_ends_anonymity_at_every_home() -> None:
    one, two = pair()
    strange = two.node.connect()
    _with_users(one, two)
    assert strange.ask("topic", "list", "*").code == 401
    assert _users(two)[0]["administrator"]
    assert _state(one) == _state(two)
    secrets = _state(one)["secret"], _state(one)["between_brokers"]
    assert len(set(secrets)) == 2
    assert all(len(secret) == 64 for secret in secrets)


def test_changes_of_one_home_are_folded_by_all() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
    assert two.ask("acl", "grant", "shop", may="read", topic="a*")[0] == 200
    assert one.ask("quota", "set", "user", "shop", requests_per_s=7)[0] == 200
    assert two.ask("quota", "set", "topic", "a", bytes_per_s=9)[0] == 200
    one.refresh()
    assert one.read("acl", "list", "shop")["users"][0]["grants"] == [{"may": "read", "kind": "topic", "name": "a*"}]
    assert one.ask("user", "passwd", "shop", body=_keys("other"))[0] == 200
    two.refresh()
    assert _state(one) == _state(two)
    assert _log_in(two.node.connect(), "shop", "other") == 200
    assert two.ask("user", "remove", "shop", body=b"")[0] == 200
    one.refresh()
    assert _state(one) == _state(two)
    assert [key for key in one.registry.access().records if "shop" in key] == []
    for broker in (one, two):
        assert broker.again().node.state.principals.freeze() == _state(broker)


def test_a_plan_on_an_older_version_is_made_again() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
    # Neither has the other's change yet: exists already; is there no more; is granted no more; has a quota by now.
    assert two.ask("user", "add", "shop", body=_keys())[0] == 409
    assert two.ask("acl", "grant", "shop", may="read", topic="a")[0] == 200
    assert one.ask("acl", "grant", "shop", may="write", topic="a")[0] == 200
    assert len(one.read("acl", "list", "shop")["users"][0]["grants"]) == 2
    assert two.ask("acl", "revoke", "shop", may="read", topic="a")[0] == 200
    assert one.ask("acl", "grant", "shop", may="read", topic="a")[0] == 200
    assert len(two.read("acl", "list", "shop")["users"][0]["grants"]) == 2
    assert two.ask("user", "remove", "shop", body=b"")[0] == 200
    assert one.ask("quota", "set", "user", "shop", requests_per_s=7)[0] == 404


def test_administrators_who_remove_each_other_leave_one() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "root", body=_keys())[0] == 200
    opaque = one.client.send("acl", "grant", "root", extensions={"cluster": None})
    one.work()
    assert _heard(one, opaque)[0] == 200
    two.refresh()
    theirs = Broker.__new__(Broker)
    theirs.__dict__ = {**two.__dict__, "client": two.node.connect()}
    assert _log_in(theirs.client, "root") == 200
    first = _sent(one, "user", "remove", "root", body=b"")
    second = _sent(theirs, "user", "remove", "ops", body=b"")
    asks = [(one, one.asks()), (theirs, theirs.asks())]
    for broker, ask in ((broker, ask) for broker, some in asks for ask in some):
        broker.carry_out(ask)
    theirs.work()
    assert _heard(one, first)[0] == 200
    code, text = _heard(theirs, second)
    assert (code, "log in as one of them" in text) == (401, True)
    assert [row["user"] for row in _users(one)] == ["ops"]


def test_connections_of_a_removed_user_stay_nobodys() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
    two.refresh()
    theirs = [broker.node.connect() for broker in (one, two)]
    assert [_log_in(client, "shop") for client in theirs] == [200, 200]
    assert one.ask("user", "remove", "shop", body=b"")[0] == 200
    assert one.ask("quota", "set", "topic", "a", bytes_per_s=9)[0] == 200
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
    assert one.ask("quota", "set", "user", "shop", requests_per_s=9)[0] == 200
    two.refresh()  # it has heard of nothing in between
    assert [client.ask("stats", "*").code for client in theirs] == [401, 401]
    assert _state(one) == _state(two)
    assert one.ask("user", "passwd", "shop", body=_keys("other"))[0] == 200
    again = two.node.connect()
    two.refresh()
    assert _log_in(again, "shop", "other") == 200
    assert one.ask("user", "passwd", "shop", body=_keys())[0] == 200
    two.refresh()
    assert again.ask("stats", "*").code == 200  # another password leaves connections as they are
    for broker in (one, two):
        assert broker.again().node.state.principals.freeze() == _state(broker)


def test_an_answer_waits_for_registry_and_journal() -> None:
    one, _two = pair()
    opaque = _sent(one, "user", "add", "ops", body=_keys())
    [ask] = one.asks()
    assert isinstance(ask, ChangeAccess)
    assert not one.node.state.principals.users
    assert opaque not in one.client.received
    one.carry_out(ask)
    assert _heard(one, opaque)[0] == 200
    assert one.journaled()[-3:] == ["user", "granted", "access"]


def test_a_change_unheard_of_is_folded_at_the_next_start() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
    _sent(one, "user", "remove", "shop", body=b"")
    [ask] = one.asks()
    one.carry_out_unheard(ask)  # and the process dies
    next_life = one.again()
    assert "shop" in next_life.node.state.principals.users
    assert _log_in(next_life.client, "shop") == 503  # nobody is served before it has read the registry
    next_life.lead()
    assert _log_in(next_life.client, "shop") == 401
    two.refresh()
    assert _state(next_life) == _state(two)


@pytest.mark.parametrize("has_users", [False, True])
def test_a_home_that_waits_shows_no_topic(has_users: bool) -> None:
    one, two = pair()
    assert one.ask("topic", "create", "a")[0] == 200
    if has_users:
        _with_users(one, two)
    waiting = one.again()
    answer = waiting.client.ask("cluster", "describe")
    if has_users:
        assert answer.code == 401
    else:
        told = json.loads(answer.body)
        assert (told["topics"], told["registry"]["state"]) == ([], "waiting")


def test_nothing_changes_while_the_registry_is_away() -> None:
    one, two = pair()
    _with_users(one, two)
    opaque = _sent(one, "user", "add", "late", body=_keys())
    looked = _sent(one, "user", "list", "*", body=b"")
    one.node.pump()
    one.node.core.registry_state(RegistryState.SUSPENDED)
    one.node.pump()
    code, text = _heard(one, opaque)
    assert (code, "whether it was done is not known" in text) == (503, True)
    assert [row["user"] for row in json.loads(_heard(one, looked)[1])["users"]] == ["ops"]
    code, text = one.ask("quota", "set", "topic", "a", bytes_per_s=9)
    assert (code, "change again when ZooKeeper is back" in text) == (503, True)
    assert one.read("quota", "list", "*", "*")["quotas"] == []
    assert _log_in(one.node.connect()) == 200
    one.node.core.registry_state(RegistryState.CONNECTED)
    one.work()  # what was asked is done now
    assert "late" in one.node.state.principals.users


def test_a_registry_that_answers_no_ask_is_told() -> None:
    one, two = pair()
    _with_users(one, two)
    opaque = _sent(one, "user", "add", "late", body=_keys())
    [ask] = one.asks()
    one.node.core.registry_answered(ask.number, RegistryAwayError("it does not answer"))
    one.node.pump()
    code, text = _heard(one, opaque)
    assert (code, "it does not answer" in text) == (503, True)


def test_plans_without_end_are_given_up() -> None:
    one, two = pair()
    _with_users(one, two)
    opaque = _sent(one, "user", "add", "shop", body=_keys())
    for number in range(PLANS_MAX):
        assert two.ask("quota", "set", "topic", "a", bytes_per_s=number + 1)[0] == 200
        [ask] = one.asks()
        one.carry_out(ask)
    assert _heard(one, opaque)[0] == 503
    assert "shop" not in one.registry.access().records


def test_one_change_has_one_line_however_often_it_is_planned() -> None:
    one, two = pair()
    _with_users(one, two)
    assert two.ask("user", "add", "shop", body=_keys())[0] == 200
    one.node.core.context.audited.clear()
    assert one.ask("user", "remove", "shop", body=b"")[0] == 200  # first 404, of the older version
    assert [line["event"] for line in one.node.core.context.audited] == ["user removed"]


def test_users_of_an_older_registry_are_not_taken_over() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
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


def test_users_of_one_broker_with_a_registry_of_its_own() -> None:
    broker = Broker(EmbeddedRegistry(CLUSTER, A), A).lead()
    _with_users(broker)
    assert broker.ask("user", "add", "shop", body=_keys())[0] == 200
    assert broker.again().lead().node.state.principals.users.keys() == {"ops", "shop"}


# --- a process that stood still ---------------------------------------------------------------------------------------


def _stand_still(broker: Broker, ms: int) -> None:
    broker.node.clock.advance(ms / 1000)


def test_a_home_that_stood_still_asks_before_it_serves() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
    theirs = one.node.connect()
    assert _log_in(theirs, "shop") == 200
    assert two.ask("user", "remove", "shop", body=b"")[0] == 200
    _stand_still(one, 600)
    assert theirs.ask("stats", "*").code == 200  # for less than a second it may be served what is known
    _stand_still(one, 600)
    opaque = theirs.send("stats", "*")
    ours = _sent(one, "stats", "*")
    one.node.pump()
    assert opaque not in theirs.received
    one.work()
    assert theirs.received.pop(opaque).code == 401
    assert _heard(one, ours)[0] == 200


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
    _stand_still(again, 5000)
    if is_ticked:
        again.node.core.tick(again.node.clock.now_ms())
    again.node.store.journal.raise_epoch(leadership.epoch)
    again.node.core.led(leadership, *known)
    theirs = again.node.connect()
    theirs.client.certificates = frozenset({"CN=other"})
    opaque = theirs.send("auth", "external", body=b"")
    again.node.pump()
    assert opaque not in theirs.received
    again.work()
    assert theirs.received.pop(opaque).code == 401


def test_time_that_passes_first_does_not_hide_it() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
    theirs = one.node.connect()
    assert _log_in(theirs, "shop") == 200
    assert two.ask("user", "remove", "shop", body=b"")[0] == 200
    _stand_still(one, 5000)
    one.node.core.tick(one.node.clock.now_ms())
    opaque = theirs.send("stats", "*")
    one.node.pump()
    assert opaque not in theirs.received
    one.work()
    assert theirs.received.pop(opaque).code == 401


def test_a_read_that_began_before_is_none_behind_it() -> None:
    one, two = pair()
    _with_users(one, two)
    assert one.ask("user", "add", "shop", body=_keys())[0] == 200
    theirs = one.node.connect()
    assert _log_in(theirs, "shop") == 200
    _sent(one, "topic", "describe", "nobody")  # has the registry read
    [before] = one.asks()
    stale = one.registry.topics(), one.registry.homes(), one.registry.access()
    assert two.ask("user", "remove", "shop", body=b"")[0] == 200
    _stand_still(one, 5000)
    opaque = theirs.send("stats", "*")
    one.node.pump()
    one.node.core.registry_answered(before.number, Answer(stale[0], stale[1], 0, stale[2]))
    one.node.pump()
    assert opaque not in theirs.received
    one.work()
    assert theirs.received.pop(opaque).code == 401


def test_what_waits_needs_no_request_to_be_certain_again() -> None:
    one, two = pair()
    _with_users(one, two)
    opaque = _sent(one, "topic", "describe", "nobody")
    [before] = one.asks()
    _stand_still(one, 5000)
    one.node.core.tick(one.node.clock.now_ms())
    one.node.core.disconnected(one.client.client)  # whose request would ask
    answer = Answer(one.registry.topics(), one.registry.homes(), 0, one.registry.access())
    one.node.core.registry_answered(before.number, answer)
    assert [type(ask) for ask in one.asks()] == [Refresh]
    assert opaque not in one.client.received


def test_without_the_registry_it_goes_on_with_what_it_knows() -> None:
    one, two = pair()
    _with_users(one, two)
    _stand_still(one, 5000)
    opaque = _sent(one, "stats", "*")
    [ask] = one.asks()
    one.node.core.registry_answered(ask.number, RegistryAwayError("away"))
    one.node.pump()
    assert _heard(one, opaque)[0] == 200


def test_nobody_waits_where_there_are_no_users() -> None:
    one = Broker(zookeeper(SimZooKeeper()), B).lead()
    _stand_still(one, 5000)
    assert one.client.ask("stats", "*").code == 200
    assert not one.asks()
