"""Every example says in a line that the broker is away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from txmq.testing.processes.broker import free_port
from txmq.testing.processes.mariadb import MariaDB

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 60
# They serve without a broker; test_order_services.py asks them.
SERVERS = {"order_service_fastapi.py", "order_service_flask.py", "order_service_psycopg.py"}
NEEDS_SPARK = {"spark_audit_job.py"}  # begins with a session of Spark's
WITHOUT_DATABASE = {
    "broadcast_cache.py": ["{folder}/prices.db", "{broker}"],
    "consume_process_produce.py": ["a", "b", "{broker}"],
    "half_message.py": ["{folder}/half.db", "1", "{broker}"],
    "log_shipping.py": ["{folder}/log", "{folder}/spool", "{broker}"],
    "order_service_sqlite.py": ["{folder}/orders.db", "1", "{broker}"],
    "priority_by_two_topics.py": ["{broker}"],
    "retrying_consumer.py": ["--bootstrap", "{broker}"],
    "topic_browser.py": ["orders", "", "{broker}"],
}
WITH_DATABASE = {
    "django_last_resource.py": ["{django}", "1", "{broker}"],
    "exactly_once_into_mysql.py": ["{mysql}", "{broker}"],
    "last_resource_mysql.py": ["{mysql}", "1", "{broker}"],
    "sqlalchemy_orders.py": ["{url}", "1", "{broker}"],
    "transfer_xa.py": ["{mysql}", "{mysql}", "1", "{broker}"],
}


def test_every_example_is_asked() -> None:
    asked = {*WITHOUT_DATABASE, *WITH_DATABASE, *SERVERS, *NEEDS_SPARK}
    assert asked == {path.name for path in EXAMPLES.glob("*.py")}


def says_it(program: str, words: list[str], places: dict[str, Any]) -> None:
    filled = [places.get(word, word) for word in words]
    command = [
        sys.executable,
        str(EXAMPLES / program),
        *(word.replace("{folder}", places["folder"]) for word in filled),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("the broker is away: cannot connect to")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("program", WITHOUT_DATABASE)
def test_an_example_says_that_the_broker_is_away(program: str, tmp_path: Path) -> None:
    places = {"folder": str(tmp_path), "{broker}": f"txmq://127.0.0.1:{free_port()}"}
    says_it(program, WITHOUT_DATABASE[program], places)


def test_example_with_a_database_reports_a_broker_that_is_away(mariadb: MariaDB, tmp_path: Path) -> None:
    mariadb.execute("CREATE DATABASE away")
    arguments = mariadb.connect_arguments() | {"db": "away"}
    places = {
        "folder": str(tmp_path),
        "{broker}": f"txmq://127.0.0.1:{free_port()}",
        "{mysql}": json.dumps(arguments),
        "{django}": json.dumps({"USER": arguments["user"], "NAME": "away", "HOST": arguments["unix_socket"]}),
        "{url}": f"mysql+mysqldb://root@/away?unix_socket={arguments['unix_socket']}",
    }
    for program, words in WITH_DATABASE.items():
        says_it(program, words, places)
