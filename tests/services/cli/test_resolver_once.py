"""``txmq resolver --once`` over real MariaDB: what it settled, what it found out, what it could not reach."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.xa.xa_owner import NAMES, resources
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

ROOT = Path(__file__).resolve().parents[3]
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


@contextmanager
def owner_at(server: MariaDB, broker: BrokerProcess, crash: str) -> Iterator[subprocess.Popen[bytes]]:
    """The owner of one transaction over both databases, which ends or stops at a point."""
    given = {
        "address": broker.address, "databases": addresses(server), "value": f"v{next(_numbers)}",
        "topic": "transfers", "timeout": 300,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.services.xa.xa_owner", json.dumps(given)]
    environment = os.environ | {"TXMQ_CRASH": crash}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) as owner:
        yield owner


def leave(server: MariaDB, broker: BrokerProcess, point: str) -> str:
    """An owner that dies at a point; its transaction's id."""
    with owner_at(server, broker, f"{point}:1") as owner:
        _, said = owner.communicate(timeout=TIMEOUT_S)
    assert owner.returncode == -signal.SIGKILL, said.decode()
    eventually(
        lambda: not server.execute("SELECT 1 FROM information_schema.processlist WHERE db LIKE 'bank_%'"),
        "the owner's sessions have ended",
    )
    return txid_of(server)


def txid_of(server: MariaDB) -> str:
    """The transaction whose branches are prepared."""
    return bytes.fromhex(server.prepared()[0][2:].partition("'")[0]).decode()


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

    eventually(settles, "the resolver finds no owner that was there a moment ago")
    return runs


def test_a_transaction_of_two_databases_is_settled_once(server: MariaDB, shared: BrokerProcess, tmp_path: Path) -> None:
    txid = leave(server, shared, "client.xa.decided")
    [*_, last] = until_settled(shared, config(tmp_path, addresses(server)))
    assert last.returncode == 0, last.stderr.decode()
    assert b"1 settled, 0 in doubt\n" in last.stderr
    assert server.prepared() == []
    with txmq.connect(shared.address) as client:
        assert client.outcome(txid) is txmq.Outcome.COMMITTED


def test_database_that_the_file_does_not_name_is_named(server: MariaDB, shared: BrokerProcess, tmp_path: Path) -> None:
    leave(server, shared, "client.xa.decided")
    path = config(tmp_path, addresses(server))
    both = path.read_text()
    path.write_text(both[: both.rindex("[[resource]]")])
    [*_, last] = until_settled(shared, path)
    assert (last.returncode, b"the file names no resource 'bank-b'" in last.stderr) == (1, True)
    path.write_text(both)
    assert until_settled(shared, path)[-1].returncode == 0


def test_decided_branch_rolled_back_by_hand_is_never_called_committed(
    server: MariaDB, shared: BrokerProcess, tmp_path: Path
) -> None:
    txid = leave(server, shared, "client.xa.decided")
    for xid in server.prepared():
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


@contextmanager
def stopped_owner(server: MariaDB, broker: BrokerProcess) -> Iterator[str]:
    """An owner that hangs with both branches prepared, before the broker has heard of a decision; its id."""
    with owner_at(server, broker, "client.xa.all_prepared:1:stop") as owner:
        eventually(lambda: len(server.prepared()) == 2, "both branches are prepared")
        try:
            yield txid_of(server)
        finally:
            owner.kill()
    eventually(
        lambda: not server.execute("SELECT 1 FROM information_schema.processlist WHERE db LIKE 'bank_%'"),
        "the owner's sessions have ended",
    )
    for xid in server.prepared():
        with closing(server.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(f"XA ROLLBACK {xid}")


def test_undecided_branches_unknown_to_broker_are_listed_with_alarm(
    server: MariaDB, shared: BrokerProcess, tmp_path: Path
) -> None:
    with stopped_owner(server, shared) as txid, txmq.connect(shared.address) as client:
        said = once(shared, config(tmp_path, addresses(server)))
        assert said.returncode == 1, "rows are locked"
        assert f"{txid} stays prepared in bank-a: nobody has decided yet" in said.stderr.decode()
        assert client.transactions.list() == []
        rows = {row["resource"]: row for row in client.transactions.resources()}
        assert re.fullmatch(r"\S+ at 127\.0\.0\.1:\d+", rows["bank-a"]["by"])
        assert [(rows[name]["branches"], rows[name]["reachable"]) for name in NAMES] == [(1, True), (1, True)]
        listed = txmq_tx(shared, "list").stdout.decode()
        assert listed.startswith("0 in doubt at the broker\n")
        assert "bank-a: 1 branch prepared for up to" in listed
        assert txid in listed
        assert "XA RECOVER" in listed
        assert {row["txid"] for row in json.loads(txmq_tx(shared, "list", "--json").stdout)} == {txid}
        shown = json.loads(txmq_tx(shared, "show", txid, "--json").stdout)
        assert {branch["resource"] for branch in shown["branches"]} == set(NAMES)
        assert any(f"txmq tx fence {txid}" in step for step in shown["next"])
        assert not any(line.startswith("XA ROLLBACK") for line in shown["sql"]), "it is not fenced yet"
        assert int(client.stats("transactions").split("branches_prepared ")[1].split()[0]) == 2
        txmq_tx(shared, "fence", txid)
        ends = json.loads(txmq_tx(shared, "show", txid, "--json").stdout)["sql"]
        statements = {line.rstrip(";") for line in ends if line.startswith("XA ROLLBACK")}
        assert statements == {f"XA ROLLBACK {as_hex(xid)}" for xid in server.prepared()}
    assert once(shared, config(tmp_path, addresses(server))).returncode == 0
    assert b"0 in doubt\n" in txmq_tx(shared, "list").stdout


def as_hex(xid: str) -> str:
    """As ``xid_sql`` writes it: MariaDB lists it so, with its format id at the end."""
    return xid.replace(" ", "")


def txmq_tx(broker: BrokerProcess, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "txmq.cli.main", "tx", *words, "-b", broker.address]
    result = fork_server.run(command, stdin=b"", timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr.decode()
    return result


def test_resolver_that_reached_nothing_ends_with_status_1(
    server: MariaDB, shared: BrokerProcess, tmp_path: Path
) -> None:
    server.execute("DROP USER IF EXISTS shop@localhost")
    server.execute("CREATE USER shop@localhost IDENTIFIED BY 'right'")
    result = once(shared, config(tmp_path, addresses(server, user="shop", passwd="wrong")))
    assert result.returncode == 1
    assert b"resource bank-a: not reached" in result.stderr
    assert b"Access denied" in result.stderr
    said = once(shared, config(tmp_path, addresses(server, unix_socket=str(tmp_path / "absent"))), "--json")
    assert said.returncode == 1
    assert sorted(json.loads(said.stdout)["problems"]) == list(NAMES)


def test_file_that_is_not_there_is_not_reached_and_named(shared: BrokerProcess, tmp_path: Path) -> None:
    path = tmp_path / "resolver.toml"
    absent = tmp_path / "absent.db"
    path.write_text(f'[[resource]]\nname = "shop"\ndriver = "sqlite3"\nconnect = {{ database = "{absent}" }}\n')
    result = once(shared, path)
    assert result.returncode == 1
    assert b"resource shop: not reached" in result.stderr
    assert b"absent.db" in result.stderr
    assert not absent.exists()
