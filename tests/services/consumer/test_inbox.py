"""What a message does and its offset are one transaction, in each database: once, through rebalances and rollbacks."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

import txmq
from txmq.errors import FencedError, TransactionStateError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

TOPIC, GROUP, PARTITIONS, MESSAGES = "orders", "billing", 4, 120
OPTIONS = txmq.ConsumerOptions(
    heartbeat_interval=0.05, offset_save_interval=0.1, retry_delay=0.01, session_timeout=30.0
)  # fmt: skip


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """The application's database, with a table for rows."""
    if request.param == "sqlite":
        opened: Callable[[], Any] = lambda: sqlite3.connect(tmp_path / "shop.db", timeout=2.0)  # noqa: E731
    elif request.param == "postgresql":
        postgresql: PostgreSQL = request.getfixturevalue("postgresql")
        opened = lambda: psycopg.connect(postgresql.conninfo())  # noqa: E731
    else:
        mariadb: MariaDB = request.getfixturevalue("mariadb")
        opened = mariadb.connect
    with closing(opened()) as connection:
        connection.cursor().execute("CREATE TABLE invoices (value INTEGER)")
        connection.commit()
    return opened


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client, and a topic."""
    with txmq.connect(shared_broker.address) as made:
        made.topics.create(TOPIC, partitions=PARTITIONS)
        yield made
        made.topics.delete(TOPIC)


def handle(connection: Any, message: txmq.Message, *, commits: bool) -> None:
    """An invoice and the offset; rolled back now and then."""
    connection.cursor().execute(f"INSERT INTO invoices VALUES ({int(message.value or b'')})")
    message.ack(connection)
    connection.commit() if commits else connection.rollback()
    if not commits:
        message.reject("rolled back")


def test_each_row_is_there_once_through_rebalances_and_rollbacks(
    client: txmq.Client, database: Callable[[], Any]
) -> None:
    drawn, numbers = random.Random(7), iter(range(MESSAGES))
    store = txmq.DatabaseOffsetStore(database)
    store.install()
    consumers: list[txmq.Consumer] = []
    connections: dict[txmq.Consumer, Any] = {}

    def change() -> None:
        if len(consumers) == 3:
            consumers.pop(drawn.randrange(3)).close()
        consumers.append(client.consumer(GROUP, [TOPIC], offset_store=store, options=OPTIONS))

    def work() -> bool:
        for consumer in consumers:
            connection = connections.setdefault(consumer, None) or database()
            connections[consumer] = connection
            for message in consumer.poll(timeout=0.02):
                try:
                    handle(connection, message, commits=drawn.random() > 0.1)
                except (FencedError, TransactionStateError) as error:
                    message.reject(str(error))
                    connection = connections[consumer] = database()
        return len(rows(database)) >= MESSAGES

    for _ in range(6):
        change()
        for number in [number for _, number in zip(range(MESSAGES // 6), numbers, strict=False)]:
            client.producer().send(TOPIC, b"%d" % number, key=b"%d" % number)
        work()
    eventually(work, lambda: f"{len(rows(database))} of {MESSAGES} rows")
    for consumer in consumers:
        consumer.close()
    for connection in connections.values():
        with suppress(Exception):  # the store has closed it
            connection.close()
    assert rows(database) == list(range(MESSAGES))


def rows(database: Callable[[], Any]) -> list[int]:
    """All invoices."""
    with closing(database()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("SELECT value FROM invoices ORDER BY value")
        return [value for (value,) in cursor.fetchall()]
