"""``txmq outbox``: a relay as a process of its own, and what operators see and settle."""

from __future__ import annotations

import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import txmq
from txmq.cli.main import app
from txmq.outbox.outbox import Outbox
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

TIMEOUT_S = 60
NAMES = ("orders", "stock")


class Desk:
    """Two databases with an outbox each, a file that names them, and a broker."""

    def __init__(self, folder: Path, broker: BrokerProcess, topic: str) -> None:
        self.folder, self.broker, self.topic = folder, broker, topic
        self.config = folder / "outbox.toml"
        text = f'bootstrap = "{broker.address}"\n'
        for name in NAMES:
            with closing(self.open(name)) as connection:
                Outbox(name).install(connection)
            text += (
                f'[[outbox]]\nname = "{name}"\ndriver = "sqlite3"\nconnect = {{ database = "{folder / name}.db" }}\n'
            )
        self.config.write_text(text)

    def open(self, name: str) -> sqlite3.Connection:
        """A connection to one of the databases."""
        return sqlite3.connect(self.folder / f"{name}.db", timeout=TIMEOUT_S)

    def write(self, name: str, value: bytes, key: bytes | None = None, topic: str = "") -> None:
        """One message, committed."""
        with closing(self.open(name)) as connection:
            Outbox(name).send(connection, topic or self.topic, value, key)
            connection.commit()

    def run(self, *words: str, answer: str = "") -> Result:
        """``txmq outbox`` with these words and the file."""
        return CliRunner().invoke(app, ["outbox", words[0], "--config", str(self.config), *words[1:]], input=answer)

    def told(self, *words: str, status: int = 0) -> Any:
        """What a command says in JSON."""
        found = self.run(*words, "--json")
        assert found.exit_code == status, (found.output, found.exception)
        return json.loads(found.stdout)

    def started(self, **streams: Any) -> subprocess.Popen[bytes]:
        """``txmq outbox run``."""
        line = [sys.executable, "-m", "txmq.cli.main", "outbox", "run", "--config", str(self.config)]
        return subprocess.Popen(line, **streams)

    def seen(self) -> list[bytes]:
        """What readers have."""
        with txmq.connect(self.broker.address) as client:
            return sorted(message.value or b"" for message in client.browse(self.topic))


@pytest.fixture
def desk(shared_broker: BrokerProcess, tmp_path: Path) -> Iterator[Desk]:
    topic = f"t{tmp_path.name.rpartition('-')[2]}"[:100]
    with txmq.connect(shared_broker.address) as client:
        client.topics.create(topic)
        yield Desk(tmp_path, shared_broker, topic)
        client.topics.delete(topic)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_relay_process_serves_all_its_outboxes_until_a_signal(desk: Desk, number: int) -> None:
    desk.write("orders", b"1")
    with desk.started(stderr=subprocess.PIPE) as relay:
        desk.write("stock", b"2")
        eventually(lambda: desk.seen() == [b"1", b"2"], "both databases' messages have arrived", TIMEOUT_S)
        relay.send_signal(number)
        _, said = relay.communicate(timeout=TIMEOUT_S)
    assert relay.returncode == 0, said
    assert all(json.loads(line) for line in said.splitlines())


def test_relay_process_waits_for_broker_and_shows_its_count(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "broker") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("orders")
        broker.stop()
        desk = Desk(tmp_path, broker, "orders")
        desk.write("orders", b"1")
        ours, theirs = pty.openpty()
        with desk.started(stderr=theirs) as relay:
            os.close(theirs)
            shown = b""
            while b"waiting for the broker" not in shown:
                shown += os.read(ours, 4096)
            broker.start()
            while b"orders: 1 sent" not in shown:
                shown += os.read(ours, 4096)
            relay.send_signal(signal.SIGTERM)
            while _read(ours):
                pass
        os.close(ours)
        assert relay.returncode == 0


def test_relay_process_ends_whose_database_refuses_at_its_start(desk: Desk) -> None:
    (desk.folder / "stock.db").unlink()
    with desk.started(stderr=subprocess.PIPE) as relay:
        _, said = relay.communicate(timeout=TIMEOUT_S)
    assert relay.returncode == 2
    [*logged, told] = said.decode().splitlines()
    assert "outbox 'stock': there is no such database" in told
    assert str(desk.folder / "stock.db") in told
    assert [json.loads(line)["level"] for line in logged] == ["warning"]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # its other end is closed
        return b""


def test_run_once_ends_with_what_is_left(desk: Desk) -> None:
    desk.write("orders", b"1")
    assert desk.told("run", "--once") == [
        {"outbox": "orders", "sent": 1, "waiting": 0, "parked": 0, "problem": None},
        {"outbox": "stock", "sent": 0, "waiting": 0, "parked": 0, "problem": None},
    ]
    desk.write("stock", b"2", topic="nowhere")
    assert [(row["sent"], row["parked"]) for row in desk.told("run", "--once", status=1)] == [(0, 0), (0, 1)]
    assert desk.seen() == [b"1"]


