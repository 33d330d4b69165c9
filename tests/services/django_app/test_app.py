"""``txmq.django`` in a real project, on each database, by Django's own test runner; and what its commands say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

from .project import KINDS, Project, databases_of

CASES = Path(__file__).with_name("shop") / "cases.py"


@pytest.mark.parametrize("kind", KINDS)
def test_project_s_transactions_requests_and_tests(
    kind: str, tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    project = Project(kind, databases_of(kind, tmp_path, mariadb, postgresql))
    ended = project.run("test", "--noinput", "tests.services.django_app.shop.cases")
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"Ran (\d+) tests", ended.stderr)
    assert found is not None
    assert int(found[1]) == CASES.read_text("utf-8").count("def test_")


def test_project_s_tests_run_without_migrations(
    tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_MIGRATIONS", "none")  # as pytest-django's --nomigrations
    project = Project("sqlite", databases_of("sqlite", tmp_path, mariadb, postgresql))
    ended = project.run("test", "--noinput", "tests.services.django_app.shop.cases.IsolatedCase")
    assert ended.returncode == 0, ended.stderr
    assert "txmq.W001" not in ended.stderr  # the database of these tests is in memory, and is not synced


def test_check_warns_of_a_server_that_loses_commits(tmp_path: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> None:
    def said(kind: str, databases: dict[str, Any]) -> str:
        return Project(kind, databases).run("check", "--database", "default").stderr

    databases = databases_of("mysqlclient", tmp_path, mariadb, postgresql)
    assert said("mysqlclient", databases) == ""
    mariadb.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    warned = said("mysqlclient", databases)
    mariadb.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    assert "(txmq.W001) database 'default': no relay works on it" in warned
    assert "innodb_flush_log_at_trx_commit = 2, not 1" in warned
    databases = databases_of("psycopg", tmp_path, mariadb, postgresql)
    databases["default"]["OPTIONS"] = {"options": "-c synchronous_commit=off"}  # which a relay sets for itself
    assert said("psycopg", databases) == ""
