"""The Django recipe, as Django's users meet it: a project of its own, run by Django's test runner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200
CASES = Path(__file__).with_name("django_shop") / "cases.py"


@pytest.fixture(params=["sqlite", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """An entry of DATABASES."""
    if request.param == "sqlite":
        file = str(tmp_path / "shop.db")
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": file, "TEST": {"NAME": file + ".test"}}
    server: MariaDB = request.getfixturevalue("mariadb")
    given = server.connect_arguments()
    return {"ENGINE": "django.db.backends.mysql", "USER": given["user"], "NAME": "shop", "HOST": given["unix_socket"]}


def test_commits_rollbacks_hooks_requests_and_test_cases(broker: BrokerProcess, database: dict[str, Any]) -> None:
    env = {
        **os.environ,
        "SHOP_DATABASE": json.dumps(database),
        "SHOP_BROKER": broker.address,
        "DJANGO_SETTINGS_MODULE": "tests.examples.django_shop.settings",
    }
    command = [
        sys.executable,
        "-m",
        "django",
        "test",
        "--noinput",
        "tests.examples.django_shop.cases",
    ]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"Ran (\d+) tests", ended.stderr)
    assert found is not None
    assert int(found[1]) == CASES.read_text("utf-8").count("def test_")
