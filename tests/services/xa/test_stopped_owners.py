"""Clients that stand still (SIGSTOP) within a block of a last resource: they hold up nobody for long."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.stopped import until_stopped
from txmq.client.transaction.background_resolver import resolver_of
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource

ROOT = Path(__file__).parents[3]
WAIT_S = 60
TIMEOUT_S = 5.0  # of blocks: so long a busy machine may take to reach the end of the body
PATIENCE = {
    "mariadb": f"SET SESSION innodb_lock_wait_timeout = {WAIT_S}",
    "postgresql": f"SET SESSION lock_timeout = '{WAIT_S}s'",
}


class Shop:
    """A database with a resolver, and what its other clients need to reach it."""

    def __init__(self, kind: str, server: Any, broker: BrokerProcess) -> None:
        self.kind, self.broker = kind, broker
        self.driver = "MySQLdb" if kind == "mariadb" else "psycopg"
        self.arguments = server.connect_arguments() if kind == "mariadb" else {"conninfo": server.conninfo()}
        self.client = txmq.connect(broker.address)
        self.client.topics.create("orders")
        self.resource = LastResource("shop", connect=self.connect)
        self.run("CREATE TABLE sold (value VARCHAR(20) PRIMARY KEY)")
        self.resource.install(self.client)
        resolver_of(self.client).add(self.resource)

    def connect(self) -> Any:
        """A connection of this process."""
        return importlib.import_module(self.driver).connect(**self.arguments)

    def run(self, *statements: str) -> list[Any]:
        """Somebody else's transaction, which waits for rows."""
        with closing(self.connect()) as connection, closing(connection.cursor()) as cursor:
            for statement in (PATIENCE[self.kind], *statements):
                cursor.execute(statement)
            found = list(cursor.fetchall()) if cursor.description is not None else []
            connection.commit()
            return found

    def owner(self, value: str, crash: str = "", **arguments: Any) -> subprocess.Popen[bytes]:
        """Another process with one transaction: it stands still in its body, or as ``crash`` says."""
        given = {
            "address": self.broker.address, "driver": self.driver, "arguments": self.arguments | arguments,
            "value": value, "timeout": TIMEOUT_S, "stops": not crash,
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.services.xa.shop_owner", json.dumps(given)]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TXMQ_CRASH": crash}, stderr=subprocess.PIPE)

    def messages(self) -> list[str]:
        """What readers see."""
        return [(message.value or b"").decode() for message in self.client.browse("orders")]

    def is_resolved(self) -> bool:
        """Whether nothing is in doubt."""
        return list(self.client.transactions.list(state="in-doubt")) == []


@pytest.fixture(params=list(PATIENCE))
def shop(request: pytest.FixtureRequest, broker: BrokerProcess) -> Iterator[Shop]:
    made = Shop(request.param, request.getfixturevalue(request.param), broker)
    yield made
    made.client.close()
    made.resource.close()


def test_owners_that_stand_still_hold_up_nobody(shop: Shop) -> None:
    """One before its marker, where nothing tells the resolver of its session, and one after it."""
    in_one_by_one = {"multi_statements": False} if shop.kind == "mariadb" else {}  # the marker goes before COMMIT
    stopped = [shop.owner("body"), shop.owner("marked", "client.tx.prepared:1:stop", **in_one_by_one)]
    owners = list(stopped)
    try:
        for owner in stopped:
            until_stopped(owner.pid)
        owners.append(dead := shop.owner("dead", "client.tx.db_committed:1"))
        _, said = dead.communicate(timeout=WAIT_S)
        assert dead.returncode == -signal.SIGKILL, said.decode()
        eventually(lambda: shop.messages() == ["dead"], "what another one has committed is visible")
        shop.run("INSERT INTO sold VALUES ('body')", "INSERT INTO sold VALUES ('marked')")
        eventually(shop.is_resolved, "nothing is in doubt")
        for owner in stopped:
            os.kill(owner.pid, signal.SIGCONT)
            _, said = owner.communicate(timeout=WAIT_S)
            assert owner.returncode == 1
            assert "RolledBackError" in said.decode() or "TransactionTimeoutError" in said.decode(), said.decode()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
    assert shop.run("SELECT value FROM sold ORDER BY value") == [("body",), ("dead",), ("marked",)]
    assert shop.messages() == ["dead"]
