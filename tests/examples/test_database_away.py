"""Each example with a database reports in one line that its database cannot be opened."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq.testing.processes.broker import BrokerProcess, free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 60
COUNT = "1"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        yield broker.address


def refused(program: str, *words: str) -> None:
    command = [sys.executable, str(EXAMPLES / program), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("cannot open the database: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("program", ["half_message.py", "order_service_sqlite.py"])
def test_sqlite_example_with_a_wrong_path(program: str, address: str, tmp_path: Path) -> None:
    refused(program, str(tmp_path / "missing" / "file.db"), COUNT, address)


def test_broadcast_example_with_a_wrong_path(address: str, tmp_path: Path) -> None:
    refused("broadcast_cache.py", str(tmp_path / "missing" / "file.db"), address)


def test_mysql_example_with_a_wrong_port(address: str) -> None:
    wrong = json.dumps({"host": "127.0.0.1", "port": free_port(), "user": "nobody"})
    refused("last_resource_mysql.py", wrong, COUNT, address)
    refused("transfer_xa.py", wrong, wrong, COUNT, address)
    refused("exactly_once_into_mysql.py", wrong, address)


def test_django_example_with_a_wrong_port(address: str) -> None:
    wrong = json.dumps({"HOST": "127.0.0.1", "PORT": free_port(), "NAME": "orders"})
    refused("django_last_resource.py", wrong, COUNT, address)


def test_order_service_of_psycopg_with_a_wrong_port(address: str) -> None:
    refused("order_service_psycopg.py", f"host=127.0.0.1 port={free_port()}", str(free_port()), address)


def test_sqlalchemy_example_with_a_wrong_port_or_url(address: str) -> None:
    refused("sqlalchemy_orders.py", f"mysql+mysqldb://nobody@127.0.0.1:{free_port()}/orders", COUNT, address)
    refused("sqlalchemy_orders.py", "nonsense", COUNT, address)


@pytest.mark.parametrize(
    "program",
    [
        "last_resource_mysql.py", "transfer_xa.py", "exactly_once_into_mysql.py", "django_last_resource.py",
    ],
)  # fmt: skip
def test_example_with_arguments_that_are_no_json(program: str, address: str) -> None:
    count = [] if program == "exactly_once_into_mysql.py" else [COUNT]
    words = ["nonsense"] * (2 if program == "transfer_xa.py" else 1)
    refused(program, *words, *count, address)


def test_example_without_arguments_prints_its_usage() -> None:
    command = [sys.executable, str(EXAMPLES / "transfer_xa.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: ")
