"""The Flask example, run by Flask's own commands, answers as its page says."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

import txmq
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, free_port

ROOT = Path(__file__).resolve().parents[2]
FLASK = [sys.executable, "-m", "flask", "--app", "examples.order_service_flask"]
TIMEOUT_S = 60


def environment(database: Path, address: str) -> dict[str, str]:
    return {**os.environ, "ORDERS_DB": str(database), "TXMQ_BOOTSTRAP": address}


def init_db(database: Path, address: str) -> subprocess.CompletedProcess[str]:
    command, env = [*FLASK, "init-db"], environment(database, address)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@contextmanager
def running(database: Path, address: str) -> Iterator[httpx.Client]:
    """The service, as ``flask run`` starts it."""
    port = free_port()
    command, env = [*FLASK, "run", "--port", str(port)], environment(database, address)
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while "Running on" not in (line := process.stderr.readline()):
                assert line, "flask has ended"
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as web:
                yield web
        finally:
            process.terminate()


def put(web: httpx.Client, number: int, customer: str) -> httpx.Response:
    return web.put(f"/orders/{number}", json={"customer": customer})


def test_each_accepted_order_is_one_row_and_one_message(broker: BrokerProcess, tmp_path: Path) -> None:
    database = tmp_path / "shop.db"
    for _ in range(2):
        assert init_db(database, broker.address).returncode == 0
    with running(database, broker.address) as web:
        first = put(web, 1, "ada")
        assert first.status_code == 201
        assert [put(web, *order).status_code for order in ((2, "ben"), (1, "ada"))] == [201, 409]
        assert web.get(f"/transactions/{first.json()['txid']}").json() == {"outcome": "committed"}
        broker.kill()
        away = put(web, 3, "ada")
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        assert web.get(f"/transactions/{first.json()['txid']}").status_code == 503
        broker.start()
        eventually(lambda: put(web, 3, "ada").status_code in (201, 409), "the service goes on")
    with txmq.connect(broker.address) as client:
        events = [json.loads(message.value or b"") for message in client.browse("orders")]
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT id, customer FROM orders_flask ORDER BY id").fetchall()
    assert rows == [(1, "ada"), (2, "ben"), (3, "ada")]
    assert sorted((event["order"], event["customer"]) for event in events) == rows


def test_service_starts_without_a_broker_and_answers_503(tmp_path: Path) -> None:
    with running(tmp_path / "shop.db", f"txmq://127.0.0.1:{free_port()}") as web:
        assert put(web, 1, "ada").status_code == 503


def test_init_db_says_in_one_line_what_is_away(broker: BrokerProcess, tmp_path: Path) -> None:
    away = init_db(tmp_path / "shop.db", f"txmq://127.0.0.1:{free_port()}")
    wrong = init_db(tmp_path / "missing" / "shop.db", broker.address)
    assert (away.returncode, wrong.returncode) == (1, 1)
    assert away.stderr.startswith("the broker is away: ")
    assert "cannot connect to" in away.stderr
    assert wrong.stderr.startswith("cannot open the database: ")
    assert away.stderr.count("\n") == wrong.stderr.count("\n") == 1