def test_status_tells_what_waits_and_what_runs(desk: Desk) -> None:
    desk.write("orders", b"1")
    orders, stock = desk.told("status")
    assert (orders["state"], orders["waiting"], stock["waiting"], stock["oldest_ms"]) == ("no-relay", 1, 0, None)
    assert orders["oldest_ms"] >= 0
    assert len(orders["uuid"]) == 32
    with desk.started() as relay:
        eventually(lambda: desk.seen() == [b"1"], "the relay is at work", TIMEOUT_S)
        eventually(lambda: {row["state"] for row in desk.told("status")} == {"running"}, "both run", TIMEOUT_S)
        relay.send_signal(signal.SIGTERM)
    found = desk.run("status")
    assert [line.split()[:3] for line in found.stdout.strip().splitlines()[1:]] == [
        ["orders", "no-relay", "0"], ["stock", "no-relay", "0"],
    ]  # fmt: skip


def test_status_says_which_side_is_away(desk: Desk) -> None:
    for table in ("txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay"):
        with closing(desk.open("stock")) as connection:
            connection.execute(f"DROP TABLE {table}")
    orders, stock = desk.told("status", "--bootstrap", "txmq://127.0.0.1:1", status=1)
    assert "cannot connect" in orders["problem"]
    assert (orders["waiting"], stock["state"]) == (0, "unreachable")
    assert "install() the outbox once" in stock["problem"]
    (desk.folder / "stock.db").unlink()
    assert "unable to open database file" in desk.told("status", status=1)[1]["problem"]


def test_list_shows_rows_and_both_ends_of_the_line(desk: Desk) -> None:
    desk.write("orders", b"1", b"key", topic="nowhere")
    desk.run("run", "--once")
    desk.write("orders", b"22")
    found = desk.told("list")[0]
    (parked,), (waiting,) = found["parked_rows"], found["waiting_rows"]
    assert (parked["unit"], parked["state"], parked["topic"], parked["key"]) == (1, "parked", "nowhere", "key")
    assert parked["why"] == "its topic does not exist"
    assert (waiting["unit"], waiting["state"], waiting["size_bytes"], waiting["key"]) == (2, "waiting", 2, None)
    assert found["chain"] == found["last"]
    rows, ends = (part.splitlines() for part in desk.run("list").stdout.strip().split("\n\n"))
    assert [line.split()[:4] for line in rows[1:]] == [
        ["orders", "1", "parked", "nowhere"], ["orders", "2", "waiting", desk.topic],
    ]  # fmt: skip
    assert [line.split()[:2] for line in ends[1:4]] == [["orders", "last"], ["orders", "claim"], ["orders", "chain"]]


def test_parked_message_is_released_or_dropped_when_it_was_meant(desk: Desk) -> None:
    for number in (b"1", b"2"):
        desk.write("orders", number, topic="nowhere")
    desk.run("run", "--once")
    for words, said in (
        (("release",), "name what is released"),
        (("release", "1"), "say which: --outbox orders, stock"),
        (("release", "1", "--outbox", "odrers"), "names no outbox 'odrers'"),
        (("release", "7", "--outbox", "orders"), "nothing of that is parked"),
        (("release", "1", "--all", "--outbox", "orders"), "name what is released"),
        (("drop", "7", "--yes", "--outbox", "orders"), "nothing of that is parked"),
    ):
        found = desk.run(*words)
        assert found.exit_code != 0
        assert said in f"{found.output} {found.exception}"
    assert desk.run("drop", "1", "--outbox", "orders", answer="n\n").exit_code == 1
    assert desk.told("status")[0]["parked"] == 2
    assert desk.run("drop", "1", "--outbox", "orders", answer="y\n").exit_code == 0
    assert desk.told("release", "2", "--outbox", "orders") == {"released": 1}
    assert [desk.told("status")[0][name] for name in ("parked", "waiting")] == [0, 1]


def test_line_that_has_stopped_is_adopted(desk: Desk) -> None:
    desk.write("orders", b"1")
    before = (desk.folder / "orders.db").read_bytes()
    desk.run("run", "--once")
    (desk.folder / "orders.db").write_bytes(before)
    desk.write("orders", b"2")
    assert "agree" in desk.run("adopt", "--original", "--outbox", "stock", "--yes").output
    assert "has stopped" in desk.told("run", "--once", status=1)[0]["problem"]
    orders, _ = desk.told("status", status=1)
    assert (orders["state"], orders["waiting"]) == ("stopped", 2)
    assert "txmq outbox adopt" in orders["problem"]
    assert "say which it is" in str(desk.run("adopt", "--outbox", "orders").exception)
    assert desk.run("adopt", "--original", "--outbox", "orders", answer="n\n").exit_code == 1
    assert desk.told("adopt", "--original", "--outbox", "orders", "--yes")["parked"] == 2
    assert desk.told("drop", "1", "--outbox", "orders", "--yes") == {"dropped": 1}
    assert desk.told("release", "--all", "--outbox", "orders") == {"released": 1}
    assert desk.told("run", "--once")[0]["sent"] == 1
    assert desk.seen() == [b"1", b"2"]


def test_outbox_that_is_no_more_is_forgotten(desk: Desk) -> None:
    desk.write("orders", b"1")
    desk.run("run", "--once")
    uuid = desk.told("status")[0]["uuid"]
    at = ("--bootstrap", desk.broker.address)
    refused = CliRunner().invoke(app, ["outbox", "forget", uuid, *at], input="n\n")
    assert refused.exit_code == 1
    assert desk.told("status")[0]["chain"] is not None
    found = CliRunner().invoke(app, ["outbox", "forget", uuid, *at, "--yes", "--json"])
    assert json.loads(found.stdout) == {"uuid": uuid, "forgotten": True}
    assert desk.told("status", status=1)[0]["state"] == "stopped"
