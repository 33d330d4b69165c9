"""A request for a topic that is not known here waits until the registry was asked; only then it is refused."""

from __future__ import annotations

import pytest

from tools.images.requests import UUID, batch, part
from tools.simulated.zookeeper import SimSession
from txmq.broker.cluster import cluster_view
from txmq.broker.cluster.cluster_view import ASKS_MAX, RegistryState
from txmq.broker.cluster.registry_asks import Refresh, carry_out
from txmq.errors import RegistryAwayError
from txmq.protocol.transaction_bodies import NO_KEYS, encode_part
from txmq.registry.zookeeper.registry import ZooKeeperRegistry

from ..support import values
from ..verbs.support import A, Broker, alone, pair

AWAY = "unavailable whether the topic exists is not known: the registry does not answer"


def knowing_one() -> tuple[Broker, Broker]:
    """Two brokers; the first has created topic ``a``, the second has not heard of it."""
    one, two = pair()
    one.ask("topic", "create", "a", partitions=2)
    return one, two


@pytest.mark.parametrize(
    ("words", "body", "extensions"),
    [
        (("put", "a", 1), batch(b"v"), {}),
        (("get", "a", 1, 0, 100), None, {}),
        (("offset", "a", 1, "latest"), None, {}),
        (("meta", "a"), None, {}),
        (("topic", "describe", "a"), None, {}),
        (("topic", "alter", "a"), None, {"retention_ms": 9}),
        (("topic", "delete", "a"), None, {}),
        (("commit", "{txid}"), part("a", 1, batch(b"v")), {}),
        (
            ("prepare", "{txid}", "last-resource"), part("a", 1, batch(b"v"), "*"),
            {"resource": "r", "uuid": UUID, "table": "t"},
        ),
        (("put", "a", 1), batch(b"v"), {"tx": "{txid}"}),
        (("group", "reset", "g"), b'[["a", 1, 0]]', {"create": None}),
    ],
    ids=lambda given: " ".join(map(str, given[:2])) if isinstance(given, tuple) else "",
)  # fmt: skip
def test_topic_that_another_broker_made_is_found(
    words: tuple[str, ...], body: bytes | None, extensions: dict[str, str | int | None]
) -> None:
    _one, two = knowing_one()
    two.ask("hello", 1, "me", session="new")
    txid = two.node.txid(1, 1)
    named = [str(word).format(txid=txid) for word in words]
    given = {name: value.format(txid=txid) if isinstance(value, str) else value for name, value in extensions.items()}
    opaque = two.client.send(*named, body=body, extensions=given)
    two.work()
    assert two.client.received[opaque].code == 200, two.client.received[opaque]


def test_topic_is_found_behind_a_server_that_lags() -> None:
    one, two = pair()
    assert isinstance(two.registry, ZooKeeperRegistry)
    session = two.registry._session
    assert isinstance(session, SimSession)
    session.lag()
    one.ask("topic", "create", "a", partitions=2)
    assert session.children("/prod/txmq/topics") == []
    assert two.ask("put", "a", 1, body=batch(b"v"))[0] == 200


def test_partition_that_another_broker_added_is_found() -> None:
    one, two = knowing_one()
    two.refresh()
    one.ask("topic", "alter", "a", partitions=4)
    assert two.ask("put", "a", 3, body=batch(b"v"))[0] == 200
    assert two.ask("put", "a", 2, body=batch(b"v"))[1].startswith("not-owner leader=10.0.0.160:8123")
    assert two.ask("put", "a", 4, body=batch(b"v"))[1].startswith("unknown-topic topic 'a' has partitions 0 to 3")


def test_topic_that_the_registry_does_not_have_is_unknown() -> None:
    broker = alone().lead()
    opaque = broker.client.send("meta", "a")
    asks = broker.asks()
    assert [type(ask) for ask in asks] == [Refresh]
    assert opaque not in broker.client.received
    broker.carry_out(asks[0])
    assert broker.client.received[opaque].error == "unknown-topic"
    assert broker.asks() == []


