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
from sqlalchemy import Engine, MetaData, create_engine, text
from sqlalchemy.orm import Session

import txmq
from tests.services.sqlalchemy.databases import mariadb_url, postgresql_url
from txmq.errors import FencedError, TransactionStateError
from txmq.sqlalchemy import DatabaseOffsetStore
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

TOPIC, GROUP, PARTITIONS, MESSAGES = "orders", "billing", 4, 120
OPTIONS = txmq.ConsumerOptions(
    heartbeat_interval=0.05, offset_save_interval=0.1, retry_delay=0.01, session_timeout=30.0
)  # fmt: skip


class Shop:
    """The application's database, with a table for rows.

    Attributes:
        connect: opens a connection of the driver's.
        open: opens what the application works with: a connection, or a session.
    """

    def __init__(self, connect: Callable[[], Any], engine: Engine | None = None) -> None:
        self.connect = self.open = connect
        self.store: txmq.DatabaseOffsetStore
        if engine is None:
            self.store = txmq.DatabaseOffsetStore(connect)
        else:
            self.store, self.open = DatabaseOffsetStore(MetaData(), connect), lambda: Session(engine)
        with closing(connect()) as connection:
            for table in ("txmq_offset", "invoices"):
                run(connection, f"DROP TABLE IF EXISTS {table}")
            run(connection, "CREATE TABLE invoices (value INTEGER)")
            connection.commit()
        self.store.install()


@pytest.fixture(params=["sqlite", "postgresql", "mysql", "postgresql-session", "mysql-session"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    kind, _, is_session = request.param.partition("-")
    if kind == "sqlite":
        connect: Callable[[], Any] = lambda: sqlite3.connect(tmp_path / "shop.db", timeout=2.0)  # noqa: E731
        url = ""
    elif kind == "postgresql":
        postgresql: PostgreSQL = request.getfixturevalue("postgresql")
        connect, url = lambda: psycopg.connect(postgresql.conninfo()), postgresql_url(postgresql)
    else:
        mariadb: MariaDB = request.getfixturevalue("mariadb")
        connect, url = mariadb.connect, mariadb_url(mariadb)
    engine = create_engine(url) if is_session else None
    yield Shop(connect, engine)
    if engine is not None:
        engine.dispose()


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client, and a topic."""
    with txmq.connect(shared_broker.address) as made:
        made.topics.create(TOPIC, partitions=PARTITIONS)
        yield made
        made.topics.delete(TOPIC)


def handle(connection: Any, message: txmq.Message, *, commits: bool) -> None:
    """An invoice and the offset; rolled back now and then."""
    statement = f"INSERT INTO invoices VALUES ({int(message.value or b'')})"
    connection.execute(text(statement)) if isinstance(connection, Session) else run(connection, statement)
    message.ack(connection)
    connection.commit() if commits else connection.rollback()
    if not commits:
        message.reject("rolled back")


def test_each_row_is_there_once_through_rebalances_and_rollbacks(client: txmq.Client, shop: Shop) -> None:
    drawn, numbers = random.Random(7), iter(range(MESSAGES))
    consumers: list[txmq.Consumer] = []
    connections: dict[txmq.Consumer, Any] = {}

    def change() -> None:
        if len(consumers) == 3:
            consumers.pop(drawn.randrange(3)).close()
        consumers.append(client.consumer(GROUP, [TOPIC], offset_store=shop.store, options=OPTIONS))

    def work() -> bool:
        for consumer in consumers:
            connection = connections.setdefault(consumer, None) or shop.open()
            connections[consumer] = connection
            for message in consumer.poll(timeout=0.02):
                try:
                    handle(connection, message, commits=drawn.random() > 0.1)
                except (FencedError, TransactionStateError) as error:
                    message.reject(str(error))
                    connection = connections[consumer] = shop.open()
        return len(rows(shop)) >= MESSAGES

    for _ in range(6):
        change()
        for number in [number for _, number in zip(range(MESSAGES // 6), numbers, strict=False)]:
            client.producer().send(TOPIC, b"%d" % number, key=b"%d" % number)
        work()
    eventually(work, lambda: f"{len(rows(shop))} of {MESSAGES} rows")
    for consumer in consumers:
        consumer.close()
    for connection in connections.values():
        with suppress(Exception):  # the store has closed it
            connection.close()
    assert rows(shop) == list(range(MESSAGES))


def rows(shop: Shop) -> list[int]:
    """All invoices."""
    with closing(shop.connect()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("SELECT value FROM invoices ORDER BY value")
        return [value for (value,) in cursor.fetchall()]
