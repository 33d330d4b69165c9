"""Processes that have not reached a broker since they were started, and take orders into the outbox."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import txmq
from tests.services.transaction.outbox_service import NAME
from txmq import Outcome, RolledBackError
from txmq.client import topics
from txmq.client.partitioner import KeyHashSelector
from txmq.errors import BrokerAwayError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource
from txmq.xa.last_resource import drainer

KEYS = ["apple", "pear", "plum"]
ORDERS = 10
EVER_MS = 3_600_000
NOBODY = "txmq://127.0.0.1:1"


class Shop:
    """A database of orders."""

    def __init__(self, broker: BrokerProcess, path: Path) -> None:
        self.broker, self.path = broker, path
        with closing(self.connect()) as connection:
            connection.execute("CREATE TABLE sold (item TEXT PRIMARY KEY, pieces INTEGER)")
            connection.executemany("INSERT INTO sold VALUES (?, 0)", [(key,) for key in KEYS])
            connection.commit()
        self.client, self.database = self.process(broker.address)

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=30.0, check_same_thread=False)

    def process(self, address: str) -> tuple[txmq.Client, LastResource]:
        """One more, as far as broker and database can tell."""
        client = txmq.connect(address, lazy=True, timeout=2.0)
        return client, LastResource(NAME, connect=self.connect, outbox=True)

    def order(self, process: tuple[txmq.Client, LastResource], key: str = "apple") -> txmq.Transaction:
        """A row and a message, with the row's number."""
        client, database = process
        producer = client.producer()
        with producer.transaction(database, timeout=600.0) as tx:
            connection = tx.connection(database)
            connection.execute("UPDATE sold SET pieces = pieces + 1 WHERE item = ?", (key,))
            ((pieces,),) = connection.execute("SELECT pieces FROM sold WHERE item = ?", (key,)).fetchall()
            producer.send("orders", str(pieces).encode(), key=key.encode())
        return tx

    def start_service(self) -> subprocess.Popen[str]:
        given = {"address": self.broker.address, "path": str(self.path), "keys": KEYS, "orders": ORDERS}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.services.transaction.outbox_service", json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, statement: str) -> list[tuple[object, ...]]:
        with closing(self.connect()) as connection:
            rows = connection.execute(statement).fetchall()
            connection.commit()
        return rows

    def values(self, key: str) -> list[int]:
        """What readers see of a key, partition by partition."""
        return [int(m.value or b"") for m in self.client.browse("orders") if m.key == key.encode()]

    def places(self, key: str) -> dict[int, int]:
        """The partition of each message of a key."""
        return {int(m.value or b""): m.partition for m in self.client.browse("orders") if m.key == key.encode()}

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def shop(broker: BrokerProcess, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(broker, tmp_path / "shop.db")
    made.client.topics.create("orders", partitions=4)
    made.database.install(made.client)
    yield made
    made.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_service_starts_and_takes_orders_without_a_broker(shop: Shop, is_killed: bool) -> None:
    """Its messages are in the log afterwards, once and in order, though it be killed before the broker is back."""
    shop.broker.kill()
    service = shop.start_service()
    assert service.stdin is not None
    assert service.stdout is not None
    try:
        taken = [json.loads(service.stdout.readline()) for _ in range(ORDERS * len(KEYS))]
        if is_killed:
            service.kill()
            service.wait()
        shop.broker.start()
        if is_killed:
            shop.client.settle(shop.database)
        eventually(lambda: not shop.run("SELECT 1 FROM txmq_marker_outbox"), "the outbox is empty")
    finally:
        service.stdin.close()
        service.wait(30)
        service.stdout.close()
    assert {(one["outcome"], *one["pending"]) for one in taken} == {("COMMITTED", "broker")}
    assert len({one["txid"] for one in taken}) == len(taken)
    assert {key: shop.values(key) for key in KEYS} == {key: list(range(1, ORDERS + 1)) for key in KEYS}
    assert shop.run("SELECT item, pieces FROM sold ORDER BY item") == [(key, ORDERS) for key in KEYS]


def test_service_goes_to_the_broker_once_it_is_there(shop: Shop) -> None:
    shop.broker.kill()
    process = client, _ = shop.process(shop.broker.address)
    with closing(client):
        waits = shop.order(process)
        assert waits.pending == ("broker",)
        assert client.outcome(waits.txid) is Outcome.COMMITTED
        shop.broker.start()
        waits.wait_visible(600.0)
        eventually(lambda: shop.order(process).results[0].offset is not None, "blocks go to the broker")
    assert shop.values("apple") == sorted(shop.values("apple"))


def test_orders_are_taken_when_topics_are_known_no_more(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client has learnt of a topic counts for half a minute."""
    monkeypatch.setattr(topics, "METADATA_AGE_S_MAX", 1.0)
    monkeypatch.setattr(topics, "ASSUME_EVERY_S", 0.0)
    here = shop.client, shop.database
    shop.order(here)
    shop.broker.kill()
    for _ in range(2):
        eventually(lambda: shop.client.topics.held("orders") is None, "the topic is known no more")
        assert shop.order(here).pending == ("broker",)
    shop.broker.start()
    eventually(lambda: shop.values("apple") == [1, 2, 3], "all have arrived")


def test_topic_that_nobody_told_the_database_fails_clearly(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "ASSUME_EVERY_S", 0.1)
    shop.client.topics.create("later")
    process = client, database = shop.process(NOBODY)
    with closing(client):
        shop.order(process)
        with pytest.raises(BrokerAwayError, match="shop, which has an outbox, does not know it"):  # noqa: SIM117
            with client.producer().transaction(database) as tx:
                tx.send("later", b"x")
        shop.database.install(shop.client)
        eventually(lambda: _sends(client, database, "later"), "the process has looked again")


def _sends(client: txmq.Client, database: LastResource, topic: str) -> bool:
    try:
        with client.producer().transaction(database) as tx:
            tx.send(topic, b"x")
    except RolledBackError:
        return False
    return True


def test_database_of_no_cluster_says_what_to_call(shop: Shop, tmp_path: Path) -> None:
    alone = Shop(shop.broker, tmp_path / "alone.db")
    client, database = process = alone.process(NOBODY)
    with closing(client), closing(alone.client):
        with pytest.raises(BrokerAwayError):
            database.install(client)
        database.install()
        with pytest.raises(RolledBackError, match=r"call install\(client\) once"):
            alone.order(process)
        database.install(alone.client)
        alone.order(process)


def test_block_whose_topic_grew_meanwhile_is_rolled_back(shop: Shop) -> None:
    """Its message names a partition that the key has left; another thread of the process has seen so."""
    client = shop.client
    shop.order((client, shop.database))
    tx = client.producer().transaction(shop.database)
    tx.__enter__()
    tx.send("orders", b"2", key=b"apple")
    client.topics.alter("orders", partitions=16)
    client.topics.describe("orders")
    shop.broker.kill()
    with pytest.raises(RolledBackError, match="a topic has other partitions by now"):
        tx.__exit__(None, None, None)
    assert shop.order((client, shop.database)).pending == ("broker",)
    shop.broker.start()
    eventually(lambda: shop.values("apple") == [1, 2], "the block that was run again has arrived")


def test_key_of_a_topic_that_grew_moves_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process cannot reach the broker while another one extends the topic and goes on."""
    monkeypatch.setattr(drainer, "LEASE_MS", 2 * EVER_MS)
    hold = "UPDATE txmq_marker_outbox_series SET holder = 'another', until_ms = {} WHERE id = 1"
    here, away = (shop.client, shop.database), shop.process(NOBODY)
    key = next(key for key in KEYS if len({KeyHashSelector().partition_of(key.encode(), n) for n in (4, 16)}) == 2)
    with closing(away[0]):
        shop.run(hold.format(f"(julianday('now') - 2440587.5) * 86400000 + {EVER_MS}"))
        shop.order(away, key)
        shop.client.topics.alter("orders", partitions=16)
        behind = shop.order(here, key)
        assert behind.pending == ("broker",)  # behind one of its key in another partition
        with pytest.raises(RolledBackError, match="orders has other partitions by now"):
            shop.order(away, key)
        shop.order(away, key)
        shop.order(here, key)
        shop.run(hold.format("0"))
        eventually(lambda: not shop.run("SELECT 1 FROM txmq_marker_outbox"), "the outbox is empty")
    assert shop.values(key) == [1, 2, 3, 4] or shop.values(key) == [2, 3, 4, 1]
    places = shop.places(key)
    assert places[1] < 4
    assert {places[number] for number in (2, 3, 4)} == {KeyHashSelector().partition_of(key.encode(), 16)} != {places[1]}
