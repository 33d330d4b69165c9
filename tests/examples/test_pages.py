"""The programs in README.md, docs/quickstart.md and the pages on tests and errors run as they stand."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import txmq
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


def _rows(tmp_path: Path) -> list[str]:
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        return [customer for (customer,) in connection.execute("SELECT customer FROM orders")]


def test_example_of_readme_writes_one_row_and_one_message(broker: BrokerProcess, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT)")
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
    assert (
        _run(_programs("README.md")[0], broker, {"/srv/orders.db": str(tmp_path / "rows.db")}) == "0 0 b'created 42'\n"
    )
    assert _rows(tmp_path) == ["ada"]


def test_the_program_of_the_quickstart_commits_rows_and_messages(broker: BrokerProcess, tmp_path: Path) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders", partitions=4)
        shown = _run(_programs("docs/quickstart.md")[0], broker, {"/tmp/shop.db": str(tmp_path / "rows.db")})
        assert "COMMITTED" in shown
        assert [(message.key, message.value) for message in client.browse("orders")] == [(b"ada", b"created")]
    assert _rows(tmp_path) == ["ada"]


def test_last_program_of_quickstart_needs_nothing_of_those_before_it(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        for topic in ("orders", "payments", "audit"):
            client.topics.create(topic)
        _run(_programs("docs/quickstart.md")[-1], broker, {"100_000": "10"})
        shown = [(message.topic, message.value) for topic in ("payments", "audit") for message in client.browse(topic)]
        assert shown == [("payments", b"42 paid"), ("audit", b"ada paid 42")]
        assert len(list(client.browse("orders"))) == 11


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
    assert _rows(tmp_path) == ["ada"]
