"""docs/how-to/flask.md, pasted whole, by Flask's commands and gunicorn's forked workers."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import txmq
from tests.examples.pasting import PastedPage
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

AGAIN = """
for number in 43 44; do curl -s -w '%{{http_code}}\\n' -X PUT localhost:{port}/orders/$number \\
    -H 'content-type: application/json' -d '{{"customer": "ben"}}'; done
"""
AWAY = """
kill -9 {pid}
curl -s -o /dev/null -D - -X PUT localhost:{port}/orders/45 \\
    -H 'content-type: application/json' -d '{{"customer": "ben"}}'
curl -s -o /dev/null -w '%{{http_code}}\\n' localhost:{port}/transactions/{txid}
flask --app shop_at_once init-db || echo "status $?"
"""


def messages(broker: BrokerProcess, topic: str = "orders") -> list[tuple[bytes | None, bytes | None]]:
    with txmq.connect(broker.address) as client:
        return sorted((message.key, message.value) for message in client.browse(topic))


def rows(path: Path, table: str) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT number, customer FROM {table} ORDER BY number").fetchall()


def test_service_of_the_page_sends_what_it_commits(tmp_path: Path, broker: BrokerProcess) -> None:
    page = PastedPage("docs/how-to/flask.md", tmp_path, broker)
    page.write()
    begin, go_on, _ = page.blocks("sh")
    twice = AGAIN.format(port=page.ports["8000"]).replace("43 44", "42 43")
    shown = page.run(begin, twice, go_on)
    assert [line for line in shown.splitlines() if line in ("201", "409")] == ["409", "201"]
    assert '{"order":42,"customer":"ada"}' in shown
    assert messages(broker) == [(b"ada", b'{"order":42,"customer":"ada"}'), (b"ben", b'{"order":43,"customer":"ben"}')]
    assert rows(tmp_path / "flask_shop.db", "orders") == [(42, "ada"), (43, "ben")]


def test_last_resource_of_the_page_answers_503_without_broker(tmp_path: Path, broker: BrokerProcess) -> None:
    page = PastedPage("docs/how-to/flask.md", tmp_path, broker)
    page.write()
    (_, _, at_once), port = page.blocks("sh"), page.ports["8001"]
    away = AWAY.format(pid=broker.pid, port=port, txid="0")
    shown = page.run(at_once, AGAIN.format(port=port), away)
    assert [line for line in shown.splitlines() if line in ("201", "409")] == ["409", "201"]
    assert "503" in shown
    assert "retry-after: 1" in shown.lower()
    assert "status 1" in shown
    broker.start()
    orders_db = txmq.LastResource("orders-db", connect=lambda: sqlite3.connect(tmp_path / "flask_at_once.db"))
    with txmq.connect(broker.address) as client:
        client.settle(orders_db)  # what the broker was not told before it died
        eventually(lambda: client.transactions.list() == [], "nothing is in doubt")
    orders_db.close()
    assert messages(broker, "orders-at-once") == [(b"ada", b"43 of ada"), (b"ben", b"44 of ben")]
    assert rows(tmp_path / "flask_at_once.db", "orders_at_once") == [(43, "ada"), (44, "ben")]