def test_requests_of_a_connection_keep_their_order() -> None:
    one, two = knowing_one()
    two.ask("hello", 1, "me", session="new")
    for sequence in range(3):
        two.client.send("put", "a", 1, body=batch(b"%d" % sequence, producer=1, sequence=sequence))
    two.client.send("ping")
    two.node.pump()
    assert len(two.client.received) == 0
    two.node.core.registry_changed(one.registry.topics(), one.registry.homes())  # a watch was faster
    two.node.pump()
    two.client.send("put", "a", 1, body=batch(b"3", producer=1, sequence=3))
    two.work()
    assert {answer.code for answer in two.client.received.values()} == {200}
    assert values(two.node, "a", 1) == [b"0", b"1", b"2", b"3"]
    assert two.view.parked == {}


def test_parts_that_are_streamed_keep_their_order() -> None:
    one, two = pair()
    one.ask("topic", "create", "known", partitions=2)
    two.refresh()
    one.ask("topic", "create", "a", partitions=2)
    two.ask("hello", 1, "me", session="new")
    for topic in ("a", "known"):
        two.client.send("put", topic, 1, body=batch(b"v"), extensions={"tx": two.node.txid(1, 1)})
    two.work()
    assert [each.topic_id for each in two.node.state.transactions[1, 1].parts] == [2, 1]


def test_one_read_serves_all_that_came_before_it() -> None:
    broker = alone().lead()
    clients = [broker.node.connect() for _ in range(5)]
    for client in clients:
        client.send("meta", "a")
    (first,) = broker.asks()
    late = broker.node.connect()
    late.send("meta", "a")
    assert broker.asks() == []  # one is under way
    answer = carry_out(broker.registry, A, first)
    broker.ask("topic", "create", "b")
    broker.node.core.registry_answered(first.number, answer)
    broker.node.pump()
    assert [len(client.received) for client in [*clients, late]] == [1, 1, 1, 1, 1, 0]
    (second,) = broker.asks()  # that read may have begun before the late one came
    broker.carry_out(second)
    assert {answer.error for client in [*clients, late] for answer in client.received.values()} == {"unknown-topic"}


def test_read_that_fails_leaves_open_whether_the_topic_exists() -> None:
    broker = alone().lead()
    opaque = broker.client.send("put", "a", 0, body=batch(b"v"))
    (ask,) = broker.asks()
    broker.node.core.registry_answered(ask.number, RegistryAwayError("planned"))
    broker.node.pump()
    assert broker.client.received[opaque].text == f"{AWAY} (planned)\n"
    assert broker.ask("put", "a", 0, body=batch(b"v"))[1].startswith("unknown-topic")


def test_request_does_not_wait_for_a_registry_that_is_away() -> None:
    broker = alone().lead()
    broker.node.core.registry_state(RegistryState.SUSPENDED)
    opaque = broker.client.send("meta", "a")
    broker.node.pump()
    assert broker.client.received[opaque].text == f"{AWAY} (suspended)\n"
    assert broker.asks() == []


def test_request_of_a_lost_connection_is_not_executed() -> None:
    _one, two = knowing_one()
    two.client.send("put", "a", 1, body=batch(b"v"))
    two.node.pump()
    two.client.disconnect()
    two.work()
    two.refresh()
    assert values(two.node, "a", 1) == []
    assert (two.view.parked, two.view.parked_bytes) == ({}, 0)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = alone().lead()
    content = batch(b"v")
    monkeypatch.setattr(cluster_view, "PARKED_BYTES_MAX", 2 * len(content))
    clients = [broker.node.connect() for _ in range(3)]
    opaques = [client.send("put", "a", 0, body=content) for client in clients]
    broker.node.pump()
    assert broker.view.parked_bytes == 2 * len(content)
    refused = clients[2].received[opaques[2]]
    assert (refused.code, refused.text) == (
        429,
        "overloaded too many requests wait for the registry; try again later\n",
    )
    broker.work()
    assert broker.view.parked_bytes == 0


def test_ask_too_many_is_refused() -> None:
    broker = alone().lead()
    for number in range(ASKS_MAX):
        broker.client.send("topic", "create", f"t{number}")
    opaque = broker.client.send("meta", "a")
    broker.node.pump()
    assert broker.client.received[opaque].error == "overloaded"


# --- topics of the same name -----------------------------------------------------------------------------------------


