"""The example runs as its text says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import txmq
from txmq.testing.processes.broker import BrokerProcess

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "retrying_consumer.py"


@pytest.mark.parametrize("kind", ["file", "topic"])
def test_payments_wait_for_their_account_and_one_is_given_up(broker: BrokerProcess, tmp_path: Path, kind: str) -> None:
    store = str(tmp_path / "retry.db") if kind == "file" else "topic"
    command = [sys.executable, str(EXAMPLE), "--bootstrap", broker.address, "--retry-store", store]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, text=True)
    assert done.returncode == 0, done.stderr
    booked = [line.removeprefix("booked ") for line in done.stdout.splitlines() if line.startswith("booked")]
    assert [line for line in booked if line.startswith("ann")] == ["ann 1", "ann 2", "ann 3"]
    assert [line for line in booked if line.startswith("bob")] == ["bob 1", "bob 2"]
    assert "given up nobody 1 after 5 times: LookupError('no such account')" in done.stdout
    with txmq.connect(broker.address) as client:
        assert {row["deferred"] for row in client.groups.describe("bank")["partitions"]} == {None}
