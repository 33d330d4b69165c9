"""``topic``, ``stats``, ``ping``, ``version``, ``help``, ``quit``, and what ends a connection."""

from __future__ import annotations

import json

import pytest

from tools.images.requests import batch, part
from txmq.broker.core import REQUESTS_A_TURN
from txmq.protocol.answers import encode_all
from txmq.protocol.requests import Request, Violation

from .support import node, prepare, put, restarted, values

# --- topic -----------------------------------------------------------------------------------------------------------


def test_a_topic_is_created_described_altered_listed_deleted() -> None:
    broker = node()
    client = broker.connect()
    words: dict[str, str | int | None] = {
        "partitions": 3,
        "retention_ms": 1000,
        "segment_size_bytes": 8192,
        "retention_policy": "archive",
    }
    made = json.loads(client.ask("topic", "create", "t", extensions=words).body)
    assert {name: made[name] for name in words} == words
    altered = json.loads(client.ask("topic", "alter", "t", extensions={"partitions": 4, "retention_ms": "none"}).body)
    assert (altered["partitions"], altered["retention_ms"], altered["topic_id"]) == (4, None, made["topic_id"])
    put(client, b"1", topic="t", partition=3)
    told = json.loads(client.ask("topic", "describe", "t").body)
    mark = told["watermarks"][3]
    assert (mark["partition"], mark["start"], mark["end"], mark["broker_number"]) == (3, 0, 1, "0-3")
    assert mark["bytes"] > 61
    listed = json.loads(client.ask("topic", "list", "*").body)["topics"]
    assert [topic["name"] for topic in listed] == ["a", "b", "t"]
    assert client.ask("topic", "delete", "t").code == 200
    assert client.ask("topic", "describe", "t").error == "unknown-topic"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("create", "a"), "topic-exists"),
        (("create", ".hidden"), "invalid-name"),
        (("create", "__internal"), "invalid-name"),
        (("create", "x" * 201), "invalid-name"),
        (("create", "a/b"), "invalid-name"),
        (("alter", "nobody"), "unknown-topic"),
        (("describe", "nobody"), "unknown-topic"),
        (("delete", "nobody"), "unknown-topic"),
        (("destroy", "a"), "bad-request"),
    ],
)
def test_topic_refuses(words: tuple[str, str], error: str) -> None:
    assert node().connect().ask("topic", *words).error == error


