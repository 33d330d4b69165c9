"""The program of docs/how-to/idempotency.md runs as it stands, and books a redriven message once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import txmq
from txmq.client.consumer.retry.dead_letters import Redrive
from txmq.testing.processes.broker import BrokerProcess

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/idempotency.md").read_text("utf-8")
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COUNTED = """print(connection.execute("SELECT COUNT(*) FROM handled").fetchone()[0])
forget(1)
print(connection.execute("SELECT COUNT(*) FROM handled").fetchone()[0])
forget(-1)
print(connection.execute("SELECT COUNT(*) FROM handled").fetchone()[0])
connection.close()
"""


def test_redriven_message_is_booked_once(broker: BrokerProcess, tmp_path: Path) -> None:
    program = PROGRAM
    changes = {"txmq://127.0.0.1:8123": broker.address, "/tmp/shop.db": str(tmp_path / "shop.db")}
    for written, here in changes.items():
        assert written in program
        program = program.replace(written, here)
    assert _printed(program) == ["[('ada', 250)]"]
    with txmq.connect(broker.address) as client:
        options = txmq.ConsumerOptions(retry_delay=0.01)
        with client.consumer("audit", ["amounts"], max_retries=1, options=options) as consumer:
            for _ in range(2):
                (message,) = consumer.poll(timeout=60.0)
                message.reject("no")
        redrive = Redrive(client, "audit")
        assert [one.outcome for one in redrive.redrive(redrive.dead_letters())] == ["sent"]
        assert "connection.close()\n" in program
        assert _printed(program.replace("connection.close()\n", COUNTED)) == ["[('ada', 500)]", "2", "2", "0"]
        assert len(list(client.browse("amounts"))) == 3


def _printed(program: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
