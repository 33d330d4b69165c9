"""A source and a target of one server, a reader in a thread, and the comparison of both."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import txmq
from txmq.binlog.apply.applier import Applied, Applier
from txmq.binlog.config import BinlogSettings, read_settings
from txmq.binlog.errors import BinlogError
from txmq.binlog.publish.publisher import TransactionalPublisher
from txmq.binlog.reader import BinlogReader
from txmq.binlog.source import BinlogSource
from txmq.binlog.source.options import source_options
from txmq.binlog.status import newest_published
from txmq.runtime.crashpoints import VARIABLE
from txmq.runtime.threads import Signal, start_daemon
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import Process
from txmq.testing.processes.mariadb import MariaDB

WAIT_S = 60.0


class Replica:
    """Database ``shop`` and its copy, ``copy_shop``, under a name of their own.

    Args:
        apply: more lines of ``[apply]``.
    """

    def __init__(
        self, name: str, server: MariaDB, broker: BrokerProcess, client: txmq.Client, directory: Path, apply: str = ""
    ) -> None:
        self.name, self.server, self.client = name, server, client
        self.config, self.log = directory / f"{name}.toml", directory / f"{name}.log"
        place = f'host = "127.0.0.1"\nport = {server.port}\nuser = "root"\n'
        if "conflict_wait_ms" not in apply:
            apply += "conflict_wait_ms = 2000\n"
        self.config.write_text(
            f'name = "{name}"\nbootstrap = "{broker.address}"\n[source]\n{place}tables = ["shop.*"]\n'
            f'[publish]\npartitions = 3\ntransaction_rows_max = 50\n[apply]\n{place}database = "copy_{{database}}"\n'
            f'state_database = "state_{name}"\nthreads = 3\nsession_timeout_ms = 1500\n{apply}'
        )

    @property
    def settings(self) -> BinlogSettings:
        """What the file says."""
        return read_settings(self.config.read_text(), os.environ)

    def execute(self, *statements: str) -> None:
        """Run statements at the source, each its own transaction."""
        with closing(self.server.connect(db="shop", autocommit=True)) as connection:
            for statement in statements:
                with closing(connection.cursor()) as cursor:
                    cursor.execute(statement)

    @contextmanager
    def reader(self) -> Iterator[None]:
        """A reader in a thread; at the end of the block all that the server has is published."""
        options, ended, failures = source_options(self.settings), Signal(), list[BaseException]()
        reader = BinlogReader(lambda: BinlogSource(options), self.client.clock, "now")

        def work() -> None:
            try:
                reader.run(TransactionalPublisher(self.client, self.settings, lambda: reader.is_stopped))
            except BaseException as error:  # noqa: BLE001  raised in the test's thread
                failures.append(error)
            ended.set()

        start_daemon("reader", work)
        try:
            eventually(lambda: bool(failures) or self._published() is not None, "the reader has begun", WAIT_S)
            yield
            end = self.server.binlog_gtids()
            eventually(lambda: bool(failures) or self._published() == end, f"{end} is published", WAIT_S)
        finally:
            reader.stop()
            ended.wait(WAIT_S)
        if failures:
            raise failures[0]

    def _published(self) -> str | None:
        try:
            return newest_published(self.client, self.settings).position.gtids
        except (BinlogError, txmq.errors.TxmqError):
            return None

    def apply(self, **arguments: Any) -> Applied:
        """Apply all that is published, in this process."""
        return Applier(self.client, self.settings, **arguments).run(until_end=True)

    def start_child(self, crash: str = "") -> Process:
        """The same by a process, which may be killed."""
        command = [sys.executable, "-m", "txmq.cli.main", "binlog", "apply", "--config", str(self.config)]
        environment = {**os.environ, VARIABLE: crash} if crash else dict(os.environ)
        return fork_server.start_logged([*command, "--until-end"], self.log, environment)

    def apply_child(self, crash: str = "") -> int:
        """The status with which that process ends."""
        return self.start_child(crash).wait(WAIT_S)

    def rows(self, database: str, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
        """A table's rows, in an order."""
        return sorted(self.server.execute(f"SELECT {columns} FROM {database}.{table}"), key=str)

    def require_equal(self) -> None:
        """Both databases have the same tables, columns and rows."""
        names = [self._tables(database) for database in ("shop", "copy_shop")]
        assert names[0] == names[1]
        for table in names[0]:
            both = [self.server.execute(f"SHOW CREATE TABLE {database}.{table}") for database in ("shop", "copy_shop")]
            assert _plain(both[0]) == _plain(both[1])
            assert self.rows("shop", table) == self.rows("copy_shop", table), table

    def _tables(self, database: str) -> list[str]:
        return sorted(str(name) for (name,) in self.server.execute(f"SHOW TABLES FROM {database}"))


def _plain(created: list[tuple[Any, ...]]) -> str:
    text = str(created[0][1])
    return " ".join(word for word in text.split() if not word.startswith("AUTO_INCREMENT="))
