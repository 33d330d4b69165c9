"""The programs in README.md, docs/quickstart.md and the pages on tests and errors run as they stand."""

from __future__ import annotations

import re
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import txmq
from tests.examples.pasting import PastedPage
from txmq.cli.main import app
from txmq.testing.processes.broker import BrokerProcess

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_ADDRESS = "txmq://127.0.0.1:8123"


def _programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def _run(program: str, broker: BrokerProcess, changed: dict[str, str]) -> str:
    text = program
    for written, here in (changed | {DEFAULT_ADDRESS: broker.address}).items():
        assert written in program
        text = text.replace(written, here)
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def _rows(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [customer for (customer,) in connection.execute("SELECT customer FROM orders")]


def test_examples_of_readme_write_a_row_and_message_each(broker: BrokerProcess, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT)")
    database = {"/srv/orders.db": str(tmp_path / "rows.db")}
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        with_outbox, last_resource = _programs("README.md")
        assert _run(with_outbox, broker, database) == "0 0 b'created 42'\n"
        assert _run(last_resource, broker, database) == ""
        assert [message.value for message in client.browse("orders")] == [b"created 42", b"created 43"]
    assert _rows(tmp_path / "rows.db") == ["ada", "ada"]


def test_quickstart_pasted_whole_commits_rows_and_messages(broker: BrokerProcess, tmp_path: Path) -> None:
    page = PastedPage("docs/quickstart.md", tmp_path, broker)
    page.write()
    _, serve, messages, with_outbox, at_once, topics = page.blocks("sh")
    assert page.run(serve, messages).count("three") == 2  # as a line, and as JSON
    (typed,) = re.findall(r"```\n(put .*?)\n```", page.text, re.DOTALL)
    with socket.create_connection(("127.0.0.1", broker.port)) as telnet:
        telnet.sendall(typed.replace("\n", "\r\n").encode())
        assert telnet.recv(100).startswith(b"result 200 ")
    shown = page.run(with_outbox, at_once)
    assert "order 1\n" in shown
    assert "COMMITTED" in shown
    (last,) = [name for name in page.files() if name == "messages.py"]
    program = (tmp_path / last).read_text("utf-8").replace("100_000", "10")
    page.run(topics, f"python - <<'END'\n{program}END\n")
    with txmq.connect(broker.address) as client:
        shown_at = {
            topic: [message.value for message in client.browse(topic)] for topic in ("orders", "payments", "audit")
        }
    assert (shown_at["payments"], shown_at["audit"]) == ([b"42 paid"], [b"ada paid 42"])
    assert len(shown_at["orders"]) == 3 + 1 + 2 + 11
    assert {b"created 1", b"created", b"hello"} < set(shown_at["orders"])
    assert [_rows(tmp_path / name) for name in ("shop.db", "at_once.db")] == [["ada"], ["ada"]]


def test_workers_that_gunicorn_forks_relay_what_they_commit(broker: BrokerProcess, tmp_path: Path) -> None:
    page = PastedPage("docs/how-to/forks.md", tmp_path, broker)
    page.write()
    assert page.run(*page.blocks("sh")).endswith("taken: /42\n")


def test_the_tests_on_the_page_about_testing_pass(tmp_path: Path) -> None:
    (tmp_path / "test_orders.py").write_text(_programs("docs/how-to/testing.md")[0], "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout
    assert "3 passed" in result.stdout


def test_the_function_of_the_error_reference_tells_the_three_endings(broker: BrokerProcess, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(_programs("docs/reference/errors.md")[0], names)
    path = tmp_path / "rows.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (customer TEXT)")
    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("orders")
        shop = txmq.LastResource("shop", connect=lambda: sqlite3.connect(path))
        shop.install(client)
        txid = names["take"](producer, shop)
        assert client.outcome(txid) is txmq.Outcome.COMMITTED
        broker.kill()
        assert names["take"](producer, shop) == "try again"
    assert _rows(path) == ["ada"]


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


class OutboxPage:
    """docs/how-to/outbox.md with a broker: its programs and its file, with a database of the test."""

    page = "docs/how-to/outbox.md"

    def __init__(self, broker: BrokerProcess, folder: Path) -> None:
        self.broker, self.database, self.config = broker, folder / "shop.db", folder / "outbox.toml"
        (text,) = _blocks(self.page, "toml")
        assert "/tmp/shop.db" in text
        self.config.write_text(
            text.replace("/tmp/shop.db", str(self.database)).replace(DEFAULT_ADDRESS, broker.address)
        )

    def run_programs(self) -> str:
        """All of them, one after another, as one program."""
        return _run("".join(_programs(self.page)), self.broker, {"/tmp/shop.db": str(self.database)})

    def run_commands(self, place: int, changed: dict[str, str]) -> list[int]:
        """Those of one block; their statuses."""
        text = _blocks(self.page, "sh")[place]
        for written, here in (changed | {"outbox.toml": str(self.config)}).items():
            assert written in text
            text = text.replace(written, here)
        lines = [line.split()[1:] for line in text.splitlines()]
        return [CliRunner().invoke(app, words, input="y\n").exit_code for words in lines]

    def seen(self) -> list[bytes]:
        """What readers have."""
        with txmq.connect(self.broker.address) as client:
            return sorted(message.value or b"" for message in client.browse("orders"))


def test_what_the_outbox_page_sends_arrives_once_through_a_stop(broker: BrokerProcess, tmp_path: Path) -> None:
    page = OutboxPage(broker, tmp_path)
    assert page.run_programs() == "b'order-1' b'created for ada'\n"
    before = page.database.read_bytes()  # five messages wait in this backup
    assert page.run_commands(0, {"run ": "run --once "}) == [0]
    everything = sorted([b"created for ada", b"now for bob", b"paid", b"packed", b"sent", b"received"])
    assert page.seen() == everything
    assert page.run_commands(1, {}) == [0, 0]
    page.database.write_bytes(before)
    with closing(sqlite3.connect(page.database)) as connection:
        connection.execute(
            "UPDATE txmq_outbox SET value = CAST('new' AS BLOB) WHERE value = CAST('now for bob' AS BLOB)"
        )
        ((unit,),) = connection.execute("SELECT unit FROM txmq_outbox WHERE value = CAST('paid' AS BLOB)")
        ((other,),) = connection.execute("SELECT unit FROM txmq_outbox WHERE value = CAST('sent' AS BLOB)")
        connection.commit()
    assert page.run_commands(0, {"run ": "run --once --timeout 30 "}) == [1]  # the line has stopped
    assert page.run_commands(1, {}) == [1, 0]
    assert page.run_commands(2, {"4711": f"{unit} {other}"}) == [0, 0, 0, 0]
    assert page.run_commands(0, {"run ": "run --once "}) == [0]
    assert page.seen() == sorted([*everything, b"new"])
