"""Programs other than the plain client at a broker with users: each logs in, also after a kill, with its grants."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

import txmq
import txmq.aio
from tests.logged import said
from tests.services.consumer.retrying import NOW
from txmq.client.admin.cluster import Users
from txmq.client.transaction.conversation import Conversation
from txmq.errors import TransactionConflictError, UnauthenticatedError
from txmq.protocol.transaction_bodies import encode_branch
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource

PASSWORD = "pencil"
SELECTOR = txmq.KeyHashSelector()
OWNER = """
import sqlite3, sys, txmq
from txmq.xa import LastResource
resource = LastResource("shop", connect=lambda: sqlite3.connect(sys.argv[2], check_same_thread=False))
with txmq.connect(sys.argv[1]) as client, client.producer().transaction(resource) as tx:
    tx.connection(resource).execute("INSERT INTO orders VALUES (1)")
    tx.send("orders", b"one")
"""


class Guarded:
    """A broker with an administrator, and a user ``shop`` whose password is in a file."""

    def __init__(self, broker: BrokerProcess, folder: Path) -> None:
        self.broker = broker
        secret = folder / "shop.password"
        secret.write_text(PASSWORD)
        secret.chmod(0o600)
        with txmq.connect(broker.address) as client:
            Users(client.control, client.timeout).add("ops", PASSWORD)
        with self.operator() as client:
            client.topics.create("orders", partitions=2)
            Users(client.control, client.timeout).add("shop", PASSWORD)
        self.address = f"{self.of('shop')}?password_file={secret}"

    def of(self, user: str) -> str:
        return self.broker.address.replace("://", f"://{user}@")

    def operator(self) -> txmq.Client:
        return txmq.connect(self.of("ops"), password=PASSWORD)

    def grant(self, **words: str) -> None:
        with self.operator() as client:
            Users(client.control, client.timeout).acl("grant", "shop", words)

    def values(self) -> list[bytes | None]:
        with self.operator() as client:
            return [message.value for message in client.browse("orders")]


@pytest.fixture
def guarded(broker: BrokerProcess, tmp_path: Path) -> Guarded:
    return Guarded(broker, tmp_path)


def test_ordered_producer_logs_in_again_and_drains_its_spool(guarded: Guarded, tmp_path: Path) -> None:
    guarded.grant(may="write,read", topic="orders")
    spool, options = str(tmp_path / "spool"), txmq.OrderedOptions(timeout=30.0)
    with (
        txmq.connect(guarded.address) as client,
        client.ordered_producer(SELECTOR, spool, options=options) as producer,
    ):
        producer.send("orders", b"0", key=b"k")
        guarded.broker.kill()
        for number in (b"1", b"2"):
            assert producer.send("orders", number, key=b"k").status is txmq.SendStatus.SPOOLED
        guarded.broker.start()
        eventually(lambda: guarded.values() == [b"0", b"1", b"2"], "the spool is drained")


def test_spool_that_lacks_a_grant_says_which(
    guarded: Guarded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool, options = str(tmp_path / "spool"), txmq.OrderedOptions(timeout=2.0, partitions={"orders": 2})
    lines: list[str] = []

    def says(text: str) -> bool:
        lines.extend(f"{line['event']}: {line.get('error')}" for line in said(caplog))
        return any(text in line for line in lines)

    guarded.broker.kill()
    with (
        txmq.connect(guarded.address, lazy=True) as client,
        client.ordered_producer(SELECTOR, spool, options=options) as producer,
    ):
        assert producer.send("orders", b"0", key=b"k").status is txmq.SendStatus.SPOOLED
        eventually(lambda: says("cannot be drained yet"), "the broker is away")
        guarded.broker.start()
        eventually(lambda: says("before its user has a grant"), lambda: "\n".join(lines))
        assert any("txmq acl add shop --may" in line for line in lines)
        guarded.grant(may="write,read", topic="orders")
        eventually(lambda: guarded.values() == [b"0"], "the spool is drained")


def test_retry_store_keeps_and_delivers_under_a_user(guarded: Guarded, tmp_path: Path) -> None:
    guarded.grant(may="write,read", topic="orders")
    guarded.grant(may="read", group="billing")
    failures = [RuntimeError("once"), RuntimeError("and once more")]
    taken: list[bytes | None] = []

    def take(message: txmq.Message) -> None:
        if failures:
            raise failures.pop()
        taken.append(message.value)

    with txmq.connect(guarded.address) as client:
        client.producer().send("orders", b"bad")
        store = str(tmp_path / "retry")
        consumer = client.consumer(
            "billing", ["orders"], start="earliest", max_retries=1, retry_store=store, options=NOW
        )
        thread = threading.Thread(target=lambda: consumer.run(take))
        thread.start()
        try:
            eventually(lambda: taken == [b"bad"], "it is delivered again")
        finally:
            consumer.close()
            thread.join()


def test_client_on_an_event_loop_logs_in_again(guarded: Guarded) -> None:
    guarded.grant(may="write,read", topic="orders")

    async def played() -> None:
        async with await txmq.aio.connect(guarded.address) as client, client.producer(timeout=30.0) as producer:
            await producer.send("orders", b"one")
            await asyncio.to_thread(guarded.broker.restart)
            await producer.send("orders", b"two")

    asyncio.run(played())
    assert sorted(filter(None, guarded.values())) == [b"one", b"two"]


def test_resolver_settles_with_settle_alone(guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE orders (value BLOB)")
    resource = LastResource("shop", connect=lambda: sqlite3.connect(path, check_same_thread=False))
    with guarded.operator() as client:
        resource.install(client)
        Users(client.control, client.timeout).add("settler", PASSWORD)
        Users(client.control, client.timeout).acl("grant", "settler", {"may": "settle", "resource": "*"})
    monkeypatch.setenv("TXMQ_PASSWORD", PASSWORD)
    monkeypatch.setenv("TXMQ_CRASH", "client.tx.prepared:1")
    dead = subprocess.run([sys.executable, "-c", OWNER, guarded.of("ops"), str(path)], check=False, timeout=60)
    assert dead.returncode == -9
    monkeypatch.delenv("TXMQ_CRASH")
    config = tmp_path / "resolver.toml"
    config.write_text(
        f'bootstrap = "{guarded.of("settler")}"\n[[resource]]\nname = "shop"\ndriver = "sqlite3"\n'
        f'connect = {{ database = "{path}" }}\n'
    )
    command = [sys.executable, "-m", "txmq.cli.main", "resolver", "--config", str(config), "--once"]

    def settled() -> bool:
        done = fork_server.run(command, timeout=60)
        assert PASSWORD.encode() not in done.stdout + done.stderr
        with guarded.operator() as client:
            return done.returncode == 0 and not client.transactions.list("in-doubt")

    eventually(settled, "the resolver has settled it")
    assert guarded.values() == []


def test_resolver_removes_old_markers_of_another_user(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE orders (value BLOB)")
    resource = LastResource("shop", connect=lambda: sqlite3.connect(path, check_same_thread=False))
    guarded.grant(may="write", topic="orders")
    with guarded.operator() as client:
        resource.install(client)
        users = Users(client.control, client.timeout)
        users.add("settler", PASSWORD)
        for user, may in (("shop", "install,settle"), ("settler", "settle")):
            users.acl("grant", user, {"may": may, "resource": str(resource.uuid)})
    monkeypatch.setenv("TXMQ_CRASH", "client.tx.committed:1")
    dead = subprocess.run([sys.executable, "-c", OWNER, guarded.address, str(path)], check=False, timeout=60)
    assert dead.returncode == -9
    monkeypatch.delenv("TXMQ_CRASH")
    assert guarded.values() == [b"one"]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE txmq_marker SET written_ms = written_ms - 3600000")
    monkeypatch.setenv("TXMQ_PASSWORD", PASSWORD)
    config = tmp_path / "resolver.toml"
    config.write_text(
        f'bootstrap = "{guarded.of("settler")}"\n[[resource]]\nname = "shop"\ndriver = "sqlite3"\n'
        f'connect = {{ database = "{path}" }}\n'
    )
    command = [sys.executable, "-m", "txmq.cli.main", "resolver", "--config", str(config), "--once"]
    done = fork_server.run(command, timeout=60)
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT txid FROM txmq_marker").fetchall() == []
    assert '"event": "refused"' not in guarded.broker.logs()


def test_user_who_settles_fences_for_one_database(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    uuid, other = "0123456789abcdef" * 2, "fedcba9876543210" * 2
    guarded.grant(may="write", topic="orders")
    guarded.grant(may="install", resource="*")
    with guarded.operator() as client:
        users = Users(client.control, client.timeout)
        users.add("settler", PASSWORD)
        users.acl("grant", "settler", {"may": "settle", "resource": uuid})
    monkeypatch.setenv("TXMQ_PASSWORD", PASSWORD)

    def fenced(*words: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "txmq.cli.main", "tx", "fence", txid, "--bootstrap", guarded.of("settler")]
        return fork_server.run([*command, *words], timeout=60)

    def decide(database: str) -> None:
        details = {"bqual": f"{database}.1.2", "connection": 1, "wrote": True, "marker": True, "table": "txmq_marker"}
        branch = encode_branch("a", database, details)
        shop.control.call("decide", txid, extensions={"branches": 1}, body=[branch], timeout=60.0)

    with txmq.connect(guarded.address) as shop:
        home = Conversation(shop.routes.any_link(), shop.clock, 30.0)
        home.begin()
        txid = home.txid
        assert b"who may settle for a database adds --resource" in fenced().stderr
        assert b"txmq acl add settler --may settle --resource " + other.encode() in fenced("--resource", other).stderr
        assert b"no databases of that name" in fenced("--resource", "bank").stderr
        said = fenced("--resource", uuid)
        assert (said.returncode, said.stderr.decode()) == (0, f"transaction {txid} in {uuid}: rolled-back\n")
        with pytest.raises(TransactionConflictError):
            decide(uuid)
        decide(other)  # of which it was no fence


def test_changed_password_leaves_connections_and_is_read_again(guarded: Guarded, tmp_path: Path) -> None:
    guarded.grant(may="write,read", topic="orders")
    with txmq.connect(guarded.address) as client, client.producer(timeout=30.0) as producer:
        producer.send("orders", b"before")
        with guarded.operator() as operator:
            Users(operator.control, operator.timeout).passwd("shop", "crayon")
        producer.send("orders", b"on a connection that was there")
        with pytest.raises(UnauthenticatedError):
            txmq.connect(guarded.of("shop"), password=PASSWORD)
        (tmp_path / "shop.password").write_text("crayon")
        guarded.broker.restart()
        producer.send("orders", b"on another one")
    assert len(guarded.values()) == 3
