"""The messages of a prepared transaction can be looked at, and nothing else of it moves."""

from __future__ import annotations

import pytest

from tools.images.node import Client
from tools.images.requests import batch
from txmq.broker.verbs import recover as module
from txmq.log.records import decode
from txmq.protocol.transaction_bodies import split_parts

from ..support import node, prepare, values


def seen(client: Client, txid: str, after: int = 0) -> list[bytes]:
    answer = client.ask("parts", txid, extensions={"after": after})
    assert answer.code == 200, answer
    found = split_parts(answer.body)
    return [m.value or b"" for topic, number, one, *_ in found for m in decode(one, topic.decode(), int(number))]


def test_parts_of_a_prepared_transaction_are_listed_and_stay_invisible() -> None:
    made = node()
    client = made.session()
    txid = made.txid(1, 1)
    assert prepare(client, txid, ("a", 0, batch(b"x1", b"x2")), ("b", 0, batch(b"y"))).code == 200
    assert seen(client, txid) == [b"x1", b"x2", b"y"]
    assert seen(client, txid, after=1) == [b"y"]
    assert seen(client, txid, after=2) == []
    assert values(made) == values(made, "b") == []


def test_an_answer_is_bounded_and_has_a_part_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARTS_SIZE_BYTES", 1)
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    assert prepare(client, txid, ("a", 0, batch(b"1")), ("a", 1, batch(b"2"))).code == 200
    assert [seen(client, txid, after) for after in range(3)] == [[b"1"], [b"2"], []]


def test_what_is_not_prepared_is_unknown() -> None:
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    assert client.ask("parts", txid).error == "unknown-transaction"
    assert prepare(client, txid, ("a", 0, batch(b"x"))).code == 200
    assert client.ask("commit", txid, body=b"").code == 200
    assert client.ask("parts", txid).error == "unknown-transaction"
