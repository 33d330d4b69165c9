"""XA transactions over two real MariaDB servers and a real broker: rows here, rows there, messages, or none of them."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import MySQLdb
import pytest

import txmq
from tests.crash_points import at_moment
from tests.services.loop_client import Connect, inside
from tests.services.xa.xa_owner import resources, transfer
from tests.stopped import until_stopped
from txmq.client.transaction.background_resolver import resolver_of
from txmq.client.transaction.block import Transaction
from txmq.errors import RolledBackError, TopicClosedError
from txmq.runtime.crashpoints import POINTS
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

ROOT = Path(__file__).resolve().parents[3]
OWNER_POINTS = sorted(point for point in POINTS if point.startswith("client.xa."))
BRANCHES_ROLLED_BACK_POINTS = ("client.xa.fenced", "client.xa.rolled_back")  # reached by a decide that is refused
DECIDED_POINTS = tuple(f"client.xa.{name}" for name in ("decided", "committed", "all_committed", "complete_sent"))
EACH_BRANCH = ("client.xa.prepared", "client.xa.committed")  # the second visit is another moment
CLOSED = "transfers.closed"  # decide with a message for it is refused


class Bank:
    """Two servers, a broker, and this process as a client with a resolver."""

    def __init__(self, servers: list[MariaDB], broker: BrokerProcess, connect: Connect) -> None:
        self.servers, self.broker = servers, broker
        self.client = connect(broker.address)
        self.producer = self.client.producer()
        self.resources = resources(self.addresses)
        self.topic = "transfers"
        for resource in self.resources:
            inside(self.client, resource.install)
            inside(self.client, lambda client: resolver_of(client).add(resource))  # noqa: B023  called at once
        self.client.topics.ensure(CLOSED, accept_publish=False)

    @property
    def addresses(self) -> list[dict[str, Any]]:
        """How any process reaches the servers."""
        return [server.connect_arguments() for server in self.servers]

    def clear(self) -> None:
        """Nothing of an earlier test."""
        for server in self.servers:
            server.execute("DELETE FROM transfers")
        if any(topic.name == self.topic for topic in self.client.topics.list()):
            self.client.topics.delete(self.topic)
        self.client.topics.create(self.topic)

    def close(self) -> None:
        """This process ends."""
        self.client.close()
        for resource in self.resources:
            resource.close()

    def transfer(self, value: str, timeout: float = 30.0) -> Transaction:
        """A row in each, and a message."""
        return transfer(self.producer, self.resources, value, self.topic, timeout)

    def rows(self, number: int) -> list[str]:
        """Of one server."""
        return sorted(value for (value,) in self.servers[number].execute("SELECT value FROM transfers"))

    def messages(self) -> list[str]:
        """What readers see, without order."""
        return sorted((message.value or b"").decode() for message in self.client.browse(self.topic))

    def prepared(self) -> int:
        """Branches that XA RECOVER lists."""
        count = 0
        for server in self.servers:
            with closing(server.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
                count += cursor.execute("XA RECOVER")
        return count

    def in_doubt(self) -> int:
        """What the broker lists."""
        body = inside(self.client, lambda client: client.control.call("recover", timeout=60.0))
        return len(json.loads(body)["transactions"])

    def is_resolved(self) -> bool:
        """Nothing is in doubt, here or there."""
        return self.prepared() == 0 and self.in_doubt() == 0

    def check(self, expected: list[str]) -> None:
        """Settled, and rows and messages are these."""
        eventually(self.is_resolved, "nothing is in doubt")
        eventually(lambda: self.messages() == expected, "the messages are those expected")
        assert self.rows(0) == self.rows(1) == expected

    def owner(self, value: str, crash: str, topic: str | None = None, timeout: float = 30.0) -> subprocess.Popen[bytes]:
        """Another process with one transaction, which dies at a point."""
        given = {
            "address": self.broker.address, "databases": self.addresses, "value": value, "topic": topic or self.topic,
            "timeout": timeout,
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.services.xa.xa_owner", json.dumps(given)]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TXMQ_CRASH": crash}, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[MariaDB]]:
    folder: Path = tmp_path_factory.mktemp("bank")
    with MariaDB(folder / "a") as a, MariaDB(folder / "b") as b:
        for server in (a, b):
            server.execute("CREATE TABLE transfers (value VARCHAR(100) PRIMARY KEY) ENGINE=InnoDB")
        yield [a, b]


@pytest.fixture
def bank(servers: list[MariaDB], shared_broker: BrokerProcess, connect: Connect) -> Iterator[Bank]:
    bank = Bank(servers, shared_broker, connect)
    bank.clear()
    yield bank
    bank.close()


def test_rows_in_two_databases_and_messages_of_threads(bank: Bank) -> None:
    values = [f"{number:03}" for number in range(60)]
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(bank.transfer, values))
    assert {tx.outcome for tx in done} == {txmq.Outcome.COMMITTED}
    assert sorted(tx.results[0].offset or 0 for tx in done) == list(range(60))
    bank.check(values)


def test_a_visible_message_implies_readable_rows(bank: Bank) -> None:
    for number in range(20):
        value = f"{number:03}"
        bank.transfer(value)
        offset = number
        assert bank.client.fetch(bank.topic, 0, offset, timeout=60.0)[0].value == value.encode()
        assert [value in bank.rows(place) for place in (0, 1)] == [True, True]


def test_what_the_body_raises_leaves_nothing(bank: Bank) -> None:
    with pytest.raises(ZeroDivisionError), bank.producer.transaction(*bank.resources) as tx:
        tx.connection(bank.resources[0]).cursor().execute("INSERT INTO transfers VALUES ('x')")
        _ = 1 / 0
    assert tx.outcome is txmq.Outcome.ROLLED_BACK
    bank.check([])


def test_a_failed_statement_dooms_both(bank: Bank) -> None:
    bank.transfer("x")
    with pytest.raises(RolledBackError), bank.producer.transaction(*bank.resources) as tx:
        tx.connection(bank.resources[0]).cursor().execute("INSERT INTO transfers VALUES ('y')")
        with pytest.raises(MySQLdb.IntegrityError):
            tx.connection(bank.resources[1]).cursor().execute("INSERT INTO transfers VALUES ('x')")
    bank.check(["x"])


def test_a_refused_decide_rolls_both_back(bank: Bank) -> None:
    with pytest.raises(RolledBackError) as caught:
        transfer(bank.producer, bank.resources, "x", CLOSED)
    assert isinstance(caught.value.__cause__, TopicClosedError)
    bank.check([])


def test_the_callers_own_connections_are_given_back_clean(bank: Bank) -> None:
    opened = [MySQLdb.connect(**arguments) for arguments in bank.addresses]
    used = [resource.using(connection) for resource, connection in zip(bank.resources, opened, strict=True)]
    with bank.producer.transaction(*used) as tx:
        for resource in bank.resources:
            tx.connection(resource).cursor().execute("INSERT INTO transfers VALUES ('x')")
        bank.producer.send(bank.topic, b"x")
    for connection in opened:
        cursor = connection.cursor()
        cursor.execute("SELECT value FROM transfers")
        assert cursor.fetchall() == (("x",),)
        connection.close()
    bank.check(["x"])


@pytest.mark.threads  # a loop is not forked
def test_a_forked_child_has_connections_of_its_own(bank: Bank) -> None:
    bank.transfer("1-parent")
    eventually(bank.is_resolved, "nothing is in doubt")  # the resolver has its connections
    child = os.fork()
    if child == 0:
        status = 1
        try:
            tx = bank.transfer("2-child")
            bank.client.close()
            status = 0 if tx.outcome is txmq.Outcome.COMMITTED else 2
        finally:
            os._exit(status)
    bank.transfer("3-parent")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    bank.transfer("4-parent")
    bank.check(["1-parent", "2-child", "3-parent", "4-parent"])


# --- a database dies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_server_killed_between_prepare_and_decide_commits_on_its_return(bank: Bank, number: int) -> None:
    with at_moment("client.xa.all_prepared", bank.servers[number].kill):
        tx = bank.transfer("x")
    assert (tx.outcome, tx.pending) == (txmq.Outcome.COMMITTED, (bank.resources[number].name,))
    assert bank.messages() == [], "a visible message implies readable rows"
    bank.servers[number].start()
    bank.check(["x"])
    eventually(lambda: tx.pending == (), "both branches are complete")


@pytest.mark.parametrize("number", [0, 1])
def test_server_that_dies_behind_decision_commits_when_it_is_back(bank: Bank, number: int) -> None:
    with at_moment("client.xa.decided", bank.servers[number].kill):
        tx = bank.transfer("x")
    assert tx.pending == (bank.resources[number].name,)
    bank.servers[number].start()
    bank.check(["x"])


def test_a_server_that_dies_before_it_prepares_rolls_back(bank: Bank) -> None:
    with pytest.raises(RolledBackError), at_moment("client.xa.body_done", bank.servers[1].kill):
        bank.transfer("x")
    bank.servers[1].start()
    bank.check([])


def test_both_servers_and_the_broker_die_behind_the_decision(bank: Bank) -> None:
    def all_die() -> None:
        bank.broker.kill()
        for server in bank.servers:
            server.kill()

    with at_moment("client.xa.decided", all_die):
        tx = bank.transfer("x")
    assert tx.outcome is txmq.Outcome.COMMITTED
    bank.broker.start()
    for server in bank.servers:
        server.start()
    bank.check(["x"])


def test_broker_killed_before_the_answer_to_decide_decides_on_return(bank: Bank) -> None:
    def restart() -> None:
        bank.broker.kill()
        bank.broker.start()

    with at_moment("client.xa.decide_sent", restart):
        tx = bank.transfer("x")
    assert tx.results[0].offset == 0
    bank.check(["x"])


# --- the owner dies --------------------------------------------------------------------------------------------------


@pytest.mark.threads  # owners are processes of their own
def test_owners_killed_at_every_point_are_settled_by_another_process(bank: Bank) -> None:
    owners = {}
    for value in [f"{point}:{nth}" for point in OWNER_POINTS for nth in ((1, 2) if point in EACH_BRANCH else (1,))]:
        topic = CLOSED if value.partition(":")[0] in BRANCHES_ROLLED_BACK_POINTS else None
        owners[value] = bank.owner(value, value, topic)
    for value, owner in owners.items():
        _, said = owner.communicate(timeout=60)
        assert owner.returncode == -signal.SIGKILL, f"{value}: {said.decode()}"
    eventually(bank.is_resolved, "nothing is in doubt")
    seen = bank.messages()
    assert bank.rows(0) == bank.rows(1) == seen
    for value in owners:
        point = value.partition(":")[0]
        if point != "client.xa.decide_sent":
            assert (value in seen) is (point in DECIDED_POINTS), value


@pytest.mark.threads  # owners are processes of their own
def test_stopped_owner_of_prepared_branches_is_ended_and_learns_it(bank: Bank) -> None:
    """Its sessions live, so its branches are not known to others, and listed: the resolver ends the sessions."""
    owner = bank.owner("x", "client.xa.all_prepared:1:stop", timeout=8.0)
    until_stopped(owner.pid)
    eventually(bank.is_resolved, "nothing is in doubt")
    os.kill(owner.pid, signal.SIGCONT)
    _, said = owner.communicate(timeout=60)
    assert owner.returncode == 1
    assert "RolledBackError" in said.decode() or "TransactionTimeoutError" in said.decode()
    bank.check([])


@pytest.mark.threads  # owners are processes of their own
def test_an_owner_that_stops_behind_the_decision_finds_it_finished(bank: Bank) -> None:
    owner = bank.owner("x", "client.xa.decided:1:stop", timeout=8.0)
    until_stopped(owner.pid)
    eventually(lambda: bank.messages() == ["x"], "the message is visible")
    os.kill(owner.pid, signal.SIGCONT)
    _, said = owner.communicate(timeout=60)
    assert owner.returncode == 0, said.decode()
    bank.check(["x"])
