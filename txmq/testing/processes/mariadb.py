"""A real MariaDB (or MySQL) as a child process over a private directory, to be killed and restarted.

Theory of operation. Which server it is, ``database_programs.chosen_program`` says. The first ``start`` makes a data
directory (under a second with MariaDB, five with MySQL; or a copy of ``MariaDB.template``) and an empty database; each
start waits until the server accepts a connection. It listens on a unix socket and on a port of 127.0.0.1; both stay the
same over restarts. ``root`` has no password there. Nothing of the machine's own MariaDB is read or touched
(``--no-defaults``).

Invariants, besides those of ``child.py``:
    * commits are as durable as InnoDB makes them, unless ``options`` say otherwise;
    * no binary log unless asked for: MariaDB does not promise that prepared XA transactions survive a crash with one;
    * temporary files go to the directory too: servers that share /tmp delete each other's when they start.

Source: MariaDB 10.11, "mariadbd options", "mariadb-install-db".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from txmq.testing.processes.broker import free_port
from txmq.testing.processes.child import ChildProcess
from txmq.testing.processes.database_programs import MariaDBFailedError, chosen_program
from txmq.xa.database.mysql_server import Server, listed_xids, mysql_driver
from txmq.xid import xid_sql

START_TIMEOUT_S = 60.0
_OUTPUT_TAIL_BYTES = 3000
_SOCKET_PATH_MAX = 100  # sockaddr_un holds 107 bytes
_OPTIONS = (
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--character-set-server=utf8mb4",
    "--innodb-flush-log-at-trx-commit=1",
    "--innodb-buffer-pool-size=64M",
    "--max-connections=500",
)


class MariaDB(ChildProcess):
    """One server over one directory. Usable as a block: killed at its end.

    Args:
        directory: for data, log and process id; made if it is missing. A directory used before is started again.
        binary_log: keep one, in row format and synced (replication, change capture).
        options: more options of the server; the last one of a name holds.
        database: made at the first start, and chosen by ``connect_arguments``.

    Attributes:
        program: which server it is, and what it can do.
        defaults: options of all servers of this process, under those that each is given; none unless assigned.
        template: a data directory, made when it is first needed, that each new server gets a copy of; None: each makes
            its own.
    """

    defaults: ClassVar[Sequence[str]] = ()
    template: ClassVar[Path | None] = None

    failure = MariaDBFailedError
    title = "MariaDB"

    def __init__(
        self, directory: Path | str, *, binary_log: bool = False, options: Sequence[str] = (), database: str = "shop"
    ) -> None:
        self.directory = Path(directory).absolute()
        self.database = database
        super().__init__(self.directory / "error.log")
        self._data_dir = self.directory / "data"
        self.program = chosen_program()
        logged = self.program.binary_log if binary_log else self.program.without_binary_log
        self._options = (*_OPTIONS, *self.program.options, *logged, *self.defaults, *options)
        self._socket = self.directory / "s"
        self._socket_dir: Path | None = None  # a short path, where ours is too long for a socket
        self._port = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; 0 before the first start."""
        return self._port

    def connect_arguments(self, *, tcp: bool = False) -> dict[str, Any]:
        """What ``MySQLdb.connect`` takes to reach it, as root.

        Args:
            tcp: over 127.0.0.1 and the port, not over the unix socket.
        """
        where = {"host": "127.0.0.1", "port": self._port} if tcp else {"unix_socket": str(self._socket)}
        return where | {"user": "root", "db": self.database, "charset": "utf8mb4", "connect_timeout": 10}

    def connect(self, **arguments: Any) -> Any:
        """A new MySQLdb connection as root; ``arguments`` are added to ``connect_arguments``, or replace some."""
        return mysql_driver().connect(**(self.connect_arguments() | arguments))

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, sql_mode: str | None = None) -> list[Any]:
        """Run one statement on a connection of its own, in autocommit; its rows."""
        with closing(self.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
            if sql_mode is not None:
                cursor.execute("SET SESSION sql_mode = %s", (sql_mode,))
            cursor.execute(sql, tuple(parameters)) if parameters else cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description is not None else []

    def make_database_anew(self, name: str) -> None:
        """An empty database."""
        with closing(self.connect(db="", autocommit=True)) as connection:
            connection.query(f"DROP DATABASE IF EXISTS {name}")
            connection.query(f"CREATE DATABASE {name}")

    def prepared(self) -> list[str]:
        """The XA branches that are prepared, as SQL names them."""
        with closing(self.connect(autocommit=True)) as connection:
            return [xid_sql(xid) for xid in listed_xids(connection, is_mariadb=Server(connection).is_mariadb)]

    def binlog_gtids(self) -> str:
        """The GTIDs of what its binary log holds by now."""
        ((found,),) = self.execute(f"SELECT {self.program.binlog_gtids}")
        return "".join(str(found).split())

    def binlog_end(self) -> tuple[str, int]:
        """The file of its binary log that is written, and where that ends."""
        file, offset, *_ = self.execute("SHOW BINARY LOGS")[-1]
        return str(file), int(offset)

    def start(self, timeout: float = START_TIMEOUT_S) -> Self:
        """Start the server and wait until it serves.

        Raises:
            MariaDBFailedError: it is not installed, ended, or does not serve after ``timeout`` seconds.
        """
        self._require_stopped()
        if not self._data_dir.exists():
            self._install()
        self._choose_addresses()
        command = [self.program.server, "--no-defaults", *_as_root(), f"--datadir={self._data_dir}"]
        command += [
            f"--tmpdir={self._scratch()}",
            f"--socket={self._socket}",
            f"--port={self._port}",
            f"--pid-file={self.directory / 'pid'}",
        ]
        self._spawn([*command, *self._options])
        return self._wait_until(self._serves, timeout)

    def restart(self) -> Self:
        """Kill (if it runs) and start again, at the same addresses."""
        self.kill()
        return self.start()

    # --- making it -----------------------------------------------------------------------------------------------

    def _install(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.template is None:
            self._make(self._data_dir)
            return
        if not self.template.exists():
            self._make(self.template)
        unfinished = self._data_dir.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(self.template, unfinished)
        unfinished.rename(self._data_dir)

    def _make(self, data_dir: Path) -> None:
        unfinished = data_dir.with_suffix(".new")  # a crash in here must not leave half a data directory
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [*self.program.install_command(unfinished, self._scratch()), *_as_root()]
        result = subprocess.run(  # noqa: S603 - a program found by its name, arguments of our own
            command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
        if result.returncode != 0:
            said = (result.stdout + result.stderr)[-_OUTPUT_TAIL_BYTES:]
            raise MariaDBFailedError(f"{command[0]} made no data directory\n{said}")
        unfinished.rename(data_dir)

    def _scratch(self) -> Path:
        """A server that starts deletes what looks like temporary tables of another one in a shared directory."""
        directory = self.directory / "tmp"
        directory.mkdir(exist_ok=True)
        return directory

    def _choose_addresses(self) -> None:
        if not self._port:
            self._port = free_port()
        if len(os.fsencode(self._socket)) > _SOCKET_PATH_MAX:
            self._socket_dir = Path(tempfile.mkdtemp(prefix="txmq-"))
            self._socket = self._socket_dir / "s"

    def _serves(self) -> bool:
        with suppress(mysql_driver().Error):
            self._make_database()
            return True
        return False

    def _make_database(self) -> None:
        with closing(self.connect(db="", autocommit=True)) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("SHOW DATABASES LIKE %s", (self.database,))
            if not cursor.fetchall():
                cursor.execute(f"CREATE DATABASE {self.database}")


def _as_root() -> list[str]:
    return ["--user=root"] if os.geteuid() == 0 else []  # it refuses to run as root unless told by name
