"""``txmq demo``, whole: it holds, it leaves neither broker nor files, and it can say no."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import txmq
from txmq.cli.demo.run import Death, Play


def test_demo_holds_and_reports_it_to_programs() -> None:
    command = [sys.executable, "-m", "txmq.cli.main", "demo", "--json", "--seed", "7"]
    result = subprocess.run(command, capture_output=True, timeout=500, check=False, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["holds"] is True
    assert report["rows"] == report["messages"] > 100
    assert report["service_kills"] >= 5
    assert report["broker_kills"] >= 5
    assert report["in_doubt_seen"] >= 1
    assert report["in_doubt_left"] == 0
    assert report["shipments"] == report["handed_over"] >= 1200


def test_the_demo_says_no_when_a_row_vanishes(tmp_path: Path) -> None:
    class Sabotaged(Play):
        def _compare(self, address: str) -> object:  # type: ignore[override]
            with closing(sqlite3.connect(self.database)) as connection, connection:
                connection.execute("DELETE FROM orders WHERE id = (SELECT MIN(id) FROM orders)")
            return super()._compare(address)

    plan = (Death(service=True, broker=True, point=None, text="both"),)
    report = Sabotaged(tmp_path, lambda _: None, random.Random(1)).run(plan)
    assert not report.holds
    assert report.comparison.phantoms == 1


def test_sigterm_leaves_neither_broker_nor_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "txmq.cli.main", "demo"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        said = iter(running.stdout.readline, b"")
        address = next(found[0].decode() for line in said if (found := re.search(rb"txmq://\S+", line)))
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode == 130
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(txmq.errors.ConnectionLostError):
        txmq.connect(address)
