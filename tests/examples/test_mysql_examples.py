"""The examples with MySQL run as their texts say, against a real MariaDB and a real broker."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import MySQLdb
import pytest

import txmq
from txmq import MySQLResource
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 60
_numbers = itertools.count()
SETTLED_WITHIN_S = 60.0


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("examples") / "broker") as process:
        yield process


@pytest.fixture
def database(mariadb: MariaDB) -> dict[str, Any]:
    """An empty database: it belongs to this test's broker."""
    return mariadb.connect_arguments() | {"db": new_database(mariadb)}


def new_database(mariadb: MariaDB) -> str:
    name = f"example_{next(_numbers)}"
    mariadb.execute(f"CREATE DATABASE {name}")
    return name


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, capture_output=True, timeout=TIMEOUT_S, check=False, text=True, env=os.environ | (env or {})
    )


def ok(*words: str, env: dict[str, str] | None = None) -> str:
    result = run(*words, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def sent(broker: BrokerProcess, topic: str = "orders") -> list[tuple[bytes, bytes]]:
    with txmq.connect(broker.address) as client:
        return sorted((message.key or b"", message.value or b"") for message in client.browse(topic))


def rows(mariadb: MariaDB, query: str) -> list[tuple[bytes, bytes]]:
    return sorted((customer.encode(), f"created {number}".encode()) for number, customer in mariadb.execute(query))


def test_last_resource(broker: BrokerProcess, mariadb: MariaDB, database: dict[str, Any]) -> None:
    for _ in range(2):
        said = ok(str(EXAMPLES / "last_resource_mysql.py"), json.dumps(database), "5", broker.address)
        assert said.count("order ") == 5
    assert len(sent(broker)) == 10
    assert sent(broker) == rows(mariadb, f"SELECT id, customer FROM {database['db']}.orders")


def test_a_transfer_between_two_databases(broker: BrokerProcess, mariadb: MariaDB, database: dict[str, Any]) -> None:
    other = new_database(mariadb)
    both = json.dumps(database), json.dumps(database | {"db": other})
    program = str(EXAMPLES / "transfer_xa.py")
    assert ok(program, *both, "3", broker.address).count("transfer ") == 3
    killed = run(program, *both, "3", broker.address, env={"TXMQ_CRASH": "client.xa.decided:2"})
    assert killed.returncode == -9
    assert ok(program, *both, "1", broker.address).count("transfer ") == 1  # settles what the killed one left
    settle(broker, {"bank-one": database, "bank-other": database | {"db": other}})
    totals = mariadb.execute(
        f"SELECT (SELECT balance FROM {database['db']}.accounts), (SELECT balance FROM {other}.accounts)"
    )
    assert (list(totals), len(sent(broker, "transfers"))) == ([(1000 - 6 * 7, 1000 + 6 * 7)], 6)


def shown(broker: BrokerProcess) -> dict[str, Any]:
    """What an operator is shown of the only transaction in doubt."""
    with txmq.connect(broker.address) as client:
        [row] = client.transactions.list()
    command = ("-m", "txmq.cli.main", "tx", "show", row["txid"], "--json", "--bootstrap", broker.address)
    found: dict[str, Any] = json.loads(ok(*command))
    return found


def statements(found: dict[str, Any], verb: str) -> list[str]:
    return [line for line in found["sql"] if line.startswith(verb)]


def test_sql_that_operator_pastes_commits_branches_of_killed_owner(
    broker: BrokerProcess, mariadb: MariaDB, database: dict[str, Any]
) -> None:
    other = database | {"db": new_database(mariadb)}
    killed = run(
        str(EXAMPLES / "transfer_xa.py"), json.dumps(database), json.dumps(other), "1", broker.address,
        env={"TXMQ_CRASH": "client.xa.decided:1"},
    )  # fmt: skip
    assert killed.returncode == -9
    found = shown(broker)
    listed = mariadb.prepared()
    commits = statements(found, "XA COMMIT")
    assert sorted(commits) == sorted(f"XA COMMIT {xid};" for xid in listed)
    for commit, where in zip(commits, (database, other), strict=True):
        mariadb.execute(commit)
        with closing(mariadb.connect(db=where["db"])) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(statements(found, "SELECT")[0])
            assert cursor.fetchall() == (("committed",),)
    settle(broker, {"bank-one": database, "bank-other": other})
    assert sent(broker, "transfers") == [(b"", b"bank-one to bank-other: 7")]


def test_sql_that_operator_pastes_bars_way_of_last_resource(
    broker: BrokerProcess, mariadb: MariaDB, database: dict[str, Any]
) -> None:
    killed = run(
        str(EXAMPLES / "last_resource_mysql.py"), json.dumps(database), "1", broker.address,
        env={"TXMQ_CRASH": "client.tx.prepared:1"},
    )  # fmt: skip
    assert killed.returncode == -9
    found = shown(broker)
    with closing(mariadb.connect(db=database["db"])) as connection, closing(connection.cursor()) as cursor:
        for statement in statements(found, "SELECT") + statements(found, "INSERT") + statements(found, "SELECT"):
            cursor.execute(statement)
        assert cursor.fetchall() == (("rolled-back",),)
        connection.commit()
    command = ("-m", "txmq.cli.main", "tx", "rollback", found["txid"], "--heuristic", "--reason", "test", "--yes")
    ok(*command, "--bootstrap", broker.address)
    assert sent(broker) == []


def test_inside_django_s_own_connection(broker: BrokerProcess, mariadb: MariaDB, database: dict[str, Any]) -> None:
    given = {"USER": database["user"], "NAME": database["db"], "HOST": database["unix_socket"]}
    for _ in range(2):
        said = ok(str(EXAMPLES / "django_last_resource.py"), json.dumps(given), "3", broker.address)
        assert said.count("order ") == 3
    assert len(sent(broker)) == 6
    assert sent(broker) == rows(mariadb, f"SELECT id, customer FROM {database['db']}.orders_django")


def test_inside_sqlalchemy_s_own_connection(broker: BrokerProcess, mariadb: MariaDB, database: dict[str, Any]) -> None:
    url = f"mysql+mysqldb://root@/{database['db']}?unix_socket={database['unix_socket']}&charset=utf8mb4"
    for _ in range(2):
        said = ok(str(EXAMPLES / "sqlalchemy_orders.py"), url, "3", broker.address)
        assert said.count("order ") == 3
    assert len(sent(broker)) == 6
    assert sent(broker) == rows(mariadb, f"SELECT id, customer FROM {database['db']}.orders_sqlalchemy")


def settle(broker: BrokerProcess, databases: dict[str, dict[str, Any]]) -> None:
    """The last run may have ended before its resolver had told the broker all."""
    with txmq.connect(broker.address) as client:
        for name, arguments in databases.items():
            client.settle(MySQLResource(name, connect=partial(MySQLdb.connect, **arguments)))
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while client.transactions.list():  # each look is a round trip
            assert time.monotonic() < deadline


# What ``together`` promises where the block fails: nothing of it is there, and the connection goes on.
DJANGO_FAILS = """
import json, sys
sys.path.insert(0, {folder!r})
sys.argv = ["django_last_resource.py", *sys.argv[1:]]
import django_last_resource as example, txmq
from django.db import connection
real = txmq.Transaction.send
calls = iter([0, 1])
def send(self, *words, **named):
    if next(calls, 2) == 1:
        raise RuntimeError("planned")
    return real(self, *words, **named)
txmq.Transaction.send = send
try:
    example.main(*sys.argv[1:])
except RuntimeError as error:
    print(error, connection.get_autocommit(), connection.in_atomic_block)
"""


def test_exception_in_django_block_undoes_row_and_restores_connection(
    broker: BrokerProcess, mariadb: MariaDB, database: dict[str, Any]
) -> None:
    given = {"USER": database["user"], "NAME": database["db"], "HOST": database["unix_socket"]}
    said = ok("-c", DJANGO_FAILS.format(folder=str(EXAMPLES)), json.dumps(given), "2", broker.address)
    assert said.splitlines()[-1] == "planned True False"
    assert len(sent(broker)) == 1
    assert sent(broker) == rows(mariadb, f"SELECT id, customer FROM {database['db']}.orders_django")


def test_half_messages_survive_a_killed_owner(broker: BrokerProcess, tmp_path: Path) -> None:
    database, program = str(tmp_path / "half.db"), str(EXAMPLES / "half_message.py")
    assert ok(program, database, "3", broker.address).count("committed") == 3
    for point in ("client.half.prepared:2", "client.half.decided:2"):
        assert run(program, database, "3", broker.address, env={"TXMQ_CRASH": point}).returncode == -9
    with txmq.connect(broker.address) as client:
        # The first one's, and the second one's, which may have been asked about the first one's before it died.
        left = len(client.transactions.list())
        assert left in (1, 2)
        # A third one goes on with orders and dies when it has checked one of them, before it tells.
        third = run(program, database, "1000000", broker.address, env={"TXMQ_CRASH": "client.check.answered:1"})
        assert third.returncode == -9
        assert len(client.transactions.list()) >= left
        # Another member of the group; the same checker as the example's.
        sys.path.insert(0, str(EXAMPLES))
        try:
            from half_message import Shop  # type: ignore[import-not-found,unused-ignore]
        finally:
            sys.path.remove(str(EXAMPLES))
        client.producer(group="order-service", checker=Shop(database).check)
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while client.transactions.list():  # each look is a round trip
            assert time.monotonic() < deadline
    with closing(sqlite3.connect(database)) as connection:
        keys = [
            customer.encode() for (customer,) in connection.execute("SELECT customer FROM orders ORDER BY customer")
        ]
    assert [key for key, _ in sent(broker)] == keys
    assert len(keys) >= 3 + 1 + 2  # the third one's own come on top, if it made one before it was asked
