"""Programs with databases at a broker with TLS and users: they work with the grants of docs/how-to/secure.md alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import txmq
from tests.services.xa.xa_owner import resources, transfer
from txmq import Outcome, RolledBackError, Xid
from txmq.addresses import TlsFiles
from txmq.binlog.event_json import read_event
from txmq.client.admin.cluster import Users
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import XACode
from txmq.xa.resolver import Resolver

PASSWORD = "pencil"
WAIT_S = 60.0


class Guarded:
    """A broker that speaks TLS only and has the users ``ops``, an administrator, and ``shop``."""

    def __init__(self, broker: BrokerProcess, files: TlsFiles, folder: Path) -> None:
        self.broker, self._ca = broker, files.ca
        self._secret = folder / "password"
        self._secret.write_text(PASSWORD)
        self._secret.chmod(0o600)
        with txmq.connect(self.of("")) as client:
            client.topics.create("orders")
            Users(client.control, client.timeout).add("ops", PASSWORD)
        with txmq.connect(self.of("ops")) as client:
            Users(client.control, client.timeout).add("shop", PASSWORD)

    def of(self, user: str) -> str:
        words = {"ca": self._ca} | ({"password_file": str(self._secret)} if user else {})
        name = f"{user}@" if user else ""
        return f"txmqs://{name}{self.broker.host}:{self.broker.port}?{urlencode(words)}"

    def grant(self, *, action: str = "grant", user: str = "shop", **words: str) -> None:
        with txmq.connect(self.of("ops")) as client:
            Users(client.control, client.timeout).acl(action, user, words)

    def install(self, resource: Any) -> None:
        """An operator makes the tables; the service gets its uuid."""
        with txmq.connect(self.of("ops")) as client:
            resource.install(client)
        self.grant(may="install,settle", resource=str(resource.uuid))

    def values(self, topic: str = "orders") -> list[bytes | None]:
        with txmq.connect(self.of("ops")) as client:
            return [message.value for message in client.browse(topic)]

    def operations(self, topic: str) -> list[str]:
        """Of a topic of changes: CREATE TABLE is in it, too, once for each partition."""
        return [read_event(value or b"").op for value in self.values(topic)]

    def has_topic(self, name: str) -> bool:
        with txmq.connect(self.of("ops")) as client:
            return name in {topic.name for topic in client.topics.list()}

    def refused(self) -> int:
        with txmq.connect(self.of("ops")) as client:
            text = client.control.call("stats", "json", timeout=60.0)
            return int(json.loads(text)["broker"]["refused"])


@pytest.fixture(scope="module")
def binlog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    with MariaDB(tmp_path_factory.mktemp("binlog"), binary_log=True) as server:
        yield server


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    files = CertificateAuthority(tmp_path / "ca").issue("broker")
    settings = {"tls_certificate": files.cert, "tls_key": files.key}
    with BrokerProcess(tmp_path / "broker", settings=settings) as broker:
        yield Guarded(broker, files, tmp_path)


def test_xa_over_two_databases_needs_both(guarded: Guarded, mariadb: MariaDB) -> None:
    mariadb.execute("DROP TABLE IF EXISTS transfers")
    mariadb.execute("CREATE TABLE transfers (value VARCHAR(20)) ENGINE=InnoDB")
    mariadb.execute("CREATE DATABASE IF NOT EXISTS other")
    mariadb.execute("DROP TABLE IF EXISTS other.transfers")
    mariadb.execute("CREATE TABLE other.transfers (value VARCHAR(20)) ENGINE=InnoDB")
    places = [mariadb.connect_arguments(), {**mariadb.connect_arguments(), "db": "other"}]
    banks = resources(places)
    guarded.grant(may="write", topic="orders")
    guarded.install(banks[0])
    with txmq.connect(guarded.of("ops")) as client:
        banks[1].install(client)
    with txmq.connect(guarded.of("shop")) as client, client.producer() as producer:
        with pytest.raises(RolledBackError, match="--may install --resource") as refused:
            transfer(producer, banks, "refused", "orders")
        assert not refused.value.retriable
        guarded.install(banks[1])
        transfer(producer, banks, "one", "orders").wait_visible(timeout=WAIT_S)
        eventually(lambda: not client.transactions.list(), "nothing is in doubt", WAIT_S)
    assert guarded.values() == [b"one"]
    assert [mariadb.execute(f"SELECT value FROM {name}transfers") for name in ("", "other.")] == [[("one",)]] * 2


def test_resolver_of_its_own_user_fences_the_unknown(
    guarded: Guarded, mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("settled_a", "settled_b")
    for name in names:
        mariadb.make_database_anew(name)
        mariadb.execute(f"CREATE TABLE {name}.transfers (value VARCHAR(20)) ENGINE=InnoDB")
    places = [{**mariadb.connect_arguments(), "db": name} for name in names]
    banks = resources(places)
    guarded.grant(may="write", topic="orders")
    with txmq.connect(guarded.of("ops")) as client:
        Users(client.control, client.timeout).add("settler", PASSWORD)
    for bank in banks:
        guarded.install(bank)
    guarded.grant(user="settler", may="settle", resource=str(banks[0].uuid))
    given = {"address": guarded.of("shop"), "databases": places, "value": "x", "topic": "orders", "timeout": 5.0}
    owner = [sys.executable, "-m", "tests.services.xa.xa_owner", json.dumps(given)]
    monkeypatch.setenv("TXMQ_CRASH", "client.xa.all_prepared:1")
    died = fork_server.run(owner, timeout=WAIT_S)
    monkeypatch.delenv("TXMQ_CRASH")
    assert died.returncode == -9, died.stderr
    assert len(mariadb.execute("XA RECOVER")) == 2
    with txmq.connect(guarded.of("settler")) as client:
        resolver = Resolver(client, banks)
        try:
            eventually(lambda: bool(resolver.run_once()), "the branch of the one database is rolled back", WAIT_S)
            assert len(mariadb.execute("XA RECOVER")) == 1
            assert resolver.run_once() == 0
            guarded.grant(user="settler", may="settle", resource=str(banks[1].uuid))
            eventually(lambda: bool(resolver.run_once()), "that of the other one is, too", WAIT_S)
        finally:
            resolver.close()
    assert mariadb.execute("XA RECOVER") == []
    assert guarded.values() == []


def test_binlog_is_published_and_applied_under_a_user(guarded: Guarded, binlog: MariaDB, tmp_path: Path) -> None:
    binlog.execute("CREATE TABLE orders (id INT PRIMARY KEY, v VARCHAR(20))")
    binlog.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    config = tmp_path / "binlog.toml"
    place = f'host = "127.0.0.1"\nport = {binlog.port}\nuser = "root"\n'
    config.write_text(
        f'name = "s"\nbootstrap = "{guarded.of("shop")}"\n[source]\n{place}tables = ["shop.*"]\nstart = "earliest"\n'
        f'[snapshot]\nmode = "never"\n[apply]\n{place}database = "copy_{{database}}"\nstate_database = "state"\n'
    )
    command = [sys.executable, "-m", "txmq.cli.main", "binlog"]
    refused = fork_server.run([*command, "run", "--config", str(config)], timeout=WAIT_S)
    assert b"txmq acl add shop --may" in refused.stderr
    guarded.grant(may="create,write,read", topic="s.*")
    guarded.grant(may="read", group="binlog-s")
    reader = fork_server.start_logged([*command, "run", "--config", str(config)], tmp_path / "log", os.environ)
    try:
        eventually(lambda: guarded.has_topic("s.shop.orders"), lambda: (tmp_path / "log").read_text(), WAIT_S)
        eventually(lambda: guarded.operations("s.shop.orders").count("c") == 2, "both rows are published", WAIT_S)
    finally:
        reader.kill()
    guarded.grant(action="revoke", may="create,write", topic="s.*")
    guarded.grant(action="revoke", may="read", group="binlog-s")
    guarded.grant(may="read", group="apply-s")
    applied = fork_server.run([*command, "apply", "--config", str(config), "--until-end"], timeout=WAIT_S)
    assert applied.returncode == 0, applied.stderr
    assert binlog.execute("SELECT id, v FROM copy_shop.orders ORDER BY id") == [(1, "a"), (2, "b")]


def test_half_message_is_checked_under_a_user(guarded: Guarded) -> None:
    guarded.grant(may="write", topic="orders")
    guarded.grant(may="read", group="billing")
    with txmq.connect(guarded.of("shop")) as client:
        producer = client.producer(group="billing", checker=lambda _half: txmq.Resolution.COMMIT)
        with pytest.raises(RuntimeError), producer.half("orders", b"one"):
            raise RuntimeError
        eventually(lambda: guarded.values() == [b"one"], "the checker was asked", WAIT_S)
    assert guarded.refused() == 0


def test_external_transaction_manager_works_and_recovers_under_a_user(guarded: Guarded) -> None:
    guarded.grant(may="write", topic="orders")
    names = [Xid(4711, b"g%d" % number, b"b") for number in range(2)]
    with txmq.connect(guarded.of("shop")) as client, client.producer() as producer:
        manager = client.xa_resource()
        for name in names:
            manager.start(name)
            producer.send("orders", name.gtrid)
            manager.end(name)
            assert manager.prepare(name) is XACode.XA_OK
    with txmq.connect(guarded.of("shop")) as client:  # another process of the user's
        manager = client.xa_resource()
        assert sorted(manager.recover(), key=str) == sorted(names, key=str)
        assert manager.commit(names[0]) is XACode.XA_OK
        manager.rollback(names[1])
    assert guarded.values() == [b"g0"]
    assert guarded.refused() == 0


def test_child_of_a_fork_leaves_the_parents_connection_alone(guarded: Guarded) -> None:
    guarded.grant(may="write", topic="orders")
    with txmq.connect(guarded.of("shop")) as client, client.producer() as producer:
        producer.send("orders", b"parent")
        child = os.fork()
        if not child:
            status = 1
            try:
                with client.producer() as own:
                    own.send("orders", b"child")
                client.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        producer.send("orders", b"parent again")
        with producer.transaction() as tx:
            tx.send("orders", b"in a transaction")
        assert tx.outcome is Outcome.COMMITTED
    assert sorted(filter(None, guarded.values())) == [b"child", b"in a transaction", b"parent", b"parent again"]
