"""Servers of peers as plain child processes on free ports of loopback, gone with everything they wrote at the end.

The services of Debian's packages are not needed. What is missing is said in the row (``NotInstalledError``), never a
failure. What no package brings lies in a cache outside of the repository (``cache_directory``).

Invariants:
* Nothing of the machine's own configuration or state is used.
* Every process started here has ended when the block ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from bench.model import NotInstalledError
from txmq.testing.eventually import eventually

START_S_MAX = 120.0
STOP_S_MAX = 20.0
_SERVER_DIRECTORIES = ("/usr/sbin", "/usr/local/sbin")  # often not in PATH


def require_client(module: str, package: str) -> None:
    """Raise NotInstalledError if the Python client is missing."""
    if find_spec(module) is None:
        raise NotInstalledError(f"not installed: pip install {package}")


def cache_directory() -> Path:
    """Where programs of peers lie that no package brings."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "txmq-peers"


def require_program(name: str, install: str) -> str:
    """The path of a program, from the cache, PATH, or where servers lie.

    Raises:
        NotInstalledError: it is nowhere; ``install`` says how to get it.
    """
    places = (str(cache_directory() / "bin"), os.environ.get("PATH", ""), *_SERVER_DIRECTORIES)
    program = shutil.which(name, path=os.pathsep.join(places))
    if program is None:
        raise NotInstalledError(f"not installed: {install}")
    return program


@contextmanager
def server(
    command: Sequence[str], directory: Path, environment: Mapping[str, str]
) -> Iterator[Callable[[], list[int]]]:
    """A child in a process group of its own, all of which is ended with the block; gives the pids of the group."""
    with (directory / "output.log").open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment), cwd=directory,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield lambda: _group(process.pid)
    finally:
        _signal_group(process, signal.SIGTERM)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pass
        _signal_group(process, signal.SIGKILL)  # whatever the first child started
        process.wait()


def _group(leader: int) -> list[int]:
    """Processes of the group that still are there."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(words[2]) == leader:
            found.append(int(status.parent.name))
    return found


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def await_port(port: int, directory: Path) -> None:
    def serves() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            return False
        return True

    log = directory / "output.log"
    eventually(serves, lambda: f"it serves: {log.read_text()[-500:]}", START_S_MAX, TimeoutError)
