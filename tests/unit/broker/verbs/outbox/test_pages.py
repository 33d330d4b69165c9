"""Pages of an outbox: each follows the newest one, with its messages or not at all, through restarts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import UUID, batch, part
from txmq.broker.state import outbox_chains
from txmq.log.batch import checksum

from ...homes_support import listed, prepare_branch, two_homes
from ...support import node, restarted, values

NAME = "shop"


def send(client: Client, counter: int, after: int, value: bytes = b"", *, session: int = 1, **changes: Any) -> Answer:
    """Commit a page that follows the one of transaction ``after`` (0: none); without a value it has no messages."""
    before = client.node.txid(session, after) if after else "-"
    given = {"outbox": UUID, "name": NAME, "after": before, **changes}
    body = part("a", 0, batch(value), "") if value else b""
    return client.ask("commit", client.node.txid(session, counter), extensions=given, body=body)


def last(client: Client, uuid: str = UUID) -> str | None:
    """The newest page, as the broker tells it."""
    told = json.loads(client.ask("outbox", uuid).body)["last"]
    return None if told is None else str(told)


def again(broker: Node, *, checkpoint: bool) -> Client:
    """A new session with the broker's next life."""
    if checkpoint:
        broker.checkpoint()
    return restarted(broker).session("new")


both = pytest.mark.parametrize("checkpoint", [False, True])


def test_page_follows_the_newest_one_only() -> None:
    client = node().session()
    assert last(client) is None
    assert send(client, 1, 0, b"one").text == "a 0 0 1\n"
    assert send(client, 2, 0, b"a copy").error == "outbox-conflict"
    assert send(client, 3, 1, b"two").text == "a 0 1 1\n"
    assert send(client, 4, 1, b"late").error == "outbox-conflict"
    assert last(client) == client.node.txid(1, 3)
    assert values(client.node) == [b"one", b"two"]


def test_copy_is_told_so_whatever_its_page_has() -> None:
    client = node().session()
    assert send(client, 1, 0, b"one").code == 200
    given, body = {"outbox": UUID, "name": NAME, "after": "-"}, part("gone", 0, batch(b"of a copy"), "")
    refused = client.ask("commit", client.node.txid(1, 2), extensions=given, body=body)
    assert refused.error == "outbox-conflict"


def test_streamed_page_takes_its_place_whole() -> None:
    client = node().session()
    assert send(client, 1, 0, b"one").code == 200
    size, crc, txid = 0, 0, client.node.txid(1, 2)
    for value in (b"two", b"three"):
        content = batch(value)
        size, crc = size + len(content), checksum(content, crc)
        assert client.ask("put", "a", 0, extensions={"tx": txid}, body=content).code == 200
    assert send(client, 2, 1, parts=2, bytes=size).error == "transaction-conflict"
    assert send(client, 2, 1, parts=2, bytes=size, crc=crc).code == 200
    assert (values(client.node), last(client)) == ([b"one", b"two", b"three"], txid)


def test_refused_page_leaves_its_transaction_undecided() -> None:
    client = node().session()
    assert send(client, 1, 7, b"of a broker that was restored").error == "outbox-conflict"
    assert client.ask("outcome", client.node.txid(1, 1)).text == "unknown\n"
    assert client.ask("outcome", client.node.txid(1, 1), extensions={"fence": None}).text == "rolled-back\n"
    assert send(client, 1, 0, b"late").error == "transaction-conflict"
    assert values(client.node) == []


def test_page_without_messages_takes_its_place() -> None:
    client = node().session()
    assert (send(client, 1, 0).text, send(client, 2, 1).text) == ("", "")
    assert last(client) == client.node.txid(1, 2)


@both
def test_chain_outlives_the_broker(*, checkpoint: bool) -> None:
    broker = node()
    client = broker.session()
    assert send(client, 1, 0, b"one").code == 200
    client = again(broker, checkpoint=checkpoint)
    own = client.node.newest_session
    assert last(client) == client.node.txid(1, 1)
    assert send(client, 1, 0, b"late", session=own).error == "outbox-conflict"
    given = {"outbox": UUID, "name": NAME, "after": client.node.txid(1, 1)}
    sent = client.ask("commit", client.node.txid(own, 2), extensions=given, body=part("a", 0, batch(b"two"), ""))
    assert sent.text == "a 0 1 1\n"
    assert values(client.node) == [b"one", b"two"]


def test_page_waiting_for_its_place_is_newest_at_once() -> None:
    here, there = two_homes()
    client = here.session()
    prepare_branch(client, here.txid(1, 1), there.txid(1, 1), ("a", 0, b"x"))
    given = {"outbox": UUID, "name": NAME, "after": "-"}
    sent = client.ask("commit", here.txid(1, 2), extensions=given, body=part("a", 0, batch(b"behind it"), "7"))
    assert (sent.code, last(client)) == (200, here.txid(1, 2))
    assert {row["state"] for row in listed(client)} == {"prepared", "placing"}


@pytest.mark.parametrize("missing", ["name", "after"])
def test_page_says_outbox_name_and_the_one_before(missing: str) -> None:
    client = node().session()
    given = {word: text for word, text in {"outbox": UUID, "name": NAME, "after": "-"}.items() if word != missing}
    assert client.ask("commit", client.node.txid(1, 1), extensions=given, body=b"").error == "bad-request"
    assert last(client) is None


@pytest.mark.parametrize(("word", "text"), [("after", "5e-1"), ("name", "..")])
def test_malformed_words_of_a_page_are_refused(word: str, text: str) -> None:
    client = node().session()
    given = {"outbox": UUID, "name": NAME, "after": "-", word: text}
    assert client.ask("commit", client.node.txid(1, 1), extensions=given, body=b"").error == "bad-request"
    assert last(client) is None


@both
def test_forgotten_outbox_begins_anew(*, checkpoint: bool) -> None:
    broker = node()
    client = broker.session()
    assert send(client, 1, 0).code == 200
    assert client.ask("outbox", UUID, extensions={"forget": None}).code == 200
    assert client.ask("outbox", UUID, extensions={"forget": None}).code == 200
    client = again(broker, checkpoint=checkpoint)
    assert last(client) is None
    assert send(client, 1, 0, session=client.node.newest_session).code == 200


def test_no_more_outboxes_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_chains, "OUTBOXES_MAX", 1)
    client = node().session()
    assert send(client, 1, 0).code == 200
    assert send(client, 2, 0, outbox="f" * 32).error == "overloaded"
    assert send(client, 3, 1).code == 200


def test_stats_list_each_outbox_and_its_newest_page() -> None:
    client = node().session()
    assert send(client, 1, 0).code == 200
    txid = client.node.txid(1, 1)
    assert client.ask("stats", "chains").text.startswith(f"{NAME} uuid {UUID} last {txid} last_ms_ago ")
    (row,) = json.loads(client.ask("stats", "json").text)["chains"]
    assert (row["outbox"], row["last"]) == (NAME, txid)
    assert "\noutboxes 1\n" in client.ask("stats", "transactions").text
