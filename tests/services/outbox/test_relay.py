"""The relay: each committed message once and in order, whoever dies, whatever was copied or restored."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import txmq
from txmq.client.relay.database import RelayDatabase
from txmq.client.relay.relay import Relay
from txmq.errors import OutboxStoppedError
from txmq.outbox.outbox import Outbox
from txmq.runtime.crashpoints import POINTS
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.testing.simulated.clock import SimClock
from txmq.xa.database.dbapi import run

from .databases import Fields, connector_of, fields_of
from .relaying import started

TABLES = ("txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay")
KEYS = 5
DRAIN_S = 60.0
KILLED = -signal.SIGKILL
SMALL = {"request_size_bytes_max": 4 << 20, "batch_size_bytes_max": 4 << 20}


class Shop:
    """A database with an outbox that writes to topic ``orders`` of a broker."""

    def __init__(self, fields: Fields) -> None:
        self.fields, self.connect, self.outbox = fields, connector_of(fields), Outbox("orders-db")
        self.connection: Any = self.connect()
        for table in TABLES:
            run(self.connection, f"DROP TABLE IF EXISTS {table}")
        self.connection.commit()
        self.outbox.install(self.connection)
        self.written = 0

    def write(self, count: int, topic: str = "orders") -> None:
        """So many transactions of one message each; every third one is rolled back."""
        for _ in range(count):
            number = self.written
            self.written += 1
            self.outbox.send(self.connection, topic, b"%d" % number, b"k%d" % (number % KEYS))
            self.connection.rollback() if number % 3 == 2 else self.connection.commit()

    def committed(self, first: int = 0) -> list[bytes]:
        """What must be there."""
        return [b"%d" % number for number in range(first, self.written) if number % 3 != 2]


def check(client: txmq.Client, wanted: list[bytes], topic: str = "orders") -> None:
    """Each once, each key in order."""
    found: dict[bytes | None, list[bytes]] = {}
    for message in client.browse(topic):
        found.setdefault(message.key, []).append(message.value or b"")
    assert Counter(value for values in found.values() for value in values) == Counter(wanted)
    assert all(values == sorted(values, key=int) for values in found.values())


def test_committed_messages_arrive_once_in_order_of_their_keys(shop: Shop, client: txmq.Client) -> None:
    with Relay(client, shop.outbox, shop.connect) as relay:
        shop.write(30)
        relay.drain(DRAIN_S)
        shop.write(300)
        relay.drain(DRAIN_S)
        assert relay.sent == len(shop.committed())
    check(client, shop.committed())


def test_messages_wait_for_the_broker(shop: Shop, broker: BrokerProcess, client: txmq.Client) -> None:
    with Relay(client, shop.outbox, shop.connect) as relay:
        shop.write(9)
        relay.drain(DRAIN_S)
        broker.kill()
        shop.write(30)
        broker.start()
        relay.drain(DRAIN_S)
    check(client, shop.committed())


def test_two_relays_send_nothing_twice(shop: Shop, client: txmq.Client) -> None:
    with Relay(client, shop.outbox, shop.connect) as one, Relay(client, shop.outbox, shop.connect) as other:
        for _ in range(10):
            shop.write(12)
            one.wake()
            other.wake()
        eventually(lambda: one.sent + other.sent == len(shop.committed()), "everything has been sent")
    check(client, shop.committed())


RELAYS_POINTS = [point for point in POINTS if point.startswith("relay.")]


@pytest.mark.parametrize("point", RELAYS_POINTS)
def test_relay_that_dies_leaves_its_page_to_the_next(
    shop: Shop, client: txmq.Client, broker: BrokerProcess, point: str
) -> None:
    shop.write(20)
    dying = started(broker.address, shop.fields, f"{point}:1")
    assert dying.wait(DRAIN_S) == KILLED
    shop.write(20)
    _expire(shop)
    with Relay(client, shop.outbox, shop.connect) as relay:
        relay.drain(DRAIN_S)
    check(client, shop.committed())


def _expire(shop: Shop) -> None:
    """The lease of the dead relay is over, without waiting for it."""
    run(shop.connection, "UPDATE txmq_outbox_relay SET until_ms = 0")
    shop.connection.commit()


def test_broker_that_dies_with_a_page_places_it_once(shop: Shop, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "dying") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("orders", partitions=4)
        for point in ("broker.outbox.page_taken", "broker.outbox.page_taken>journal.sync.done"):
            broker.stop()
            broker.start(env={"TXMQ_CRASH": f"{point}:2"})
            with txmq.connect(broker.address) as client, Relay(client, shop.outbox, shop.connect) as relay:
                while broker.is_running:
                    shop.write(2)
                    relay.wake()
                broker.start(env={})
                relay.drain(DRAIN_S)
                check(client, shop.committed())


def test_copy_of_the_database_stops_and_sends_nothing(sqlite_shop: Shop, client: txmq.Client, tmp_path: Path) -> None:
    with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
        sqlite_shop.write(6)
        relay.drain(DRAIN_S)
        sqlite_shop.connection.execute("PRAGMA wal_checkpoint")
        shutil.copy(sqlite_shop.fields["where"], tmp_path / "copy.db")
        sqlite_shop.write(6)
        relay.drain(DRAIN_S)
    copy = connector_of({"kind": "sqlite", "where": str(tmp_path / "copy.db")})
    connection = copy()
    sqlite_shop.outbox.send(connection, "orders", b"of the copy")
    connection.execute("UPDATE txmq_outbox_relay SET until_ms = 0")
    connection.commit()
    with Relay(client, sqlite_shop.outbox, copy) as relay, pytest.raises(OutboxStoppedError, match="says which one"):
        relay.drain(DRAIN_S)
    check(client, sqlite_shop.committed())
    assert connection.execute("SELECT COUNT(*) FROM txmq_outbox").fetchall() == [(1,)]
    connection.close()


def test_restored_broker_stops_the_line(sqlite_shop: Shop, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("orders")
            with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
                sqlite_shop.write(3)
                relay.drain(DRAIN_S)
        broker.stop()
        shutil.copytree(tmp_path / "data", tmp_path / "kept")
        broker.start()
        with txmq.connect(broker.address) as client, Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
            _expire(sqlite_shop)
            sqlite_shop.write(3)
            relay.drain(DRAIN_S)
        broker.stop()
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "kept", tmp_path / "data")
        broker.start()
        with txmq.connect(broker.address) as client, Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
            _expire(sqlite_shop)
            with pytest.raises(OutboxStoppedError):
                relay.drain(DRAIN_S)


def test_message_for_no_topic_is_parked_and_others_go_on(shop: Shop, client: txmq.Client) -> None:
    with Relay(client, shop.outbox, shop.connect) as relay:
        shop.write(1, "nowhere")
        shop.write(4)
        relay.drain(DRAIN_S)
    parked, _ = run(shop.connection, "SELECT topic, why FROM txmq_outbox_parked")
    assert [tuple(map(str, row)) for row in parked] == [("nowhere", "its topic does not exist")]
    check(client, shop.committed(first=1))


def test_unit_over_a_page_arrives_over_a_request_is_parked(sqlite_shop: Shop, tmp_path: Path) -> None:
    large = b"x" * 600_000
    with BrokerProcess(tmp_path / "small", settings=SMALL) as broker, txmq.connect(broker.address) as client:
        client.topics.create("large")
        for count in (3, 9, 1):
            sqlite_shop.outbox.send_many(sqlite_shop.connection, [("large", large)] * count)
            sqlite_shop.connection.commit()
        with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
            relay.drain(DRAIN_S)
        assert sum(1 for _ in client.browse("large")) == 4
    parked, _ = run(sqlite_shop.connection, "SELECT why FROM txmq_outbox_parked")
    assert parked == [("the broker refuses it",)] * 9


def test_relay_waits_for_no_open_transaction(
    client: txmq.Client, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    """InnoDB would lock the row after those that are deleted, too."""
    shop = Shop(fields_of("mysqlclient", tmp_path, mariadb, postgresql))
    shop.write(6)
    with closing(shop.connect()) as late:
        shop.outbox.send(late, "orders", b"1000")
        with Relay(client, shop.outbox, shop.connect) as relay:
            relay.drain(DRAIN_S)
            check(client, shop.committed())
            late.commit()
            relay.drain(DRAIN_S)
    check(client, [*shop.committed(), b"1000"])
    shop.connection.close()


def test_units_are_seen_whole_or_not_at_all(sqlite_shop: Shop, client: txmq.Client) -> None:
    ended, torn = threading.Event(), list[Any]()

    def read() -> None:
        while not ended.is_set():
            found = Counter((message.value or b"").partition(b" ")[0] for message in client.browse("units"))
            torn.extend(unit for unit, count in found.items() if count != 3)

    reader = threading.Thread(target=read)
    client.topics.create("units")
    reader.start()
    with Relay(client, sqlite_shop.outbox, sqlite_shop.connect) as relay:
        connection: sqlite3.Connection = sqlite_shop.connect()
        for number in range(60):
            with sqlite_shop.outbox.transaction(connection) as tx:
                for part in range(3):
                    tx.send("units", b"%d %d" % (number, part), b"%d" % part)
            relay.wake()
        relay.drain(DRAIN_S)
        connection.close()
    ended.set()
    reader.join()
    assert torn == []
    assert sum(1 for _ in client.browse("units")) == 180


def test_relays_session_ends_when_idle_and_sees_commits(shop: Shop) -> None:
    opened = list[Any]()

    def connect() -> Any:
        opened.append(shop.connect())
        return opened[-1]

    database = RelayDatabase(shop.outbox, connect, SimClock())
    assert database.peek() is not None
    asked = {
        "sqlite": ("PRAGMA synchronous",), "mysqlclient": ("SELECT @@wait_timeout", "SELECT @@tx_isolation"),
        "psycopg": ("SHOW idle_in_transaction_session_timeout", "SHOW default_transaction_isolation"),
    }  # fmt: skip
    found = [run(opened[0], question)[0][0][0] for question in asked[shop.fields["kind"]]]
    assert found in ([3], [10, "READ-COMMITTED"], ["10s", "read committed"])
    database.close()


def test_relay_refuses_database_that_may_lose_its_commits(sqlite_shop: Shop, client: txmq.Client) -> None:
    def connect() -> Any:
        connection = sqlite_shop.connect()
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    sqlite_shop.write(1)
    assert RelayDatabase(sqlite_shop.outbox, connect, SimClock()).lock() is None
    check(client, [])
