"""``end``: a client that is done with its session. Nothing of its batches comes again, and nothing is kept for them."""

from __future__ import annotations

import pytest

from tools.images.check import comparable
from tools.images.node import Client, Node
from tools.images.requests import batch, part

from ..support import node, prepare, put, restarted, values

DAY_MS = 24 * 3600 * 1000


def _producer(broker: Node) -> Client:
    """A client whose session has sequences in two partitions."""
    client = broker.session()
    for partition in (0, 1):
        assert put(client, b"v", producer=broker.newest_session, partition=partition).code == 200
    return client


def _wish(broker: Node, number: int = 1) -> str:
    return f"{number:x}.0.{broker.state.sessions[number].secret}"


def _kept(broker: Node) -> tuple[int, int]:
    """Sequences, as counted and as they are."""
    return broker.state.sequences.count, sum(len(one.producers) for one in broker.state.all_partitions())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_session_without_transaction_is_gone_at_once(checkpoint: bool) -> None:
    broker = node()
    client = _producer(broker)
    assert _kept(broker) == (2, 2)
    assert client.ask("end", 0).code == 200
    assert (_kept(broker), broker.state.sessions) == ((0, 0), {})
    if checkpoint:
        broker.checkpoint()
    before = comparable(broker.state)
    assert comparable(restarted(broker).state) == before


@pytest.mark.parametrize("checkpoint", [False, True])
def test_session_with_transactions_keeps_outcomes_and_no_sequence(checkpoint: bool) -> None:
    broker = node()
    client = _producer(broker)
    body, txid = part("a", 0, batch(b"t")), broker.txid(1, 1)
    assert client.ask("commit", txid, body=body).code == 200
    assert client.ask("end", 1).code == 200
    assert _kept(broker) == (0, 0)
    if checkpoint:
        broker.checkpoint()
    before = comparable(broker.state)
    broker = restarted(broker)
    assert comparable(broker.state) == before
    assert _kept(broker) == (0, 0)
    other = broker.session()
    assert other.ask("outcome", txid).text.startswith("committed\n")


def test_broker_keeps_a_session_whose_ids_only_a_database_knows() -> None:
    broker = node()
    client = _producer(broker)
    assert client.ask("end", 3).code == 200
    assert _kept(broker) == (0, 0)
    other = broker.session()
    assert other.ask("outcome", broker.txid(1, 3), extensions={"fence": None}).text.startswith("rolled-back")


@pytest.mark.parametrize("counter", [0, 1])
@pytest.mark.parametrize("is_new_life", [False, True])
def test_batch_that_comes_late_is_refused_and_stored_once(counter: int, is_new_life: bool) -> None:
    """What is repeated has the sequence 0, which a broker that knows no sequence takes for a new batch."""
    broker = node()
    client = _producer(broker)
    wish = _wish(broker)
    assert client.ask("end", counter).code == 200
    assert put(client, b"v", producer=1).error == "other-session"  # what was in the pipe after it
    if is_new_life:
        broker = restarted(broker)
    late = broker.connect()
    assert late.ask("hello", 1, "late", extensions={"session": wish}).error == "fenced"
    assert put(late, b"v", producer=1).error == "other-session"
    higher = wish.replace(".0.", ".1.")
    assert broker.connect().ask("hello", 1, "next", extensions={"session": higher}).error == "fenced"
    assert values(broker) == [b"v"]


def test_end_rolls_back_what_is_not_prepared() -> None:
    broker = node()
    client = _producer(broker)
    open_one, prepared = broker.txid(1, 1), broker.txid(1, 2)
    assert client.ask("put", "a", 0, extensions={"tx": open_one}, body=batch(b"open")).code == 200
    assert prepare(client, prepared, ("a", 0, batch(b"prepared"))).code == 200
    assert client.ask("end", 0).code == 200  # a client that miscounts loses nothing
    other = broker.session()
    assert other.ask("outcome", open_one).text.startswith("rolled-back")
    assert other.ask("commit", prepared, body=b"").code == 200
    assert values(broker) == [b"v", b"prepared"]


def test_connection_that_was_taken_over_ends_nothing() -> None:
    broker = node()
    former = _producer(broker)
    client = broker.connect()
    assert client.ask("hello", 1, "me", extensions={"session": _wish(broker)}).code == 200
    former.send("end", 0)
    broker.pump()
    assert _kept(broker) == (2, 2)
    assert put(client, b"v", producer=1).text == "0\n"


def test_end_without_session_is_refused() -> None:
    broker = node()
    assert broker.connect().ask("end", 0).error == "other-session"


def test_closed_session_ends_after_its_day() -> None:
    broker = node()
    client = _producer(broker)
    assert client.ask("end", 1).code == 200
    for ms in (60_000, DAY_MS):
        broker.clock.advance(ms / 1000)
        broker.core.tick(broker.clock.now_ms())
        broker.pump()
    assert broker.state.sessions == {}


def test_broker_killed_before_end_is_durable_knows_the_session() -> None:
    broker = node()
    client = _producer(broker)
    wish = _wish(broker)
    disk = broker.disk
    client.send("end", 0)  # nothing is written yet
    again = Node(disk.kill(), broker.settings, clock=broker.clock)
    resumed = again.connect()
    assert resumed.ask("hello", 1, "me", extensions={"session": wish}).code == 200
    assert put(resumed, b"v", producer=1).text == "0\n"
    assert values(again) == [b"v"]
