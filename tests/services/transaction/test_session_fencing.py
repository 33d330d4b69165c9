"""A session that somebody took over: the former owner is fenced, and its blocks end as they should."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import txmq
from tests.services.broker.wire import Wire
from txmq.client.transport.session import resume_wish
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client of the broker, which has the topic ``t``."""
    with txmq.connect(broker.address, timeout=5.0) as connected:
        connected.topics.create("t")
        yield connected


def _take_over(broker: BrokerProcess, client: txmq.Client) -> Wire:
    """Another process, which knows the secret, takes the client's session over; its connection."""
    session = client.session
    wire = Wire(broker)
    wish = resume_wish(session.id, session.epoch + 1, session.secret)
    code, body = wire.ask(f"hello 1 thief session={wish} h\r\n".encode())
    assert code == 200, body
    return wire


def _values(client: txmq.Client) -> list[bytes | None]:
    return [message.value for message in client.browse("t")]


def test_local_block_of_fenced_client_rolls_back_next_commits(broker: BrokerProcess, client: txmq.Client) -> None:
    producer = client.producer()
    with pytest.raises(txmq.RolledBackError) as caught, producer.transaction() as tx:  # noqa: PT012
        tx.send("t", b"fenced")
        assert tx.txid is not None  # drawn in the session that will be lost
        fenced = client.session
        wire = _take_over(broker, client)
    assert caught.value.txid == tx.txid
    assert tx.outcome is txmq.Outcome.ROLLED_BACK
    with wire, producer.transaction() as tx:
        tx.send("t", b"committed")
    assert client.session.id != fenced.id
    assert _values(client) == [b"committed"]


def test_row_of_fenced_client_is_rolled_back_with_its_message(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    path = tmp_path / "rows.sqlite"
    resource = LastResource("rows", connect=lambda: sqlite3.connect(path, isolation_level=None))
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    resource.install(client)
    producer = client.producer()
    with pytest.raises(txmq.RolledBackError), producer.transaction(resource) as tx:  # noqa: PT012
        tx.connection(resource).execute("INSERT INTO orders VALUES (1)")
        tx.send("t", b"fenced")
        wire = _take_over(broker, client)
    with wire, producer.transaction(resource) as tx:
        tx.connection(resource).execute("INSERT INTO orders VALUES (2)")
        tx.send("t", b"committed")
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT id FROM orders").fetchall() == [(2,)]
    assert _values(client) == [b"committed"]


def test_fenced_plain_producer_reports_doubt_and_continues_in_another_session(
    broker: BrokerProcess, client: txmq.Client
) -> None:
    producer = client.producer()
    assert producer.send("t", b"0").offset == 0
    with _take_over(broker, client) as wire:
        told = [b"0"]
        with suppress(txmq.DeliveryUnknownError):  # where the end of its connection was not noticed before it was sent
            producer.send("t", b"1")
            told.append(b"1")
        producer.send("t", b"2")
        assert wire.ask(b"ping 1\r\n")[0] == 200
    assert _values(client) == [*told, b"2"]