def test_put_that_means_a_former_topic_is_refused() -> None:
    one, two = knowing_one()
    assert one.ask("put", "a", 0, body=batch(b"1"), id=1)[0] == 200
    one.ask("topic", "delete", "a")
    two.refresh()
    one.ask("topic", "create", "a", partitions=2)
    assert one.ask("put", "a", 0, body=batch(b"2"), id=1) == (409, "stale-topic topic 'a' has id 2 now, not 1\n")
    assert values(one.node) == []
    assert one.ask("put", "a", 0, body=batch(b"3"), id=2)[0] == 200


def test_put_that_means_a_newer_topic_waits_for_it() -> None:
    one, two = knowing_one()
    two.refresh()
    one.ask("topic", "delete", "a")
    two.refresh()
    one.ask("topic", "create", "a", partitions=2)
    assert [topic.config.name for topic in two.node.state.topics] == []
    assert two.ask("put", "a", 1, body=batch(b"new"), id=2)[0] == 200
    assert values(two.node, "a", 1) == [b"new"]


def _part(value: bytes, topic_id: int, number: int = 0) -> bytes:
    return b"".join(encode_part("a", number, batch(value), NO_KEYS, topic_id))


@pytest.mark.parametrize("verb", ["commit", "prepare"])
def test_part_for_a_topic_gone_refuses_its_whole_transaction(verb: str) -> None:
    broker = alone().lead()
    for _ in range(2):
        broker.ask("topic", "create", "a", partitions=2)
        broker.ask("topic", "delete", "a")
    broker.ask("topic", "create", "a", partitions=2)
    broker.ask("hello", 1, "me", session="new")
    kind: tuple[str, ...] = ("last-resource",) if verb == "prepare" else ()
    fields: dict[str, str | int] = {"resource": "r", "uuid": UUID, "table": "t"} if kind else {}
    refused = broker.node.txid(1, 1)
    body = _part(b"1", 3) + _part(b"2", 2, 1)
    assert broker.ask(verb, refused, *kind, body=body, **fields) == (409, "stale-topic topic 'a' has id 3 now, not 2\n")
    assert broker.ask("outcome", refused)[1] == "unknown\n"
    body = _part(b"3", 3) + _part(b"4", 0, 1)
    assert broker.ask(verb, broker.node.txid(1, 2), *kind, body=body, **fields)[0] == 200
    if kind:
        assert broker.ask("commit", broker.node.txid(1, 2), body=b"")[0] == 200
    assert (values(broker.node), values(broker.node, "a", 1)) == ([b"3"], [b"4"])


def test_part_that_means_a_newer_topic_waits_for_it() -> None:
    one, two = knowing_one()
    two.refresh()
    one.ask("topic", "delete", "a")
    two.refresh()
    one.ask("topic", "create", "a", partitions=2)
    two.ask("hello", 1, "me", session="new")
    assert two.ask("commit", two.node.txid(1, 1), body=_part(b"new", 2, 1))[0] == 200
    assert values(two.node, "a", 1) == [b"new"]


def test_put_with_an_id_may_be_raw_or_a_part() -> None:
    broker = alone().lead()
    broker.ask("topic", "create", "a")
    broker.ask("hello", 1, "me", session="new")
    txid = broker.node.txid(1, 1)
    for words, body in (({"raw": None}, b"1"), ({"tx": txid}, batch(b"2"))):
        for topic_id, code in ((1, 200), (2, 409)):
            opaque = broker.client.send("put", "a", 0, body=body, extensions={**words, "id": topic_id})
            broker.work()
            assert broker.client.received[opaque].code == code
    assert len(broker.node.state.transactions[1, 1].parts) == 1


def test_poll_of_a_topic_deleted_elsewhere_is_refused() -> None:
    one, two = knowing_one()
    opaques = [one.client.send("get", "a", 0, 0, 100, extensions={"wait": 30_000})]
    two.ask("topic", "delete", "a")
    one.node.core.registry_changed(two.registry.topics(), two.registry.homes())
    assert one.client.client.out == []  # the deletion is not durable yet
    one.work()
    assert one.client.received[opaques[0]].error == "unknown-topic"
