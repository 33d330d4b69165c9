"""``txmq resolver --once`` over real MariaDB: what it settled, what it found out, what it could not reach."""

from __future__ import annotations

import itertools
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
from tests.services.mysql_world import wait_until
from tests.services.xa_owner import NAMES, resources
from txmq.testing import fork_server
from txmq.testing.broker_process import BrokerProcess
from txmq.testing.mariadb import MariaDB

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ("bank_a", "bank_b")
TIMEOUT_S = 60
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    with MariaDB(tmp_path_factory.mktemp("once") / "db") as server:
        for schema in SCHEMAS:
            server.execute(f"CREATE DATABASE {schema}")
            server.execute(f"CREATE TABLE {schema}.transfers (value VARCHAR(100) PRIMARY KEY) ENGINE=InnoDB")
        yield server


@pytest.fixture(scope="module")
def shared(server: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("home") / "broker") as broker, txmq.connect(broker.address) as client:
        client.topics.create("transfers")
        for resource in resources(addresses(server)):
            resource.install(client)
        yield broker


def addresses(server: MariaDB, **changed: Any) -> list[dict[str, Any]]:
    return [server.connect_arguments() | {"db": schema} | changed for schema in SCHEMAS]


def leave(server: MariaDB, broker: BrokerProcess, point: str) -> str:
    """An owner that dies at a point of one transaction over both databases; its id."""
    given = {
        "address": broker.address, "databases": addresses(server), "value": f"v{next(_numbers)}",
        "topic": "transfers", "timeout": 30,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.services.xa_owner", json.dumps(given)]
    environment = os.environ | {"TXMQ_CRASH": f"{point}:1"}
    owner = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert owner.returncode == -signal.SIGKILL, owner.stderr.decode()
    wait_until(lambda: not server.execute("SELECT 1 FROM information_schema.processlist WHERE db LIKE 'bank_%'"))
    return bytes.fromhex(prepared(server)[0][2:].partition("'")[0]).decode()


def prepared(server: MariaDB) -> list[str]:
    """The xids that XA RECOVER lists."""
    return [str(xid) for *_, xid in server.execute("XA RECOVER FORMAT='SQL'")]


def config(tmp_path: Path, databases: list[dict[str, Any]]) -> Path:
    path = tmp_path / "resolver.toml"
    tables = []
    for name, connect in zip(NAMES, databases, strict=True):
        words = ", ".join(f"{key} = {json.dumps(value)}" for key, value in connect.items())
        tables.append(f'[[resource]]\nname = "{name}"\nkind = "mysql-xa"\nconnect = {{ {words} }}\n')
    path.write_text("\n".join(tables))
    return path


def once(broker: BrokerProcess, path: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "txmq.cli.main", "resolver", "--config", str(path), "--once"]
    return fork_server.run([*command, "-b", broker.address, *words], stdin=b"", timeout=TIMEOUT_S)


def until_settled(broker: BrokerProcess, path: Path) -> list[subprocess.CompletedProcess[bytes]]:
    """Runs until one has nothing to say of an owner that was there a moment ago; the last one is of interest."""
    runs: list[subprocess.CompletedProcess[bytes]] = []

    def settles() -> bool:
        runs.append(once(broker, path))
        return b"a moment ago" not in runs[-1].stderr

    wait_until(settles, TIMEOUT_S)
    return runs


def test_a_transaction_of_two_databases_is_settled_once(server: MariaDB, shared: BrokerProcess, tmp_path: Path) -> None:
    txid = leave(server, shared, "client.xa.decided")
    [*_, last] = until_settled(shared, config(tmp_path, addresses(server)))
    assert last.returncode == 0, last.stderr.decode()
    assert b"1 settled, 0 in doubt\n" in last.stderr
    assert prepared(server) == []
    with txmq.connect(shared.address) as client:
        assert client.outcome(txid) is txmq.Outcome.COMMITTED


def test_a_decided_branch_that_was_rolled_back_by_hand_is_found_and_never_called_committed(
    server: MariaDB, shared: BrokerProcess, tmp_path: Path
) -> None:
    txid = leave(server, shared, "client.xa.decided")
    for xid in prepared(server):
        with closing(server.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(f"XA ROLLBACK {xid}")
    [*_, last] = until_settled(shared, config(tmp_path, addresses(server)))
    said = last.stderr.decode()
    assert last.returncode == 1, said
    assert "0 settled, 0 in doubt" in said
    assert f"{txid} was decided alone by a database" in said
    assert '"outcome": "committed"' not in said
    with txmq.connect(shared.address) as client:
        facts = client.transactions.show(txid)["heuristics"]
        assert sorted((fact["what"], fact["resource"]) for fact in facts) == [
            ("heuristic-rollback", "bank-a"), ("heuristic-rollback", "bank-b"),
        ]  # fmt: skip
        client.transactions.forget(txid)


def test_a_resolver_that_reached_nothing_ends_with_1_and_says_so(
    server: MariaDB, shared: BrokerProcess, tmp_path: Path
) -> None:
    server.execute("CREATE OR REPLACE USER shop@localhost IDENTIFIED BY 'right'")
    result = once(shared, config(tmp_path, addresses(server, user="shop", passwd="wrong")))
    assert result.returncode == 1
    assert b"resource bank-a: not reached" in result.stderr
    assert b"Access denied" in result.stderr
    said = once(shared, config(tmp_path, addresses(server, unix_socket=str(tmp_path / "absent"))), "--json")
    assert said.returncode == 1
    assert sorted(json.loads(said.stdout)["problems"]) == list(NAMES)


def test_a_file_that_is_not_there_is_not_reached_and_named(shared: BrokerProcess, tmp_path: Path) -> None:
    path = tmp_path / "resolver.toml"
    absent = tmp_path / "absent.db"
    path.write_text(f'[[resource]]\nname = "shop"\ndriver = "sqlite3"\nconnect = {{ database = "{absent}" }}\n')
    result = once(shared, path)
    assert result.returncode == 1
    assert b"resource shop: not reached" in result.stderr
    assert b"absent.db" in result.stderr
    assert not absent.exists()
