"""The Django project of these tests on a database of each kind, and how its commands are called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("sqlite", "mysqlclient", "pymysql", "psycopg")
ALIASES = ("default", "archive")
TIMEOUT_S = 200


def databases_of(kind: str, folder: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> dict[str, Any]:
    """Django's DATABASES; those of servers are new and empty."""
    made = {alias: _database(kind, f"{kind}_{alias}", folder, mariadb, postgresql) for alias in ALIASES}
    return {alias: {"ATOMIC_REQUESTS": True} | database for alias, database in made.items()}


def _database(kind: str, name: str, folder: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> dict[str, Any]:
    if kind == "sqlite":
        file = str(folder / f"{name}.db")
        options = {"timeout": 30, "transaction_mode": "IMMEDIATE"}
        engine = "django.db.backends.sqlite3"
        return {"ENGINE": engine, "NAME": file, "OPTIONS": options, "TEST": {"NAME": f"{file}.test"}}
    if kind == "psycopg":
        with psycopg.connect(postgresql.conninfo(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name}")  # type: ignore[arg-type,unused-ignore]
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type,unused-ignore]
        where = {"HOST": "127.0.0.1", "PORT": postgresql.port, "USER": "postgres"}
        return {"ENGINE": "django.db.backends.postgresql", "NAME": name, **where}
    mariadb.execute(f"DROP DATABASE IF EXISTS {name}")
    mariadb.execute(f"CREATE DATABASE {name}")
    given = mariadb.connect_arguments()
    where = {"HOST": given["unix_socket"], "USER": given["user"]}
    return {"ENGINE": "django.db.backends.mysql", "NAME": name, **where}


class Project:
    """Commands of the project, each a process."""

    def __init__(self, kind: str, databases: dict[str, Any], broker: str = "txmq://127.0.0.1:1") -> None:
        self.kind = kind
        self._environment = os.environ | {
            "PYTHONPATH": str(ROOT), "SHOP_DATABASES": json.dumps(databases), "SHOP_DRIVER": kind,
            "SHOP_BROKER": broker, "DJANGO_SETTINGS_MODULE": "tests.services.django_app.shop.settings",
        }  # fmt: skip

    def run(self, *words: str, python: Sequence[str] = ("-m", "django")) -> subprocess.CompletedProcess[str]:
        """A command, to its end."""
        command = [sys.executable, "-W", "error::RuntimeWarning", *python, *words]
        return subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def ok(self, *words: str) -> str:
        """What a command that ends well prints."""
        ended = self.run(*words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def start(self, *words: str, crash: str = "", **streams: Any) -> subprocess.Popen[bytes]:
        """A command that runs on; it dies at ``crash``, as ``TXMQ_CRASH`` has it."""
        environment = self._environment | ({"TXMQ_CRASH": crash} if crash else {})
        return subprocess.Popen([sys.executable, "-m", "django", *words], cwd=ROOT, env=environment, **streams)

    @contextmanager
    def running(self, *words: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
        """As ``start``, for a block that ends it."""
        process = self.start(*words, **streams)
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)
