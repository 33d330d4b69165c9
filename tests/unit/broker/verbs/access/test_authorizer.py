"""Permissions of live connections: changes count at once, for what waits too, and break no promise."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tools.images.node import Answer, Client
from tools.images.requests import UUID, batch
from txmq.broker.verbs.access import audit_log as audits
from txmq.protocol.grants import ADMINISTRATOR, Grant
from txmq.protocol.transaction_bodies import encode_branch

from ...group_support import pass_time
from ...support import prepare, put, restarted, stated, values
from ..test_check_backs import half
from ..test_decide import complete, decide
from ..test_outbox import send as send_page
from ..test_query import ask as ask_query
from ..test_query import write as write_batch
from .access_support import add
from .verb_cases import EVERY, World

WRITE, READ = Grant("write", "topic", "a"), Grant("read", "topic", "a")
GROUP, INSTALL = Grant("read", "group", "g"), Grant("install", "resource", UUID)


def world(*grants: Grant) -> World:
    """Shop has these grants."""
    made = World()
    made.allow(*grants)
    return made


def change(made: World, action: str, **words: str | None) -> None:
    """The administrator grants or revokes."""
    assert made.ops.ask("acl", action, "shop", extensions=words).code == 200


def received(client: Client, opaque: bytes) -> Answer:
    """The answer to a request that waited."""
    client.node.pump()
    return client.received.pop(opaque)


def test_refusal_says_which_grant_is_missing() -> None:
    made = world()
    refused = put(made.shop, b"v")
    assert refused.text == (
        "forbidden shop may not write topic a: an administrator grants it, txmq acl add shop --may write --topic a\n"
    )
    change(made, "grant", may="write", topic="a")
    assert put(made.shop, b"v").code == 200


def test_change_of_grants_counts_from_the_next_request_on() -> None:
    made = world()
    for _ in range(3):
        change(made, "grant", may="write,read", topic="a*")
        assert put(made.shop, b"v").code == 200
        assert made.shop.ask("get", "a", 0, 0, 1000).code == 200
        change(made, "revoke", may="write", topic="a*")
        assert put(made.shop, b"v").error == "forbidden"
        assert made.shop.ask("get", "a", 0, 0, 1000).code == 200


def test_many_puts_in_one_read_ask_for_each_topic() -> None:
    made = world(WRITE)
    client, content = made.made.connect(), batch(b"v")
    client.client.user = "shop"
    lines = [b"put %b 0 %d p%d\r\n%b" % (topic, len(content), n, content) for n, topic in enumerate([b"a", b"b"] * 3)]
    client.send_bytes(b"".join(lines))
    made.made.pump()
    assert [client.received[b"p%d" % n].code for n in range(6)] == [200, 403] * 3
    assert (len(values(made.made)), values(made.made, "b")) == (3, [])
    assert made.made.context.counters.refused == 3


def test_puts_behind_the_first_user_in_one_read_are_refused() -> None:
    made = World(has_users=False)
    client, content = made.made.connect(), batch(b"v")
    keys = json.dumps({"keys": None, "certificate": "CN=ops"}).encode()
    lines = b"user add ops %d u\r\n%b" % (len(keys), keys)
    client.send_bytes(lines + b"".join(b"put a 0 %d p%d\r\n%b" % (len(content), n, content) for n in range(3)))
    made.made.pump()
    assert client.received[b"u"].code == 200
    assert {client.received[b"p%d" % n].error for n in range(3)} == {"unauthenticated"}


def test_waiting_poll_is_not_told_what_was_revoked() -> None:
    made = world(READ)
    stays, goes = made.shop.send("get", "a", 0, 0, 1000, extensions={"wait": 1000}), made.made.connect()
    put(made.ops, b"told")
    assert received(made.shop, stays).code == 200
    goes.client.user = "shop"
    waits = goes.send("get", "a", 0, 1, 1000, extensions={"wait": 1000})
    change(made, "revoke", may="read", topic="a")
    put(made.ops, b"secret")
    assert received(goes, waits).error == "forbidden"
    assert made.made.context.counters.refused == 1


def test_poll_of_before_the_first_user_is_not_told() -> None:
    made = World(has_users=False)
    waits = made.shop.send("get", "a", 0, 0, 1000, extensions={"wait": 1000})
    body = json.dumps({"keys": None, "certificate": "CN=ops"}).encode()
    assert made.ops.ask("user", "add", "ops", body=body).code == 200
    made.ops.client.user = "ops"
    put(made.ops, b"secret")
    assert received(made.shop, waits).error == "unauthenticated"


def test_heartbeat_and_check_that_wait_are_refused_with_their_grant() -> None:
    made = world(READ, GROUP)
    assert made.group("join", member="me", topics="a").code == 200
    view = json.loads(made.group("heartbeat", member="me").body)["view"]
    beat = made.shop.send("group", "heartbeat", "g", extensions={"member": "me", "view": view, "wait": 1000}, body=b"")
    check = made.shop.send("checks", "g", extensions={"wait": 1000})
    change(made, "revoke", may="read", group="g")
    assert half(made.ops, made.others(), group="g", deadline=made.made.clock.now_ms() + 1).code == 200
    pass_time(made.made, 1.5)
    assert received(made.shop, beat).error == "forbidden"
    assert received(made.shop, check).error == "forbidden"


def _settled(made: World, prepared: list[str]) -> None:
    """The promise is kept: the transactions of the session commit, through a restart too."""
    made.allow()
    for txid in prepared[:-1]:
        assert made.shop.ask("commit", txid, body=b"").code == 200
    again = restarted(made.made)
    client = again.connect()
    client.client.user = "shop"
    assert client.hello("1.0").code == 200
    assert client.ask("outcome", prepared[0]).text.startswith("committed")
    assert client.ask("commit", prepared[-1], body=b"").code == 200
    assert sorted(values(again)) == sorted(b"%d" % n for n in range(len(prepared)))


def test_revoked_grant_breaks_no_promise_to_what_is_prepared() -> None:
    made = world(*EVERY)
    assert prepare(made.shop, made.own(1), ("a", 0, batch(b"0"))).code == 200
    assert half(made.shop, made.own(2), b"1", group="g").code == 200
    assert prepare(made.shop, made.own(3), ("a", 0, batch(b"2"))).code == 200
    _settled(made, [made.own(1), made.own(2), made.own(3)])


def test_revoked_grant_breaks_no_decision_and_no_turn() -> None:
    made = world(*EVERY)
    assert prepare(made.shop, made.own(1), ("a", 0, batch(b"first"))).code == 200
    assert prepare(made.shop, made.own(2), ("a", 0, batch(b"second"))).code == 200
    assert decide(made.shop, made.own(3), ("a", 1, batch(b"x"))).code == 200
    turn = made.shop.send("commit", made.own(2), body=b"")
    made.allow()
    assert made.shop.ask("commit", made.own(1), body=b"").code == 200
    assert received(made.shop, turn).code == 200
    assert complete(made.shop, made.own(3)).code == 200
    assert (values(made.made), values(made.made, "a", 1)) == ([b"first", b"second"], [b"x"])


def test_revoked_grant_breaks_no_batch_of_a_query() -> None:
    made = world(*EVERY)
    ask_query(made.ops, "epoch", "*")
    assert ask_query(made.ops, "open", "g", epoch=1).code == 200
    assert write_batch(made.shop, made.own(), ("a", 0, batch(b"x")), query="g").code == 200
    made.allow()
    assert ask_query(made.ops, "commit", "g", f"{made.own()}\n", epoch=1, batch=0).code == 200
    assert values(made.made) == [b"x"]


def _stream(client: Client, txid: str, content: bytes) -> Answer:
    return client.ask("put", "a", 0, extensions={"tx": txid}, body=content)


@pytest.mark.parametrize("verb", ["commit", "prepare", "decide"])
def test_streamed_parts_are_asked_about_once_more(verb: str) -> None:
    made, content = world(*EVERY), batch(b"x")
    assert _stream(made.shop, made.own(), content).code == 200
    made.allow(INSTALL)
    words: dict[str, str | int | None] = {**stated([content])}
    arguments, body = [made.own()], b""
    if verb == "prepare":
        words |= {"resource": "db", "uuid": UUID, "table": "t"}
        arguments.append("last-resource")
    elif verb == "decide":
        words["branches"] = 1
        details = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
        body = encode_branch("db", UUID, details)
    assert made.shop.ask(verb, *arguments, extensions=words, body=body).error == "forbidden"
    made.allow(INSTALL, WRITE)
    assert made.shop.ask(verb, *arguments, extensions=words, body=body).code == 200


def test_unknown_topic_is_refused_as_a_known_one_is() -> None:
    made = world(READ)
    for name in ("b", "nowhere"):
        assert {
            put(made.shop, b"v", topic=name).error, made.shop.ask("get", name, 0, 0, 10).error,
            made.shop.ask("meta", name).error, made.shop.ask("topic", "describe", name).error,
        } == {"forbidden"}  # fmt: skip
    made.allow(ADMINISTRATOR)
    assert put(made.shop, b"v", topic="nowhere").error == "unknown-topic"


def test_lists_show_what_one_may_do_something_with() -> None:
    made = world()
    listed: dict[str, Callable[[], list[object]]] = {
        "meta": lambda: [row["name"] for row in _json(made.shop.ask("meta", "*"))["topics"]],
        "topic": lambda: [row["name"] for row in _json(made.shop.ask("topic", "list", "*"))["topics"]],
        "cluster": lambda: [row["topic"] for row in _json(made.shop.ask("cluster", "describe"))["topics"]],
        "stats": lambda: _first_words(made.shop.ask("stats", "topics")),
        "offsets": lambda: _first_words(made.shop.ask("stats", "offsets")),
        "json": lambda: [row["name"] for row in _json(made.shop.ask("stats", "json"))["topics"]],
    }
    for grants, shown in (
        ((), []), ((GROUP, INSTALL), []), ((WRITE,), ["a"]), ((Grant("delete", "topic", "b"),), ["b"]),
        ((Grant("describe", "topic", "*"),), ["a", "b"]), ((ADMINISTRATOR,), ["a", "b"]),
    ):  # fmt: skip
        made.allow(*grants)
        for name, ask in listed.items():
            assert ask() == shown, (name, grants)
    made.allow(WRITE)
    found = _json(made.shop.ask("stats", "json"))
    assert found.keys() == {"broker", "resources", "chains", "topics", "offsets"}
    assert {row["topic"] for row in found["offsets"]} == {"a"}


def _first_words(answer: Answer) -> list[object]:
    return list(dict.fromkeys(line.split()[0] for line in answer.text.splitlines()))


def _json(answer: Answer) -> dict[str, list[dict[str, object]]]:
    assert answer.code == 200, answer
    found: dict[str, list[dict[str, object]]] = json.loads(answer.body)
    return found


def test_lists_of_groups_queries_and_databases_show_what_one_may() -> None:
    made = world()
    for name in ("g", "other"):
        words = {"member": "me", "topics": "a,b"}
        assert made.ops.ask("group", "join", name, extensions=words, body=b"").code == 200
    ask_query(made.ops, "epoch", "*")
    for name in ("g", "other"):
        assert ask_query(made.ops, "open", name, epoch=1).code == 200
    for uuid in (UUID, "f" * 32, None):
        found = {"kind": "xa", "uuid": uuid, "reachable": True, "branches": 1, "age_ms": 1}
        body = json.dumps(found).encode()
        assert made.ops.ask("resource", "report", f"db{str(uuid)[0]}", body=body).code == 200
    assert send_page(made.ops, 1, 0, session=2).code == 200

    def shown() -> list[int]:
        return [
            len(_json(made.shop.ask("group", "list", "*", body=b""))["groups"]),
            len(_json(ask_query(made.shop, "list", "*"))["queries"]),
            len(_json(made.shop.ask("resource", "list", "*", body=b""))["resources"]),
            len(made.shop.ask("stats", "resources").text.splitlines()),
            len(made.shop.ask("stats", "chains").text.splitlines()),
        ]

    assert shown() == [0] * 5
    made.allow(GROUP, INSTALL)
    assert shown() == [1] * 5
    rows = _json(made.group("describe"))
    assert rows["partitions"] == []
    made.allow(GROUP, READ)
    assert {row["topic"] for row in _json(made.group("describe"))["partitions"]} == {"a"}
    made.allow(ADMINISTRATOR)
    assert shown() == [2, 2, 3, 3, 1]


def test_refusals_are_counted_and_written_with_who_and_where() -> None:
    made = world()
    put(made.shop, b"v")
    line = made.made.context.audited[-1]
    assert {key: line[key] for key in ("event", "user", "address", "verb")} == {
        "event": "refused", "user": "shop", "address": "test", "verb": "put",
    }  # fmt: skip
    assert "--may write --topic a" in line["reason"]
    assert made.made.context.counters.refused == 1


def test_closed_topic_refuses_nobody_for_who_he_is() -> None:
    made = world(WRITE)
    assert made.ops.ask("topic", "alter", "a", extensions={"accept_publish": "false"}).code == 200
    assert put(made.shop, b"v").error == "topic-closed"
    assert made.made.context.counters.refused == 0
    assert not [line for line in made.made.context.audited if line["event"] == "refused"]


def test_name_of_a_client_is_cut_in_a_line() -> None:
    made = world()
    assert made.shop.ask("hello", 1, "n" * 3000).code == 200
    put(made.shop, b"v")
    assert made.made.context.audited[-1]["client"] == "n" * 200


def test_lines_that_wait_for_the_shell_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world()
    monkeypatch.setattr(audits, "LINES_MAX", len(made.made.context.audited) + 2)
    for _ in range(5):
        put(made.shop, b"v")
    counters = made.made.context.counters
    assert (counters.refused, counters.audit_lost) == (5, 3)
    change(made, "grant", may="write", topic="a")
    assert made.made.context.audited[-1]["event"] == "granted"  # strangers keep no change out


def test_changes_of_topics_groups_and_queries_are_written() -> None:
    made = world(ADMINISTRATOR)
    shop = made.shop
    assert shop.ask("topic", "create", "c", extensions={"partitions": 2}).code == 200
    assert shop.ask("topic", "alter", "c", extensions={"retention_ms": 3_600_000}).code == 200
    assert shop.ask("topic", "delete", "c").code == 200
    assert made.group("reset", [["a", 0, 1]], create=None).code == 200
    assert made.group("deferred", [["a", 0, None, "x"]]).code == 200
    assert made.group("deferred", [["a", 0, None, "y"]]).code == 200  # is another one by now: nothing changes
    assert made.group("delete").code == 200
    epoch = json.loads(ask_query(shop, "epoch", "*").body)["epoch"]
    assert ask_query(shop, "open", "g", epoch=epoch).code == 200
    for counter in (1, 2):
        assert write_batch(shop, made.own(counter), ("a", 0, batch()), query="g", epoch=epoch).code == 200
        assert ask_query(shop, "abort" if counter == 1 else "delete", "g").code == 200
    assert shop.ask("topic", "create", "a").error == "topic-exists"
    lines = [line for line in made.made.context.audited if line["user"] == "shop" and line["event"] != "refused"]
    assert [(line["event"], *list(line.values())[5:]) for line in lines] == [
        ("topic created", "c", "partitions=2"), ("topic altered", "c", "retention_ms=3600000"), ("topic deleted", "c"),
        ("group reset", "g", 1), ("group's deferred messages changed", "g", 1), ("group deleted", "g", 1),
        ("query aborted", "g", 1), ("query deleted", "g", 1),
    ]  # fmt: skip


def test_line_of_login_says_which_certificate_was_shown() -> None:
    made = world()
    add(made.ops, "card", keys=None, certificate="CN=card")
    client = made.made.connect()
    client.client.certificates, client.client.certificate = frozenset({"CN=card"}), "CN=card serial 07"
    assert client.ask("auth", "external", body=b"shop").error == "unauthenticated"
    assert client.ask("auth", "external", body=b"").code == 200
    assert [(line["event"], line["certificate"]) for line in made.made.context.audited[-2:]] == [
        ("login failed", "CN=card serial 07"), ("login", "CN=card serial 07"),
    ]  # fmt: skip


def test_who_watches_the_broker_sees_all_and_touches_nothing() -> None:
    made = world(Grant("describe", "broker", "all"))
    assert made.ops.ask("group", "reset", "g", extensions={"create": None}, body=b'[["a", 0, 0]]').code == 200
    told = _json(made.shop.ask("stats", "json"))
    shown = {"broker", "transactions", "resources", "chains", "topics", "offsets"}
    assert told.keys() == shown  # no settings
    assert [topic["name"] for topic in told["topics"]] == ["a", "b"]
    assert [row["group"] for row in _json(made.group("list", group="*"))["groups"]] == ["g"]
    assert {row["topic"] for row in _json(made.group("describe"))["partitions"]} == {"a"}
    for line in (("get", "a", 0, 0, 1000), ("topic", "delete", "a"), ("stats", "config"), ("checks", "g")):
        assert made.shop.ask(*line).error == "forbidden"
    assert made.group("join", member="me", topics="a").error == "forbidden"
    made.allow()
    assert "transactions" not in _json(made.shop.ask("stats", "json"))