@pytest.mark.parametrize(
    "setting",
    [
        {"partitions": 0}, {"partitions": 10_001}, {"storage": "tape"}, {"retention_ms": 0}, {"accept_read": "yes"},
        {"segment_size_bytes": 4095}, {"colour": "red"}, {"retention_policy": "burn"}, {"partitions": "-1"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(setting: dict[str, str | int]) -> None:
    answer = node().connect().ask("topic", "create", "t", extensions=setting)
    assert answer.error == "bad-request"
    assert next(iter(setting)) in answer.text


def test_partitions_are_never_lowered_and_storage_never_altered() -> None:
    client = node().connect()
    assert client.ask("topic", "alter", "a", extensions={"partitions": 1}).error == "bad-request"
    assert client.ask("topic", "alter", "a", extensions={"storage": "memory"}).error == "bad-request"


def test_a_new_topic_has_the_brokers_defaults() -> None:
    client = node(default_partitions=3, default_retention_ms=5000).connect()
    told = json.loads(client.ask("topic", "create", "t").body)
    assert (told["partitions"], told["retention_ms"]) == (3, 5000)


def test_partitions_of_all_topics_together_are_limited() -> None:
    client = node(partitions_max=4).connect()
    refused = client.ask("topic", "create", "t", extensions={"partitions": 2})
    assert (refused.code, refused.error) == (429, "overloaded")
    assert client.ask("topic", "alter", "a", extensions={"partitions": 4}).error == "overloaded"
    assert client.ask("topic", "create", "t").code == 200


def test_recreated_topic_is_empty_and_has_another_id() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1")
    client.ask("topic", "delete", "a")
    told = json.loads(client.ask("topic", "create", "a").body)
    assert told["topic_id"] == 3
    assert values(broker) == []
    assert broker.disk.list_directory("log/1/0") == []
    assert put(client, b"2").text == "0\n"
    broker = restarted(broker)
    assert values(broker) == [b"2"]
    assert broker.disk.list_directory("log") == ["3"]


# --- the others ------------------------------------------------------------------------------------------------------


def test_each_answer_to_a_person_begins_on_its_own_line() -> None:
    client = node().connect()
    client.send_bytes(b"ping 1\r\noffset a 0 latest 2\r\nget a 0 9 100 3\r\nwhat\r\n")
    assert encode_all(client.client.out) == (
        b"result 200 5 1\r\npong\n"
        b"result 200 6 2\r\n0 0 0\n"
        b"result 404 54 3\r\noffset-out-of-range offset 9 of a-0 is outside [0, 0]\n"
        b"result 400 37 -\r\nbad-request unknown verb; type: help\n"
    )


def test_ping_version_help_quit() -> None:
    client = node().connect()
    assert client.ask("ping").text == "pong\n"
    assert client.ask("version").text == "txmq 0.1.0 protocol 1\n"
    assert "put <topic>" in client.ask("help", "*").text
    assert client.ask("help", "commit").text.startswith("commit <txid>")
    assert client.ask("quit").text == "bye\n"
    assert client.client.closing


def test_the_opaque_is_optional_where_a_person_types() -> None:
    client = node().connect()
    client.send_bytes(b"stats\r\nversion\nhelp\r\nquit\r\n")
    assert encode_all(client.client.out).count(b" -\r\n") == 4


@pytest.mark.parametrize("item", ["", "topics", "offsets", "transactions", "config", "json", "help", "a"])
def test_stats_has_its_items(item: str) -> None:
    broker = node()
    client = broker.session()
    put(client, b"1")
    prepare(client, broker.txid(1, 1), ("a", 0, batch()))
    answer = client.ask("stats", item or "*")
    assert answer.code == 200
    if item == "json":
        figures = json.loads(answer.body)
        assert figures["broker"]["messages"] == 1
        assert figures["transactions"]["in_doubt"] == 1
        assert figures["offsets"][0]["end"] == 1


def test_stats_of_an_unknown_item_names_the_known_ones() -> None:
    answer = node().connect().ask("stats", "colour")
    assert answer.error == "bad-request"
    assert "topics" in answer.text


# --- what ends a connection ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", [b"NONSENSE 1\r\n", b"put a 0 1\r\n", b"get a 0 x 5 1\r\n", b"ping  1\r\n", b"\x00\x01"]
)
def test_line_that_breaks_grammar_is_told_and_ends_connection(line: bytes) -> None:
    broker = node()
    client, other = broker.connect(), broker.connect()
    client.send_bytes(line)
    assert encode_all(client.client.out).startswith(b"result 400 ")
    assert client.client.closing
    client.send_bytes(b"ping 2\r\n")
    assert len(client.client.out) == 1
    assert other.ask("ping").code == 200
    assert broker.context.counters.violations == 1


def test_a_token_of_an_unanswered_request_ends_the_connection() -> None:
    broker = node()
    client = broker.connect()
    client.send("put", "a", 0, body=batch(), opaque=b"x")
    client.send("put", "a", 0, body=batch(), opaque=b"x")
    assert client.client.closing
    assert b"result 400" in encode_all(client.client.out)


def test_a_token_may_be_used_again_once_it_is_answered() -> None:
    client = node().connect()
    for _ in range(2):
        client.send("put", "a", 0, body=batch(), opaque=b"x")
        client.node.pump()
    assert not client.client.closing


def test_a_body_over_the_limit_is_refused_unread() -> None:
    client = node().connect()
    client.send_bytes(b"put a 0 70000 1\r\n")
    assert encode_all(client.client.out).startswith(b"result 413 ")
    assert client.client.closing


def test_a_refused_request_leaves_the_connection_open() -> None:
    client = node().connect()
    assert put(client, topic="nobody").code == 404
    assert put(client).code == 200


def test_answers_to_lost_connection_are_dropped_and_its_work_stays() -> None:
    broker = node()
    client = broker.session()
    client.send("commit", broker.txid(1, 1), body=part("a", 0, batch(b"1")))
    client.disconnect()
    broker.pump()
    assert client.client.out == []
    assert values(broker) == [b"1"]


def test_requests_behind_a_long_answer_wait_for_the_next_turn() -> None:
    broker = node()
    client = broker.connect()
    verbs: list[tuple[bytes, list[bytes]]] = [(b"ping", []), (b"meta", [b"*"]), (b"ping", [])]
    requests: list[Request | Violation] = [
        (verb, words, None, None, b"%d" % n) for n, (verb, words) in enumerate(verbs)
    ]
    assert broker.core.receive_some(client.client, requests, 0) == 2
    broker.pump()
    assert sorted(client.received) == [b"0", b"1"]
    assert broker.core.receive_some(client.client, requests, 2) == 3
    broker.pump()
    assert sorted(client.received) == [b"0", b"1", b"2"]
    client.received.clear()
    broker.core.receive(client.client, requests)
    broker.pump()
    assert sorted(client.received) == [b"0", b"1", b"2"]


def test_one_connection_gets_at_most_a_turn_of_requests() -> None:
    broker = node()
    client = broker.connect()
    requests: list[Request | Violation] = [(b"ping", [], None, None, b"%d" % n) for n in range(2 * REQUESTS_A_TURN + 7)]
    taken, turns = 0, []
    while taken < len(requests):
        before, taken = taken, broker.core.receive_some(client.client, requests, taken)
        turns.append(taken - before)
    assert turns == [REQUESTS_A_TURN, REQUESTS_A_TURN, 7]
    broker.pump()
    assert len(client.received) == len(requests)


def test_who_mistypes_a_verb_types_it_again() -> None:
    client = node().connect()
    client.send_bytes(b"topics list * 1\r\ntopic list * 2\r\n")
    client.node.pump()
    refused, listed = client.received[b"-"], client.received[b"2"]
    assert (refused.code, refused.error, listed.code) == (400, "bad-request", 200)
    assert not client.client.closing
