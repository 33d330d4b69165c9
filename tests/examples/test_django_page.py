"""docs/how-to/django.md, pasted whole: the project that it makes runs, and so does its second half."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import psycopg

import txmq
from tests.examples.pasting import ROOT, TIMEOUT_S, PastedPage
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.postgresql import PostgreSQL

LAST_RESOURCE = """
from django.test import RequestFactory
from orders.views_last_resource import take
from shop.messages import client, orders_db
orders_db.install(client)
print(take(RequestFactory().post("/"), "ben").status_code)
"""


def test_project_of_the_page_sends_what_it_says(tmp_path: Path, broker: BrokerProcess) -> None:
    page = PastedPage("docs/how-to/django.md", tmp_path, broker)
    assert len(page.files()) == len(page.blocks("python")) - 1
    relay = next(block for block in page.blocks("python") if not block.startswith("# "))
    begin, serve, go_on = page.blocks("sh")
    page.run(begin, serve)
    page.write()
    port = page.ports["8000"]
    shown = page.run(go_on.replace("runserver", f"runserver {port}"))
    assert '{"order":1,"customer":"ada","total":"9.50"}' in shown
    _ship(page)
    recipe = (ROOT / "examples/django_last_resource.py").read_text("utf-8").partition("\ndef main(")[0]
    (tmp_path / "shop/together.py").write_text(recipe, "utf-8")
    for program, said in ((LAST_RESOURCE, "201"), (f"{relay}\nrelay.drain(30)\nprint(relay.stopped)", "None")):
        assert page.run(f"python manage.py shell -v0 -c '{program}'").strip() == said
    with txmq.connect(broker.address) as client:
        assert sorted(message.key or b"" for message in client.browse("orders")) == [b"ada", b"ben"]


def test_last_resource_of_the_page_works_on_postgresql(broker: BrokerProcess, postgresql: PostgreSQL) -> None:
    with psycopg.connect(postgresql.conninfo(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE django_together")
    where = {"NAME": "django_together", "HOST": "127.0.0.1", "PORT": postgresql.port, "USER": "postgres"}
    given = json.dumps(where | {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {"tcp_user_timeout": 30000}})
    command = [sys.executable, str(ROOT / "examples/django_last_resource.py"), given, "3", broker.address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert shown.stdout.endswith("3 orders\n"), shown.stderr
    with psycopg.connect(postgresql.conninfo("django_together")) as connection:
        rows = connection.execute("SELECT id, customer FROM orders_django").fetchall()
    with txmq.connect(broker.address) as client:
        sent = sorted((message.key, message.value) for message in client.browse("orders"))
    assert sent == sorted((customer.encode(), f"created {number}".encode()) for number, customer in rows)


def _ship(page: PastedPage) -> None:
    def total() -> Decimal:
        with closing(sqlite3.connect(page.folder / "db.sqlite3")) as connection:
            return Decimal(str(connection.execute("SELECT SUM(total) FROM orders_order").fetchone()[0]))

    assert total() == Decimal("9.5")
    command = subprocess.Popen([sys.executable, "manage.py", "ship"], cwd=page.folder, env=page.environment())
    try:
        eventually(lambda: total() > 10, "the order has its shipping")
        command.terminate()
        assert command.wait(TIMEOUT_S) == 0
    finally:
        command.kill()
        command.wait()
    assert total() == Decimal("14.4")
