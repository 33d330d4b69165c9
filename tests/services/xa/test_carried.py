"""Reports of branches that go with other threads' decisions, on a real MariaDB and a real broker, and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import txmq
from txmq.client.transaction.background_resolver import resolver_of
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

from .carried_owner import resource
from .mysql_orders import MySQLOrders

ROOT = Path(__file__).resolve().parents[3]
PARTITIONS = 3


class Other:
    """Another process of the service, which resolves."""

    def __init__(self, broker: BrokerProcess, orders: MySQLOrders) -> None:
        self.broker, self.orders, self.topic = broker, orders, orders.database
        self.client = txmq.connect(broker.address)
        self.resource = resource(self.arguments)
        self.resource.install(self.client)
        self.client.topics.create(self.topic, partitions=PARTITIONS)

    @property
    def arguments(self) -> dict[str, Any]:
        """How any process reaches the database."""
        return {**self.orders.server.connect_arguments(), "db": self.orders.database}

    def run_owner(self, count: int, *, closes: bool = True, **env: str) -> int:
        """Run the owner; its exit status."""
        given = {
            "address": self.broker.address, "database": self.arguments, "topic": self.topic, "count": count,
            "closes": closes,
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.services.xa.carried_owner", json.dumps(given)]
        return subprocess.run(command, env=os.environ | env, cwd=ROOT, timeout=60, check=False).returncode

    def messages(self) -> list[int]:
        """What readers see."""
        found: list[int] = []
        for partition in range(PARTITIONS):
            offset, end = 0, self.client.offsets(self.topic, partition).end
            while offset < end:
                fetched = self.client.fetch(self.topic, partition, offset, timeout=5.0)
                found += [int(message.value or b"") for message in fetched]
                offset = fetched[-1].offset + 1
        return sorted(found)

    def close(self) -> None:
        """The process ends."""
        self.client.close()
        self.resource.close()


@pytest.fixture
def other(shared_broker: BrokerProcess, orders: MySQLOrders) -> Iterator[Other]:
    made = Other(shared_broker, orders)
    yield made
    made.close()


@pytest.mark.parametrize("visit", [1, 40])
def test_owner_killed_with_held_reports_is_resolved_by_another(other: Other, visit: int) -> None:
    inside = f"client.done.held:{visit}:kill"
    assert other.run_owner(2000, TXMQ_CRASH=inside) == -signal.SIGKILL
    resolver_of(other.client).add(other.resource)
    eventually(lambda: not other.orders.listed(), "no branch is left prepared", 20)
    rows = other.orders.rows()
    assert rows
    eventually(lambda: other.messages() == other.orders.rows(), "each row has its message, once", 20)


@pytest.mark.parametrize("closes", [True, False])
def test_owner_that_ends_leaves_no_report_behind(other: Other, closes: bool) -> None:
    assert other.run_owner(400, closes=closes) == 0
    eventually(lambda: other.messages() == list(range(400)), "all are shown, and nobody resolves", 5)
