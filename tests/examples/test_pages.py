"""The programs in README.md and docs/quickstart.md run as they stand."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import txmq
from txmq.testing.broker_process import BrokerProcess

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_ADDRESS = "txmq://127.0.0.1:8123"


def _first_program(page: str) -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def _run(program: str, database: str, broker: BrokerProcess, tmp_path: Path) -> str:
    assert database in program
    assert DEFAULT_ADDRESS in program
    text = program.replace(database, str(tmp_path / "rows.db")).replace(DEFAULT_ADDRESS, broker.address)
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def _rows(tmp_path: Path) -> list[str]:
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        return [customer for (customer,) in connection.execute("SELECT customer FROM orders")]


def test_the_example_of_the_readme_writes_one_row_and_one_message(broker: BrokerProcess, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT)")
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
    assert _run(_first_program("README.md"), "/srv/orders.db", broker, tmp_path) == "0 0 b'created 42'\n"
    assert _rows(tmp_path) == ["ada"]


def test_the_program_of_the_quickstart_commits_rows_and_messages(broker: BrokerProcess, tmp_path: Path) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders", partitions=4)
        shown = _run(_first_program("docs/quickstart.md"), "/tmp/shop.db", broker, tmp_path)
        assert "COMMITTED" in shown
        assert [(message.key, message.value) for message in client.browse("orders")] == [(b"ada", b"created")]
    assert _rows(tmp_path) == ["ada"]
