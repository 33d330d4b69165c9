"""The example runs as its text says."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import txmq
from txmq.testing.processes.broker import BrokerProcess

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "order_service_sqlite.py"


def test_the_order_service_writes_each_row_with_its_message(broker: BrokerProcess, tmp_path: Path) -> None:
    database = tmp_path / "orders.db"
    for _ in range(2):
        command = [sys.executable, str(EXAMPLE), str(database), "10", broker.address]
        result = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("order ") == 10
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT id, customer FROM orders ORDER BY id").fetchall()
    with txmq.connect(broker.address) as client:
        sent = [(message.value, message.key) for message in client.browse("orders")]
    assert len(rows) == 20
    assert sorted(sent) == sorted((f"created {number}".encode(), customer.encode()) for number, customer in rows)
