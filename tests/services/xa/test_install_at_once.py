"""Workers that start together install the same resource at the same moment, on all three kinds of databases."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import psycopg
import pytest

import txmq
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa import LastResource

from .mysql_database import MySQLDatabase

WORKERS, ROUNDS = 8, 4


def install_together(connect: Callable[[], Any], table: str, client: txmq.Client) -> None:
    """Each worker has a resource of its own, as processes have."""
    ready = Barrier(WORKERS)

    def install(_: int) -> str | None:
        resource = LastResource("shop", connect=connect, table=table)
        ready.wait()
        resource.install(client)
        return resource.uuid

    with ThreadPoolExecutor(WORKERS) as threads:
        (uuid,) = set(threads.map(install, range(WORKERS)))
    resource = LastResource("shop", connect=connect, table=table)
    with client.producer().transaction(resource) as tx:
        tx.send("orders", b"x")
    resource.close()
    assert (tx.outcome, resource.uuid) == (txmq.Outcome.COMMITTED, uuid)


@pytest.fixture(scope="module")
def client(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    with txmq.connect(shared_broker.address) as client:
        client.topics.create("orders")
        yield client


def test_eight_workers_install_in_mariadb_at_once(client: txmq.Client, mariadb: MariaDB) -> None:
    database = MySQLDatabase(mariadb)
    for number in range(ROUNDS):
        install_together(database.connect, f"marker_{number}", client)
    database.disconnect()


def test_eight_workers_install_in_postgresql_at_once(client: txmq.Client, postgresql: PostgreSQL) -> None:
    for number in range(ROUNDS):
        install_together(partial(psycopg.connect, postgresql.conninfo()), f"marker_{number}", client)


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_eight_workers_install_in_sqlite_at_once(client: txmq.Client, tmp_path: Path, journal: str) -> None:
    for number in range(ROUNDS):
        path = tmp_path / f"{number}.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA journal_mode = {journal}")
        install_together(partial(sqlite3.connect, path), "marker", client)
