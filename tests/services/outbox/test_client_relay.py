"""``client.relay``: over each driver, at each isolation level, closed, forked; what it says of messages that wait.

What becomes of messages when processes die: ``test_relay.py``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.logged import said
from txmq.client.relay.database_side import RelayDatabase
from txmq.errors import ClosedError, ConfigError, OutboxStoppedError, RequestTimeoutError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database.dbapi import run

from .databases import KINDS, Connect, connector

TABLES = ("txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay")
LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
SESSION_AT: dict[str, str] = {
    "mysqlclient": "SET SESSION TRANSACTION ISOLATION LEVEL {}",
    "psycopg": "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {}",
}
DRAIN_S = 60.0


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    with txmq.connect(shared_broker.address) as client:
        yield client


@pytest.fixture
def topic(client: txmq.Client, request: pytest.FixtureRequest) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    client.topics.create(name)
    return name


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Connections, closed with the test."""
    found = list[Any]()
    yield found
    for connection in found:
        connection.close()


def installed(connect: Connect, opened: list[Any]) -> tuple[txmq.Outbox, Any]:
    """An empty outbox, and a connection to its database."""
    connection, outbox = connect(), txmq.Outbox("orders-db")
    opened.append(connection)
    for table in TABLES:
        run(connection, f"DROP TABLE IF EXISTS {table}")
    connection.commit()
    outbox.install(connection)
    return outbox, connection


