"""Grants at a real broker: a client of the library does what its user may, and hears what is missing."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import txmq
from txmq.client.admin.cluster import Users
from txmq.errors import ForbiddenError, OverloadedError, RolledBackError
from txmq.log.records import encode
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource

PASSWORD = "pencil"
PATIENT_S = 600.0


def _connected(broker: BrokerProcess, user: str) -> txmq.Client:
    return txmq.connect(broker.address.replace("txmq://", f"txmq://{user}@"), password=PASSWORD)


def _grant(broker: BrokerProcess, user: str, **words: str) -> None:
    with _connected(broker, "ops") as client:
        Users(client.control, client.timeout).acl("grant", user, words)


def _begin(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        client.topics.create("secrets")
        Users(client.control, client.timeout).add("ops", PASSWORD)
    with _connected(broker, "ops") as client:
        Users(client.control, client.timeout).add("shop", PASSWORD)


def _send_both(tx: txmq.Transaction) -> None:
    for topic in ("orders", "secrets"):
        tx.send(topic, b"no")


def test_user_produces_and_consumes_what_is_granted_through_kills(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        _begin(broker)
        with _connected(broker, "shop") as client, client.producer() as producer:
            with pytest.raises(ForbiddenError):
                producer.send("orders", b"refused")
            _grant(broker, "shop", may="describe", topic="orders")
            with pytest.raises(ForbiddenError, match="--may write --topic orders"):
                producer.send("orders", b"refused", timeout=PATIENT_S)
            _grant(broker, "shop", may="write,read", topic="orders")
            producer.send("orders", b"one")
            with producer.transaction() as tx:
                tx.send("orders", b"two")
            _grant(broker, "shop", may="describe", topic="secrets")
            with (
                pytest.raises(RolledBackError, match="--may write --topic secrets") as unwritten,
                producer.transaction() as tx,
            ):
                _send_both(tx)
            assert not unwritten.value.retriable
            with (
                client.consumer("billing", ["orders"], start="earliest") as consumer,
                pytest.raises(ForbiddenError, match="--may read --group billing"),
            ):
                consumer.poll(timeout=60.0)
            _grant(broker, "shop", may="read", group="billing")
            assert [topic.name for topic in client.topics.list()] == ["orders", "secrets"]
        broker.kill()
        broker.start()
        with _connected(broker, "shop") as client:
            with client.consumer("billing", ["orders"], start="earliest") as consumer:
                found: list[bytes | None] = []
                while len(found) < 2:
                    for message in consumer.poll(timeout=60.0):
                        found.append(message.value)
                        message.ack()
            assert found == [b"one", b"two"]
            assert [row["group"] for row in client.groups.list()] == ["billing"]
            with pytest.raises(ForbiddenError, match="--may create --topic more"):
                client.topics.create("more")


def test_service_with_a_database_needs_its_resource(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    resource = LastResource("shop", connect=lambda: sqlite3.connect(path, timeout=30.0, check_same_thread=False))
    with BrokerProcess(tmp_path / "data") as broker:
        _begin(broker)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE orders (value BLOB)")
        _grant(broker, "shop", may="write,read", topic="orders")
        with _connected(broker, "shop") as client:
            resource.install(client)
            producer = client.producer()

            def order(value: bytes) -> None:
                with producer.transaction(resource) as tx:
                    tx.connection(resource).execute("INSERT INTO orders VALUES (?)", (value,))
                    tx.send("orders", value)

            with pytest.raises(RolledBackError, match="--may install --resource ") as refused:
                order(b"refused")
            assert not refused.value.retriable
            uuid = str(refused.value).rsplit("--resource ", 1)[1][:32]
            _grant(broker, "shop", may="install,settle", resource=uuid)
            order(b"one")
            assert [message.value for message in client.browse("orders")] == [b"one"]
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("SELECT value FROM orders").fetchall() == [(b"one",)]


def test_one_user_cannot_take_all_sessions_and_streams(tmp_path: Path) -> None:
    settings = {"sessions_max": 6, "transactions_open_max": 4}
    with BrokerProcess(tmp_path / "data", settings=settings) as broker, ExitStack() as stack:
        _begin(broker)  # whose sessions are idle soon, and ended for others
        _grant(broker, "shop", may="write", topic="orders")
        clients = [stack.enter_context(_connected(broker, "shop")) for _ in range(3)]
        assert len({client.session.id for client in clients}) == 3
        with pytest.raises(OverloadedError, match="half of sessions_max"), _connected(broker, "shop") as one_more:
            one_more.session  # noqa: B018
        control = clients[0].control
        batch = bytes(encode([(b"k", b"v", (), 0)]))
        txids = [clients[0].session.next_txid()[1] for _ in range(3)]
        for txid in txids[:2]:
            control.call("put", "orders", 0, body=[batch], extensions={"tx": txid}, timeout=PATIENT_S)
        with pytest.raises(OverloadedError, match="2 unsettled transactions"):
            control.call("put", "orders", 0, body=[batch], extensions={"tx": txids[2]}, timeout=PATIENT_S)
        with _connected(broker, "ops") as client, client.producer() as producer, producer.transaction() as tx:
            tx.send("orders", b"of another user")
        with _connected(broker, "ops") as client:
            assert [message.value for message in client.browse("orders")] == [b"of another user"]
