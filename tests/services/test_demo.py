"""``txmq demo``, whole: it holds, it leaves nothing behind, and it can say no."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from txmq.cli.demo_run import Death, Play


@pytest.mark.timeout(180)
def test_the_demo_holds_and_says_so_to_programs() -> None:
    command = [sys.executable, "-m", "txmq.cli.main", "demo", "--json", "--seed", "7"]
    result = subprocess.run(command, capture_output=True, timeout=120, check=False, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["holds"] is True
    assert report["rows"] == report["messages"] > 100
    assert report["service_kills"] >= 5
    assert report["broker_kills"] >= 5
    assert report["in_doubt_seen"] >= 1
    assert report["in_doubt_left"] == 0


@pytest.mark.timeout(180)
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
