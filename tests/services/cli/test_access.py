"""``txmq user``, ``txmq acl`` and ``txmq quota`` against a real broker, and where their passwords do not show up."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import txmq
from txmq.client.admin.cluster import Users
from txmq.errors import UnauthenticatedError
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess, free_port

TIMEOUT_S = 60.0
PASSWORD = "correct horse"


class Operator:
    """Commands of a user; none has a password on its command line."""

    def __init__(self, broker: BrokerProcess, user: str = "", password: str = PASSWORD) -> None:
        self._address = broker.address.replace("://", f"://{user}@") if user else broker.address
        self._password = password

    def run(self, *words: str, status: int = 0) -> str:
        """The command; its standard output, or its standard error where it fails."""
        command = [sys.executable, "-m", "txmq.cli.main", *words, "--bootstrap", self._address]
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TXMQ_PASSWORD", self._password)
            environment.setenv("TXMQ_NEW_PASSWORD", PASSWORD)
            done = fork_server.run(command, timeout=TIMEOUT_S)
        assert done.returncode == status, done.stderr
        assert PASSWORD.encode() not in done.stdout + done.stderr
        return (done.stderr if status else done.stdout).decode()

    def table(self, *words: str) -> list[list[str]]:
        return [line.split() for line in self.run(*words).splitlines() if line]

    def told(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))


@pytest.fixture
def ops(tmp_path: Path) -> Any:
    with BrokerProcess(tmp_path / "data") as broker:
        Operator(broker).run("user", "add", "ops")
        yield Operator(broker, "ops")


def test_grants_are_added_listed_and_removed(ops: Operator) -> None:
    ops.run("user", "add", "shop")
    for words in (("--may", "read,write", "--topic", "orders*"), ("--may", "read", "--group", "billing")):
        ops.run("acl", "add", "shop", *words)
    ops.run("acl", "add", "shop", "--may", "settle", "--may", "install", "--resource", "*")
    assert ops.table("acl", "list") == [
        ["user", "kind", "name", "may"],
        ["ops", "cluster", "*", "cluster"],
        ["shop", "topic", "orders*", "read,write"],
        ["shop", "group", "billing", "read"],
        ["shop", "resource", "*", "settle,install"],
    ]
    left = ops.told("acl", "remove", "shop", "--may", "write", "--topic", "orders*")
    assert left[0]["grants"][0] == {"may": "read", "kind": "topic", "name": "orders*"}
    ops.run("acl", "add", "shop", "--administrator")
    assert [one["administrator"] for one in ops.told("user", "list")] == [True, True]
    ops.run("acl", "remove", "shop", "--administrator")
    assert "is the last administrator" in ops.run("acl", "remove", "ops", "--administrator", status=1)


REFUSED = [
    (("add", "shop"), 2, "--may WORD,... and one of --topic NAME, --group NAME, --resource UUID, --broker all;"),
    (("add", "shop", "--may", "read", "--topic", "a", "--group", "b"), 2, "one of --topic NAME"),
    (("add", "shop", "--administrator", "--topic", "a"), 2, "give it alone"),
    (("add", "op", "--may", "read", "--topic", "a"), 1, "did you mean 'ops'?"),
    (("add", "ops", "--may", "raed", "--topic", "a"), 1, "a topic has read, write, create"),
    (("add", "ops", "--may", "settle", "--resource", "db"), 1, "a uuid of 32 hex digits, or *"),
    (("list", "op"), 1, "did you mean 'ops'?"),
]


def test_grant_that_cannot_be_is_refused(ops: Operator) -> None:
    for words, status, told in REFUSED:
        assert told in ops.run("acl", *words, status=status)


def test_quotas_are_set_listed_and_removed(ops: Operator) -> None:
    ops.run("quota", "set", "--user", "ops", "--requests-per-s", "100", "--connections-max", "9")
    ops.run("quota", "set", "--topic", "orders", "--bytes-per-s", "1000")
    assert ops.table("quota", "list") == [
        ["kind", "name", "bytes_per_s", "requests_per_s", "connections_max", "unsettled_max"],
        ["user", "ops", "-", "100", "9", "-"],
        ["topic", "orders", "1000", "-", "-", "-"],
    ]
    assert ops.told("quota", "list", "--topic", "orders")[0]["limits"] == {"bytes_per_s": 1000}
    assert ops.told("quota", "remove", "--topic", "orders") == []
    assert "did you mean 'ops'?" in ops.run("quota", "set", "--user", "op", "--unsettled-max", "1", status=1)
    for words in (("set", "--requests-per-s", "1"), ("remove",), ("list", "--user", "a", "--topic", "b")):
        assert "--user NAME or --topic NAME, one of them" in ops.run("quota", *words, status=2)
    assert "no limit is named" in ops.run("quota", "set", "--user", "ops", status=2)


def test_wrong_password_is_told_without_a_password(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        Operator(broker).run("user", "add", "ops")
        assert "user or password is wrong" in Operator(broker, "ops", "guess").run("user", "list", status=1)
        assert "txmq://USER@HOST" in Operator(broker).run("user", "list", status=1)
        broker.stop()
        log, journal = broker.logs(), (tmp_path / "data").rglob("*")
        assert PASSWORD not in log
        assert not any(PASSWORD.encode() in path.read_bytes() for path in journal if path.is_file())


@pytest.mark.parametrize("is_generated", [True, False])
def test_broker_init_makes_an_administrator_and_nobody_else(tmp_path: Path, is_generated: bool) -> None:
    data, listen = str(tmp_path / "data"), f"127.0.0.1:{free_port()}"
    secret = tmp_path / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    words = ["--generate-password"] if is_generated else ["--password-file", str(secret)]
    command = [sys.executable, "-m", "txmq.cli.main", "broker", "init", "--tls-dev", "--listen", listen]
    done = fork_server.run([*command, "--admin", "ops", *words, "--data", data, "--json"], timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert bool(made["password"]) is is_generated
    password = made["password"] or PASSWORD
    settings = {**tomllib.loads(Path(made["config"]).read_text("utf-8")), "handshake_timeout_ms": 1000}
    del settings["data"], settings["listen"]
    file = Path(settings["first_administrator"])
    assert file.stat().st_mode & 0o777 == 0o600
    assert password not in file.read_text("utf-8") + Path(made["config"]).read_text("utf-8")
    with BrokerProcess(data, listen=listen, settings=settings) as broker:
        for start in ("first", "behind a kill", "without the file"):
            with txmq.connect(made["bootstrap"], password=password) as client:
                assert [row["administrator"] for row in Users(client.control, client.timeout).list()] == [True], start
            anonymous = made["bootstrap"].replace("ops@", "")
            with pytest.raises(UnauthenticatedError), txmq.connect(anonymous) as client:
                client.topics.list()
            if start != "first":
                file.unlink(missing_ok=True)
            broker.restart()
        assert password not in broker.logs()


def test_broker_that_lost_its_users_does_not_serve_strangers(tmp_path: Path) -> None:
    missing = {"first_administrator": str(tmp_path / "administrator.json")}
    with pytest.raises(BrokerFailedError, match="No such file"):
        BrokerProcess(tmp_path / "data", settings=missing).start()
