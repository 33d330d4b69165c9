"""Streamed parts of large transactions: ``put tx=``, and what ``commit`` and ``prepare`` state of them."""

from __future__ import annotations

import pytest

from tools.images.node import Client, Node
from tools.images.requests import batch, part
from txmq.log import records

from ..support import checkpoint_under_way, node, prepare, put, restarted, stated, values


def _begun(**changes: object) -> tuple[Node, Client]:
    broker = node(**changes)
    return broker, broker.session()


def _outcome(client: Client, txid: str) -> str:
    return client.ask("outcome", txid).text


def _stream(client: Client, txid: str, *contents: bytes) -> list[bytes]:
    for number, content in enumerate(contents):
        assert client.ask("put", "a", 0, extensions={"tx": txid}, body=content).text == f"{number}\n"
    return list(contents)


def test_streamed_parts_are_invisible_until_commit_and_precede_its_own() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    batches = _stream(client, txid, batch(b"1"), batch(b"2", b"3"))
    put(client, b"0")
    assert values(broker) == [b"0"]
    answer = client.ask("commit", txid, extensions=stated(batches), body=part("a", 0, batch(b"4")))
    assert answer.text == "a 0 1 1\na 0 2 2\na 0 4 1\n"
    assert values(broker) == values(restarted(broker)) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("wrong", [{"parts": 1}, {"bytes": 1}, {"crc": 1}, {"parts": 3}, {}], ids=str)
def test_a_commit_that_states_something_else_is_refused(wrong: dict[str, int]) -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    batches = _stream(client, txid, batch(b"1"), batch(b"2"))
    extensions = {**stated(batches), **wrong} if wrong else {}
    answer = client.ask("commit", txid, extensions=extensions, body=b"")
    assert (answer.code, answer.error) == (409, "transaction-conflict")
    assert prepare(client, txid, **extensions).error == "transaction-conflict"
    assert client.ask("commit", txid, extensions=stated(batches), body=b"").code == 200


def test_a_commit_that_states_parts_it_never_streamed_is_refused() -> None:
    broker, client = _begun()
    body = part("a", 0, batch())
    answer = client.ask("commit", broker.txid(1, 1), extensions=stated([batch()]), body=body)
    assert answer.error == "transaction-conflict"


def test_stream_whose_owner_is_gone_is_rolled_back_for_good() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    batches = _stream(client, txid, batch(b"1"))
    client.disconnect()
    broker.pump()
    client = broker.session("1.0")
    assert _outcome(client, txid) == "rolled-back\n"
    assert client.ask("commit", txid, extensions=stated(batches), body=b"").error == "transaction-conflict"
    assert broker.state.payload_bytes == 0


@pytest.mark.parametrize("other", ["new", "none", "2.0"])
def test_new_session_on_a_connection_ends_the_streams_before_it(other: str) -> None:
    broker, client = _begun()
    broker.session().disconnect()  # session 2
    txid = broker.txid(1, 1)
    batches = _stream(client, txid, batch(b"1"))
    client.hello(other)
    assert (broker.state.streams, broker.state.payload_bytes) == ({}, 0)
    client = broker.session("1.0")
    assert _outcome(client, txid) == "rolled-back\n"
    assert client.ask("commit", txid, extensions=stated(batches), body=b"").error == "transaction-conflict"
    assert _outcome(broker.session("1.0"), txid) == "rolled-back\n"


def test_repeated_session_on_its_connection_changes_nothing() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    batches = _stream(client, txid, batch(b"1"))
    client.hello("1.0")
    assert client.ask("commit", txid, extensions=stated(batches), body=b"").code == 200


def test_a_stream_is_rolled_back_when_the_broker_ends() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    batches = _stream(client, txid, batch(b"1"))
    broker = restarted(broker)
    client = broker.session("1.0")
    assert _outcome(client, txid) == "rolled-back\n"
    assert client.ask("commit", txid, extensions=stated(batches), body=b"").error == "transaction-conflict"
    assert values(broker) == []


def test_a_stream_is_rolled_back_when_its_time_is_over() -> None:
    broker, client = _begun(transaction_timeout_ms_max=1000)
    txid = broker.txid(1, 1)
    _stream(client, txid, batch(b"1"))
    broker.clock.advance(1)
    broker.core.tick(broker.clock.now_ms())
    assert _outcome(client, txid) == "unknown\n"
    broker.clock.advance(0.001)
    broker.core.tick(broker.clock.now_ms())
    assert _outcome(client, txid) == "rolled-back\n"


def test_streamed_transaction_is_prepared_and_committed_over_checkpoints_and_restarts() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    batches = _stream(client, txid, batch(b"1"))
    broker.checkpoint()
    client.ask("put", "a", 1, extensions={"tx": txid}, body=batch(b"2"))
    batches.append(batch(b"2"))
    assert prepare(client, txid, ("b", 0, batch(b"3")), **stated(batches)).code == 200
    for _ in range(2):
        broker.checkpoint()
        broker = restarted(broker)
    assert broker.connect().ask("commit", txid, body=b"").text == "a 0 0 1\na 1 0 1\nb 0 0 1\n"
    assert [values(broker), values(broker, "a", 1), values(broker, "b")] == [[b"1"], [b"2"], [b"3"]]


def test_part_during_a_checkpoint_belongs_to_the_journal_behind_it() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    _stream(client, txid, batch(b"1"))
    with checkpoint_under_way(broker):
        client.ask("put", "a", 0, extensions={"tx": txid}, body=batch(b"2"))
    assert prepare(client, txid, **stated([batch(b"1"), batch(b"2")])).code == 200
    broker = restarted(broker)
    assert broker.connect().ask("commit", txid, body=b"").text == "a 0 0 1\na 0 1 1\n"
    assert values(broker) == [b"1", b"2"]


def test_first_record_header_holds_the_txid_as_written() -> None:
    broker, client = _begun()
    txid = broker.txid(1, 1)
    content = records.encode([(None, b"1", (), 1), (None, b"2", (), 1)], txid=txid)
    client.ask("commit", txid, body=part("a", 0, bytes(content)))
    assert [message.txid for message in broker.messages(broker.partition("a"))] == [txid, txid]
