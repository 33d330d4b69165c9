"""``partitions``: the door to a partition, and the partitions that another home owns."""

from __future__ import annotations

import json

import pytest

from tools.images.node import Node
from txmq.broker.state.identity import Owner

from ..support import UUID, batch, node, part, put, restarted, values

ELSEWHERE = {(b"a", b"1"): Owner(home=0xABC, leader="10.0.0.7:7700")}
TEXT = "not-owner leader=10.0.0.7:7700 home=0000000000000abc owns partition 1 of topic 'a'\n"


def sharing() -> Node:
    """A broker that owns ``a-0`` and ``b-0``; another home owns ``a-1``."""
    broker = node()
    broker.state.set_owners(ELSEWHERE)
    return broker


@pytest.mark.parametrize(
    ("words", "body", "extensions"),
    [
        (("put", "a", 1), batch(b"v"), {}),
        (("get", "a", 1, 0, 100), None, {}),
        (("offset", "a", 1, "latest"), None, {}),
        (("commit", "{txid}"), part("a", 0, batch(b"v")) + part("a", 1, batch(b"v")), {}),
        (
            ("prepare", "{txid}", "last-resource"), part("a", 1, batch(b"v"), "*"),
            {"resource": "db", "uuid": UUID, "table": "t"},
        ),
    ],
    ids=lambda given: str(given[0]) if isinstance(given, tuple) else "",
)  # fmt: skip
def test_request_to_a_foreign_partition_names_its_leader(
    words: tuple[object, ...], body: bytes | None, extensions: dict[str, str | int | None]
) -> None:
    broker = sharing()
    client = broker.session()
    named = [str(word).format(txid=broker.txid(1, 1)) for word in words]
    answer = client.ask(*named, body=body, extensions=extensions)
    assert (answer.code, answer.body.decode()) == (409, TEXT)
    assert not broker.state.transactions
    assert values(broker) == []


def test_pipelined_put_to_a_foreign_partition_is_refused_alone() -> None:
    broker = sharing()
    client = broker.connect()
    lines = [(0, b"1"), (1, b"2"), (0, b"3")]
    contents = [batch(value) for _, value in lines]
    client.send_bytes(
        b"".join(
            b"put a %d %d %d\r\n%s" % (number, len(content), token, content)
            for token, ((number, _), content) in enumerate(zip(lines, contents, strict=True), 1)
        )
    )
    broker.pump()
    assert {opaque: answer.code for opaque, answer in client.received.items()} == {b"1": 200, b"2": 409, b"3": 200}
    assert values(broker) == [b"1", b"3"]


def test_group_hands_out_only_partitions_of_this_home() -> None:
    client = sharing().session()
    joined = json.loads(client.ask("group", "join", "g", extensions={"member": "m", "topics": "a"}, body=b"[]").body)
    assert [row[:2] for row in joined["assigned"]] == [["a", 0]]


def test_group_gets_a_partition_that_comes_home() -> None:
    broker = sharing()
    client = broker.session()
    client.ask("group", "join", "g", extensions={"member": "m", "topics": "a"}, body=b"[]")
    broker.state.set_owners({})
    seen = json.loads(client.ask("group", "heartbeat", "g", extensions={"member": "m"}, body=b"[]").body)
    assert [row[:2] for row in seen["assigned"]] == [["a", 0], ["a", 1]]


def test_partition_that_comes_home_is_written_where_it_was() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1", partition=1)
    broker.state.set_owners(ELSEWHERE)
    assert put(client, b"2", partition=1).code == 409
    broker.state.set_owners({})
    assert put(client, b"3", partition=1).text == "1\n"
    assert values(broker, "a", 1) == [b"1", b"3"]


def test_partition_added_to_a_topic_may_belong_to_another_home() -> None:
    broker = node()
    broker.state.set_owners({(b"a", b"2"): Owner(home=9, leader="")})
    client = broker.connect()
    client.ask("topic", "alter", "a", extensions={"partitions": 4})
    assert [put(client, b"v", partition=number).code for number in range(4)] == [200, 200, 409, 200]


def test_topic_with_partitions_of_another_home_is_deleted() -> None:
    broker = sharing()
    client = broker.connect()
    assert client.ask("topic", "delete", "a").code == 200
    assert put(client, b"v", partition=0).error == "unknown-topic"
    assert [topic.config.name for topic in restarted(broker).state.topics] == ["b"]