@pytest.fixture
def sqlite(tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Connect:
    return connector("sqlite", tmp_path, mariadb, postgresql)


def values(client: txmq.Client, topic: str) -> list[bytes | None]:
    return [message.value for message in client.browse(topic)]


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_over_each_driver(
    kind: str, client: txmq.Client, topic: str, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL,
    opened: list[Any],
) -> None:  # fmt: skip
    connect = connector(kind, tmp_path, mariadb, postgresql)
    outbox, connection = installed(connect, opened)
    with client.relay(outbox, connect=connect) as relay:
        for number in range(4):
            with outbox.transaction(connection) as tx:
                tx.send(topic, b"%d" % number, b"k")
            relay.drain(DRAIN_S)
    assert values(client, topic) == [b"0", b"1", b"2", b"3"]
    other = connect()
    assert run(other, "SELECT COUNT(*) FROM txmq_outbox")[0] == [(0,)]
    other.close()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", sorted(SESSION_AT))
def test_messages_of_each_isolation_level_arrive(
    kind: str, level: str, client: txmq.Client, topic: str, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL,
    opened: list[Any],
) -> None:  # fmt: skip
    connect = connector(kind, tmp_path, mariadb, postgresql)
    outbox, _ = installed(connect, opened)

    def at_level() -> Any:
        found = connect()
        run(found, SESSION_AT[kind].format(level))
        if kind == "mysqlclient":
            run(found, "SET SESSION innodb_lock_wait_timeout = 1")
        found.commit()
        return found

    opened += [at_level(), at_level()]
    with client.relay(outbox, connect=at_level) as relay:
        for number in range(10):
            one, other = opened[1:]
            outbox.send(one, topic, b"%d" % (2 * number), b"one")
            outbox._looked = float("-inf")  # another process's would look as well
            outbox.send(other, topic, b"%d" % (2 * number + 1), b"other")
            other.commit()
            one.rollback() if number == 5 else one.commit()
            relay.wake()
        relay.drain(DRAIN_S)
    assert {int(value or b"") for value in values(client, topic)} == set(range(20)) - {10}
    assert len(values(client, topic)) == 19


def test_client_that_closes_leaves_the_line_to_the_next(
    client: txmq.Client, topic: str, shared_broker: BrokerProcess, sqlite: Connect, opened: list[Any]
) -> None:
    outbox, connection = installed(sqlite, opened)
    with txmq.connect(shared_broker.address) as first:
        relay = first.relay(outbox, connect=sqlite)
        with outbox.transaction(connection) as tx:
            tx.send(topic, b"one")
        relay.drain(DRAIN_S)
    with pytest.raises(ClosedError):
        relay.drain(DRAIN_S)
    relay.close()
    relay.close()
    assert run(connection, "SELECT until_ms FROM txmq_outbox_relay")[0] == [(0,)]
    connection.rollback()
    with pytest.raises(ClosedError):
        first.relay(outbox, connect=sqlite)
    with outbox.transaction(connection) as tx:
        tx.send(topic, b"two")
    with client.relay(outbox, connect=sqlite) as relay:
        relay.drain(DRAIN_S)
    assert values(client, topic) == [b"one", b"two"]


def test_client_that_closes_takes_no_more_relays(
    shared_broker: BrokerProcess, sqlite: Connect, opened: list[Any]
) -> None:
    outbox, _ = installed(sqlite, opened)
    reached, free = threading.Event(), threading.Event()

    def slow() -> Any:
        reached.set()
        free.wait(DRAIN_S)
        return sqlite()

    client = txmq.connect(shared_broker.address)
    first = client.relay(outbox, connect=slow)
    assert reached.wait(DRAIN_S)
    closing = threading.Thread(target=client.close)
    closing.start()
    try:
        eventually(lambda: first._is_ending, "the client closes")
        with pytest.raises(ClosedError, match="closes"):
            client.relay(outbox, connect=sqlite)
    finally:
        free.set()
        closing.join()


def test_relay_of_forked_child_is_over_the_parents_goes_on(
    client: txmq.Client, topic: str, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL, opened: list[Any]
) -> None:
    connect = connector("mysqlclient", tmp_path, mariadb, postgresql)
    outbox, connection = installed(connect, opened)
    with client.relay(outbox, connect=connect) as relay:
        session = _session(relay)
        child = os.fork()
        if child == 0:
            try:
                relay.drain(DRAIN_S)
            except ClosedError:
                relay._database.close()  # as the interpreter does at its end
                client.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with outbox.transaction(connection) as tx:
            tx.send(topic, b"parent's")
        relay.drain(DRAIN_S)
        assert _session(relay) is session
    assert values(client, topic) == [b"parent's"]


def _session(relay: Any) -> Any:
    eventually(lambda: relay._database._session is not None, "the relay has a connection")
    return relay._database._session


def test_messages_that_wait_too_long_are_told_with_the_reason(
    topic: str, broker: BrokerProcess, sqlite: Connect, opened: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    outbox, connection = installed(sqlite, opened)
    with txmq.connect(broker.address) as client, client.relay(outbox, connect=sqlite) as relay:
        relay.drain(DRAIN_S)
        broker.kill()
        outbox.send(connection, topic, b"waits")
        run(connection, "UPDATE txmq_outbox SET created_ms = created_ms - 90000")
        connection.commit()
        eventually(lambda: relay.backlog is not None and relay.backlog.waiting == 1, "the relay has looked")
        assert relay.backlog is not None
        assert (relay.backlog.oldest_ms or 0) >= 90_000
        lines: dict[str, dict[str, Any]] = {}

        def are_told() -> bool:
            lines.update((line["event"], line) for line in reversed(said(caplog)))
            return lines.keys() >= {"outbox: messages wait", "outbox's broker away"}

        eventually(are_told, "the relay says that the broker is away, and that messages wait")
        told = lines["outbox: messages wait"]
        assert (told["level"], told["waiting"], told["oldest_s"] >= 90) == ("warning", 1, True)
        assert told["reason"]
        with pytest.raises(RequestTimeoutError, match=r"still wait after .* s; the broker: "):
            relay.drain(0.01)


def test_relay_that_stops_says_so_and_why(
    client: txmq.Client, topic: str, sqlite: Connect, opened: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    outbox, connection = installed(sqlite, opened)
    with client.relay(outbox, connect=sqlite) as relay:
        outbox.send(connection, topic, b"one")
        connection.commit()
        relay.drain(DRAIN_S)
    run(connection, "UPDATE txmq_outbox_relay SET last = NULL, claim = NULL")
    outbox.send(connection, topic, b"two")
    connection.commit()
    with client.relay(outbox, connect=sqlite) as relay, pytest.raises(OutboxStoppedError):
        relay.drain(DRAIN_S)
    (stopped,) = [line for line in said(caplog) if line["level"] == "error"]
    assert stopped["event"] == "outbox stopped"
    assert "an operator says which one is right" in stopped["reason"] == relay.stopped


def test_relay_is_refused_what_is_none(client: txmq.Client, sqlite: Connect) -> None:
    outbox: Any
    for outbox, connect, expected in (("orders-db", sqlite, "txmq.Outbox"), (txmq.Outbox(), "shop.db", "a function")):
        with pytest.raises(ConfigError, match=expected):
            client.relay(outbox, connect=connect)  # type: ignore[arg-type]


def test_commit_of_a_transaction_wakes_relays(topic: str, sqlite: Connect, opened: list[Any]) -> None:
    outbox, connection = installed(sqlite, opened)
    woken = list[str]()

    def wake() -> None:
        woken.append("woken")

    outbox.add_relay(wake)
    with outbox.transaction(connection) as tx:
        tx.send(topic, b"one")
        assert woken == []
    assert woken == ["woken"]
    with outbox.transaction(connection):
        pass
    outbox.remove_relay(wake)
    with outbox.transaction(connection) as tx:
        tx.send(topic, b"two")
    assert woken == ["woken"]


def test_idle_relay_looks_and_seldom_locks(
    client: txmq.Client, topic: str, opened: list[Any], sqlite: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock costs PostgreSQL a transaction id, four million a day, and makes writers of SQLite wait."""
    outbox, _ = installed(sqlite, opened)
    calls = Counter[str]()

    def counted(name: str) -> None:
        work = getattr(RelayDatabase, name)

        def call(self: RelayDatabase) -> Any:
            calls[name] += 1
            return work(self)

        monkeypatch.setattr(RelayDatabase, name, call)

    counted("lock")
    counted("nothing_waits")
    with client.relay(outbox, connect=sqlite) as relay:
        relay.drain(DRAIN_S)
        calls.clear()
        begun = time.monotonic()
        eventually(lambda: calls["nothing_waits"] >= 20, "it looks")
        assert calls["lock"] <= 2 + (time.monotonic() - begun)  # a turn a second
