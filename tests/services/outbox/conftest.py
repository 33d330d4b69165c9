"""Databases with an outbox, and a client of a broker that has their topic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

from .databases import RELAYED, fields_of
from .test_relay import Shop


@pytest.fixture(params=RELAYED)
def shop(request: pytest.FixtureRequest, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Iterator[Shop]:
    made = Shop(fields_of(request.param, tmp_path, mariadb, postgresql))
    yield made
    made.connection.close()


@pytest.fixture
def sqlite_shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop({"kind": "sqlite", "where": str(tmp_path / "shop.db")})
    yield made
    made.connection.close()


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[txmq.Client]:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders", partitions=4)
        yield client
