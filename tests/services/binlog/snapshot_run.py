"""A reader of a snapshot as a process, what it published, and a concurrent writer."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import txmq
from txmq.errors import UnknownTopicError
from txmq.runtime.crashpoints import VARIABLE
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import Process
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa.database.mysql_server import mysql_driver

WAIT_S = 60.0


class Run:
    """A reader as a process, and what it published."""

    def __init__(self, directory: Path, server: MariaDB, broker: BrokerProcess, name: str, **settings: object) -> None:
        self.server, self.name, self.address = server, name, broker.address
        self.log, self.config = directory / f"{name}.log", directory / f"{name}.toml"
        snapshot = {"chunk_rows": 7, "view_ms_max": 1} | settings
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in snapshot.items())
        self.config.write_text(
            f'name = "{name}"\nbootstrap = "{broker.address}"\n[source]\nport = {server.port}\nuser = "root"\n'
            f'tables = ["shop.*"]\n[snapshot]\n{lines}\n'
            "[publish]\npartitions = 2\nsession_timeout_ms = 4000\nlinger_ms = 1\ntransaction_rows_max = 20\n"
        )

    def command(self, *words: str) -> list[str]:
        """The reader's command."""
        return [sys.executable, "-m", "txmq.cli.main", "binlog", "run", "--config", str(self.config), *words]

    def start(self, *words: str, crash: str = "") -> Process:
        """Start the reader."""
        environment = {**os.environ, VARIABLE: crash} if crash else dict(os.environ)
        return fork_server.start_logged(self.command(*words), self.log, environment)

    def finish(self, *words: str) -> None:
        """Read the snapshot to its end."""
        assert self.start("--snapshot", "only", *words).wait(WAIT_S) == 0, self.log.read_text()

    def events(self, client: txmq.Client, table: str) -> list[dict[str, Any]]:
        """The row events of a table, partition by partition."""
        found = [json.loads(message.value or b"") for message in client.browse(f"{self.name}.shop.{table}")]
        return [event for event in found if event["op"] in "rcud"]

    def rebuilt(self, client: txmq.Client, table: str, key: str = "id") -> dict[Any, Any]:
        """The table that strict consumers build: a row comes once, and each change is of the row as it was."""
        rows: dict[Any, Any] = {}
        for event in self.events(client, table):
            before, after = event["before"], event["after"]
            if before is None:
                assert after[key] not in rows, f"twice: {event}"
            else:
                assert rows.pop(before[key], None) == before, f"another row was there before: {event}"
            if after is not None:
                rows[after[key]] = after
        return rows


class Writer:
    """Changes rows of a table at random until the block ends; keys move as well. Goes on when the database is back."""

    def __init__(self, server: MariaDB, table: str = "items") -> None:
        self._server, self._table = server, table
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _write(self) -> None:
        numbers = count(1)
        while not self._is_ended.is_set():
            with suppress(mysql_driver().OperationalError):
                self._write_to(numbers)

    def _write_to(self, numbers: Iterator[int]) -> None:
        with closing(self._server.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
            while not self._is_ended.is_set():
                number = next(numbers)
                some, other = number * 7919 % 400, number * 104_729 % 400
                for sql in (
                    f"UPDATE IGNORE {self._table} SET v = {number} WHERE id BETWEEN {some} AND {some + 3}",
                    f"UPDATE IGNORE {self._table} SET id = {other} WHERE id = {some}",
                    f"DELETE FROM {self._table} WHERE id = {other + 1}",
                    f"INSERT IGNORE INTO {self._table} VALUES ({some + 1}, {number}), ({other + 2}, {number})",
                ):
                    cursor.execute(sql)


def fill(server: MariaDB, table: str = "items", rows: int = 120, kind: str = "INT") -> None:
    """A table with every third id."""
    server.execute(f"DROP TABLE IF EXISTS {table}")
    server.execute(f"CREATE TABLE {table} (id {kind} PRIMARY KEY, v INT)")
    values = ", ".join(f"({3 * number}, 0)" for number in range(rows))
    server.execute(f"INSERT INTO {table} VALUES {values}")


def table_rows(server: MariaDB, table: str) -> dict[Any, Any]:
    """What a SELECT gives."""
    return {row[0]: {"id": row[0], "v": row[1]} for row in server.execute(f"SELECT id, v FROM {table}")}


def caught_up(run: Run, client: txmq.Client, table: str = "items") -> None:
    """Let a reader publish the rest, and compare the table with what consumers build of it."""
    reader = run.start("--snapshot", "initial")
    wanted = table_rows(run.server, table)
    eventually(lambda: run.rebuilt(client, table) == wanted, lambda: run.log.read_text()[-3000:], WAIT_S)
    reader.kill()
    reader.wait(WAIT_S)


def read_rows(run: Run, client: txmq.Client) -> int:
    """How many rows of the snapshot are published."""
    with suppress(UnknownTopicError):
        return sum(event["op"] == "r" for event in run.events(client, "items"))
    return 0
