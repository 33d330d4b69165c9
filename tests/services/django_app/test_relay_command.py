"""``manage.py txmq_relay``: what a project commits is at the broker once and in order, whoever is killed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

from .project import KINDS, Project, databases_of

TRAFFIC = ("-m", "tests.services.django_app.shop.traffic")
TIMEOUT_S = 60.0


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    with txmq.connect(shared_broker.address) as client:
        client.topics.create("orders", partitions=3)
        yield client
        client.topics.delete("orders")


@pytest.fixture(params=KINDS)
def project(
    request: pytest.FixtureRequest, tmp_path: Path, shared_broker: BrokerProcess, mariadb: MariaDB,
    postgresql: PostgreSQL,
) -> Project:  # fmt: skip
    databases = databases_of(request.param, tmp_path, mariadb, postgresql)
    return Project(request.param, databases, shared_broker.address)


def found(client: txmq.Client) -> list[str]:
    """Everything at the broker; within a key in its order."""
    return [(message.value or b"").decode() for message in client.browse("orders")]


EXPIRE = "from txmq.django.models import RelayRow; RelayRow.objects.update(until_ms=0)"  # instead of waiting for it


def test_killed_commands_leave_each_row_one_message(project: Project, client: txmq.Client) -> None:
    project.ok("migrate", "--run-syncdb", "-v0")
    asked = project.run("0", "40", python=TRAFFIC)
    assert asked.returncode == 0, asked.stderr
    for point in ("relay.claim.committed:1", "relay.page.sent:1"):
        assert project.start("txmq_relay", crash=point).wait(TIMEOUT_S) == -signal.SIGKILL
        project.ok("shell", "-v0", "-c", EXPIRE)
    with project.running("txmq_relay") as relay:
        eventually(lambda: found(client), "the relay has sent", TIMEOUT_S)
        relay.kill()
        relay.wait(TIMEOUT_S)
    project.ok("shell", "-v0", "-c", EXPIRE)
    with project.running("txmq_relay") as relay:
        asked = project.run("40", "40", python=TRAFFIC)
        assert asked.returncode == 0, asked.stderr
        rows = json.loads(asked.stdout)
        assert len(rows) == 40
        eventually(lambda: len(found(client)) >= len(rows), "every row has its message", TIMEOUT_S)
        relay.terminate()
        assert relay.wait(TIMEOUT_S) == 0
    sent = found(client)
    assert sorted(sent) == sorted(rows)
    for key in "0123456":
        assert [one for one in sent if one[0] == key] == [one for one in rows if one[0] == key]


STRAY = """
import sys, txmq
from django.db import transaction
with txmq.connect(sys.argv[1]) as client, client.producer() as producer, transaction.atomic():
    producer.send("orders", b"stays")
    producer.send("orders", b"is not told again")
"""


def test_producer_in_atomic_is_told_where_it_stands(
    tmp_path: Path, shared_broker: BrokerProcess, client: txmq.Client, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    program = tmp_path / "stray.py"
    program.write_text(f"import django\ndjango.setup()\n{STRAY}", "utf-8")
    project = Project("sqlite", databases_of("sqlite", tmp_path, mariadb, postgresql))
    said = project.run(str(program), shared_broker.address, python=("-W", "always::RuntimeWarning")).stderr
    assert f"{program}:7: RuntimeWarning: producer.send() in atomic() of database 'default'" in said
    assert said.count("RuntimeWarning") == 1
    assert sorted(found(client)) == ["is not told again", "stays"]


def test_relay_refuses_database_without_tables_or_broker(
    tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    databases = databases_of("sqlite", tmp_path, mariadb, postgresql)
    project = Project("sqlite", databases)
    refused = project.run("txmq_relay", "--database", "archive")
    assert "database 'archive' has no outbox yet: manage.py migrate --database archive" in refused.stderr
    assert refused.returncode == 1
    refused = project.run("txmq_relay", "--bootstrap", "nonsense")
    assert "CommandError: " in refused.stderr
    databases["default"]["NAME"] = ":memory:"
    refused = Project("sqlite", databases).run("txmq_relay")
    assert "database 'default' is in memory" in refused.stderr


def test_relay_waits_for_a_database_and_ends_if_that_refuses(
    tmp_path: Path, shared_broker: BrokerProcess, client: txmq.Client, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    """Found: the command ended while the database was away."""
    databases = databases_of("mysqlclient", tmp_path, mariadb, postgresql)
    there = Project("mysqlclient", databases, shared_broker.address)
    there.ok("migrate", "--run-syncdb", "-v0")
    asked = there.run("0", "1", python=TRAFFIC)
    assert asked.returncode == 0, asked.stderr
    socket, door = databases["default"]["HOST"], tmp_path / "door"
    databases["default"]["HOST"] = str(door)
    with Project("mysqlclient", databases, shared_broker.address).running(
        "txmq_relay", stdout=subprocess.PIPE
    ) as relay:
        assert relay.stdout is not None
        assert b"relay of outbox shop-default" in relay.stdout.readline()
        door.symlink_to(socket)
        eventually(lambda: len(found(client)) == len(json.loads(asked.stdout)), "it goes on", TIMEOUT_S)
        relay.terminate()
        assert relay.wait(TIMEOUT_S) == 0
    databases["default"] |= {"USER": "nobody", "PASSWORD": "geheim"}
    refused = Project("mysqlclient", databases, shared_broker.address).run("txmq_relay")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert line.startswith("CommandError: database 'default': user or password are refused: ")
    assert line.endswith(f"user nobody, database mysqlclient_default, server {door}")
    assert "geheim" not in line
