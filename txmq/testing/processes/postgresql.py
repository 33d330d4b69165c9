"""A real PostgreSQL server as a child process over a private directory, to be killed and restarted.

Theory of operation. The first ``start`` makes a data directory (``initdb``, or a copy of ``PostgreSQL.template``) and
an empty database; each start waits until the server notes in ``postmaster.pid`` that it accepts connections on its port
of 127.0.0.1, which stays the same over restarts. The user ``postgres`` has no password there. PostgreSQL refuses to run
as root: there it runs as the system's user ``postgres``, and the data is not below ``directory``, which that user might
not enter, but in a directory of its own that leaves with the object's block.

``kill`` ends the server's children, too: they would outlive it for a moment, and the memory that they
share with it would keep a new one from starting.

Source: PostgreSQL 15, "initdb", "postgres", 19.1 "The PostgreSQL User Account"; pidfile.h, ``PM_STATUS_READY``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from txmq.errors import TxmqError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import free_port
from txmq.testing.processes.child import STOP_TIMEOUT_S, ChildProcess

START_TIMEOUT_S = 60.0
_USER = "postgres"
_OUTPUT_TAIL_BYTES = 3000
_STATUS_LINE = 7  # of postmaster.pid, from 0
_LIBRARIES = Path("/usr/lib/postgresql")  # Debian's, one folder for each version


class PostgreSQLFailedError(TxmqError):
    """The server is not installed, ended, or did not serve or stop in time; the text ends with the end of its log."""


class PostgreSQL(ChildProcess):
    """One server. Usable as a block: killed at its end.

    Args:
        directory: for the log.
        options: settings, ``name=value``; the last one of a name holds.
        database: made at the first start.

    Attributes:
        port: on 127.0.0.1; 0 before the first start.
        template: a data directory, made when it is first needed, that each new server gets a copy of; None: each makes
            its own.
    """

    template: ClassVar[Path | None] = None

    failure = PostgreSQLFailedError
    title = "PostgreSQL"

    def __init__(self, directory: Path | str, *, options: Sequence[str] = (), database: str = "shop") -> None:
        folder = Path(directory).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / "postgresql.log")
        self.database, self.port = database, 0
        self._options = options
        self._home: Path | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    def conninfo(self, database: str | None = None) -> str:
        """What ``psycopg.connect`` takes to reach it."""
        return f"host=127.0.0.1 port={self.port} user={_USER} dbname={database or self.database} connect_timeout=10"

    def start(self, timeout: float = START_TIMEOUT_S, *, is_standby: bool = False) -> Self:
        """Start the server and wait until it serves.

        Args:
            is_standby: in recovery, as a replica: it answers reads.

        Raises:
            PostgreSQLFailedError: it is not installed, ended, or does not serve after ``timeout`` seconds.
        """
        self._require_stopped()
        is_new = self._home is None
        home = self._home or self._made()
        self.port = self.port or free_port()
        signal_file = home / "data" / "standby.signal"
        signal_file.touch() if is_standby else signal_file.unlink(missing_ok=True)
        settings = [f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={home}"]
        words = [word for setting in (*settings, *self._options) for word in ("-c", setting)]
        self._spawn([*_as_user(), _find("postgres"), "-D", str(home / "data"), *words])
        self._wait_until(self._serves, timeout)
        if is_new:
            _run(_find("createdb"), "-h", "127.0.0.1", "-p", str(self.port), "-U", _USER, self.database)
        return self

    def restart(self) -> Self:
        """Kill (if it runs) and start again, on the same port."""
        self.kill()
        return self.start()

    def kill(self) -> None:
        """SIGKILL to the server and all its sessions, as a crash would; no error if nothing runs."""
        super().pause()  # it starts no more of them
        children = self._children()
        super().kill()
        _send(signal.SIGKILL, children)
        eventually(lambda: not any(map(_lives, children)), "its sessions have gone", STOP_TIMEOUT_S)

    def pause(self) -> None:
        """Freeze it with all its sessions (SIGSTOP): connections stay open and get no answer."""
        super().pause()
        children = self._children()
        _send(signal.SIGSTOP, children)
        eventually(lambda: all(map(_stands, children)), "its sessions stand still", STOP_TIMEOUT_S)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        _send(signal.SIGCONT, self._children())
        super().resume()

    def _children(self) -> list[str]:
        pid = self.pid
        return [] if pid is None else Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()

    def _made(self) -> Path:
        home = self._home = Path(tempfile.mkdtemp(prefix="txmq-"))
        if os.geteuid() == 0:
            shutil.chown(home, _USER)
        if self.template is not None and self.template.exists():
            _copy(self.template, home / "data")
            return home
        _run(
            *_as_user(), _find("initdb"), "-D", str(home / "data"), "-U", _USER, "--auth=trust", "--encoding=UTF8",
            "--locale=C.UTF-8", "--no-instructions", "--no-sync", "--wal-segsize=1",
        )  # fmt: skip
        if self.template is not None:
            _copy(home / "data", unfinished := self.template.with_suffix(".new"))
            unfinished.rename(self.template)
        return home

    def _serves(self) -> bool:
        """Whether this process, not one that was killed, has written that it does."""
        assert self._home is not None
        with suppress(FileNotFoundError):
            lines = (self._home / "data" / "postmaster.pid").read_text("utf-8").splitlines()
            return lines[:1] == [str(self.pid)] and [line.strip() for line in lines[_STATUS_LINE:]] == ["ready"]
        return False


def _copy(data_dir: Path, to: Path) -> None:
    """With owners and modes, which the server insists on."""
    _run("cp", "-a", str(data_dir), str(to))


def _send(what: signal.Signals, processes: Sequence[str]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(int(process), what)


def _state(pid: str) -> str:
    """Of a process, as /proc names it; X when it has gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    return "X"


def _lives(pid: str) -> bool:
    """Whether a process is there, and more than its exit status."""
    return _state(pid) not in "ZX"


def _stands(pid: str) -> bool:
    return _state(pid) in "TZX"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False, cwd="/")  # noqa: S603
    if done.returncode != 0:
        raise PostgreSQLFailedError(f"{command[0]} failed\n{(done.stdout + done.stderr)[-_OUTPUT_TAIL_BYTES:]}")


def _as_user() -> list[str]:
    return ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"] if os.geteuid() == 0 else []


def _find(program: str) -> str:
    folders = sorted(_LIBRARIES.glob("*/bin"), key=lambda folder: int(folder.parent.name), reverse=True)
    found = shutil.which(program, path=os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise PostgreSQLFailedError(f"{program} is not installed: apt-get install postgresql")
    return found
