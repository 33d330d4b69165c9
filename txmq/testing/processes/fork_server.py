"""``python -m MODULE ...`` without the half second of imports: a server that has made them forks.

Theory of operation. The server is an interpreter that has imported what it was told to and *rehearsed* the commands
it was given, for what these import late. For each request it forks a monitor, which forks the child and tells by a
pipe the child's process id and, when it has ended, its status: only a parent is told that. The child takes over
environment, directory and output of the request and leaves the server's loop; the interpreter then runs the module
and ends as it does for any ``python -m``: exit status, traceback, ``atexit`` and all.

``start``, and what is made of it, is what launchers call. It starts a process of its own, as ``subprocess`` does,
where no server runs, where the command is not of the form above, and where the environment differs in what an
interpreter reads when it starts.

Invariants:
* the server has one thread, and opens no file, socket or database, so a fork copies none;
* a child has a session of its own, and no descriptor of the server's;
* the server ends with the process that uses it; the children go on, as those of ``subprocess`` do.

Measured on 2 busy cores: a broker takes 0.6 s of processor time until it serves, 0.1 s when it is forked; a campaign of
20 kills 37 s and 13 s.

Source: ``multiprocessing.forkserver``, whose children import the user's main module again.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, ClassVar, NamedTuple, Protocol, Self

from txmq.runtime import crashpoints

_REQUEST_BYTES_MAX = 1 << 17
_ANSWER = struct.Struct("<i")
_READ_BY_AN_INTERPRETER = ("PYTHON", "LD_", "MALLOC_", "LANG", "LC_", "TZ")


class Process(Protocol):
    """The part of ``subprocess.Popen`` that launchers use."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Its exit status, minus the number of a signal that ended it; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises: subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Send a signal; does nothing if the process has ended."""

    def kill(self) -> None:
        """SIGKILL."""


class Streams(NamedTuple):
    """Open files for a child; may be closed when it has begun."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]


def start(command: Sequence[str], streams: Streams, env: Mapping[str, str], cwd: str | None = None) -> Process:
    """Start a command with a session of its own.

    Args:
        command: the program and its arguments.
        streams: what it reads, and where it writes.
        env: its whole environment.
        cwd: its directory; ours by default.
    """
    server = ForkServer.running
    if server is not None and server.can(command, env):
        return server.start(command[2:], streams, env, cwd or os.getcwd())  # noqa: PTH109 - goes over a socket, as text
    return subprocess.Popen(  # noqa: S603 - commands of our own
        list(command), env=env, cwd=cwd, stdin=streams.stdin, stdout=streams.stdout, stderr=streams.stderr,
        start_new_session=True,  # Ctrl-C at the terminal is for the parent, which decides
    )  # fmt: skip


def start_logged(command: Sequence[str], log_file: Path, env: Mapping[str, str], cwd: str | None = None) -> Process:
    """Start a command that reads nothing; what it writes is appended to a file. See ``start``."""
    with Path(os.devnull).open("rb") as nothing, log_file.open("ab") as log:
        return start(command, Streams(nothing, log, log), env, cwd)


def run(command: Sequence[str], *, stdin: bytes = b"", timeout: float) -> subprocess.CompletedProcess[bytes]:
    """``subprocess.run`` with captured output, by ``start``.

    Raises:
        subprocess.TimeoutExpired: it did not end in time, and was killed.
    """
    with ExitStack() as stack:
        streams = Streams(*(stack.enter_context(TemporaryFile()) for _ in Streams._fields))
        streams.stdin.write(stdin)
        streams.stdin.seek(0)
        child = start(command, streams, os.environ)
        stack.callback(child.wait)
        stack.callback(child.kill)  # goes first
        status = child.wait(timeout)
        streams.stdout.seek(0)
        streams.stderr.seek(0)
        return subprocess.CompletedProcess(command, status, streams.stdout.read(), streams.stderr.read())


class ForkServer:
    """A server for this process, while its block lasts; begins with the first request.

    Args:
        modules: what it imports.
        rehearsals: commands (a module, and its arguments) that it runs before it serves; what they print is dropped.

    Attributes:
        running: the one that ``start`` uses.

    Thread safety: requests may come from any thread.
    """

    running: ClassVar[ForkServer | None] = None

    def __init__(self, modules: Sequence[str] = (), rehearsals: Sequence[Sequence[str]] = ()) -> None:
        self._plan = json.dumps({"modules": list(modules), "rehearsals": [list(words) for words in rehearsals]})
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._before: ForkServer | None = None

    def __enter__(self) -> Self:
        self._before, ForkServer.running = ForkServer.running, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ForkServer.running = self._before
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._server.wait()
        self._socket = self._server = None

    @staticmethod
    def can(command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork does what a start of the command would do."""
        ours = {name: text for name, text in os.environ.items() if name.startswith(_READ_BY_AN_INTERPRETER)}
        wanted = {name: text for name, text in env.items() if name.startswith(_READ_BY_AN_INTERPRETER)}
        return list(command[:2]) == [sys.executable, "-m"] and ours == wanted

    def start(self, words: Sequence[str], streams: Streams, env: Mapping[str, str], cwd: str) -> Process:
        """Fork a child that runs a module (the first of ``words``) with arguments; see the function ``start``."""
        request = json.dumps({"words": list(words), "env": dict(env), "cwd": cwd}).encode()
        answers, report = os.pipe()
        with self._lock:
            server = self._socket or self._begin()
            try:
                socket.send_fds(server, [request], [report, *(stream.fileno() for stream in streams)])
            finally:
                os.close(report)
        return _Forked(words, answers)

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(  # noqa: S603 - this module
                [sys.executable, "-m", __name__, self._plan], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._socket = ours
        return ours


class _Forked:
    """A child of the server's, told of by its monitor; see ``Process``."""

    def __init__(self, words: Sequence[str], answers: int) -> None:
        self._words, self._answers, self._lock = words, answers, threading.Lock()
        self._status: int | None = None
        self.pid = self._answer()

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(list(self._words), timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended since
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        with self._lock:
            if self._status is None and self._has_answer(timeout):
                self._status = self._answer()
                os.close(self._answers)
            return self._status

    def _has_answer(self, timeout: float | None) -> bool:
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def _answer(self) -> int:
        said = os.read(self._answers, _ANSWER.size)
        if not said:
            raise ChildProcessError(f"the fork server ended before it told of {self._words}")
        (number,) = _ANSWER.unpack(said)
        return int(number)


# --- the server's side -----------------------------------------------------------------------------------------------


class _Request(NamedTuple):
    """The task of a child."""

    words: list[str]
    env: dict[str, str]
    cwd: str


def _serve(requests: socket.socket) -> _Request | None:
    """Returns a request in the child that is to carry it out; None at the end of all requests."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # monitors are not waited for
    while True:
        said, descriptors, _flags, _address = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 1 + len(Streams._fields))
        if not said:
            return None
        report, *streams = descriptors
        if os.fork() == 0:
            requests.close()
            request = _Request(**json.loads(said))
            _monitor(report)
            _become(request, streams)
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def _monitor(report: int) -> None:
    """Returns in the child; its parent tells of it, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(report)
        return
    os.write(report, _ANSWER.pack(child))
    _pid, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe
        os.write(report, _ANSWER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request: _Request, streams: Sequence[int]) -> None:
    """Make this process what ``subprocess.Popen`` makes of it."""
    os.setsid()
    os.chdir(request.cwd)
    for number, descriptor in enumerate(streams):
        _redirect(descriptor, number)
    os.environ.clear()
    os.environ.update(request.env)
    crashpoints.arm(os.environ.get(crashpoints.VARIABLE))


def _redirect(descriptor: int, number: int) -> None:
    os.dup2(descriptor, number)
    os.close(descriptor)


def _prepare(plan: str) -> None:
    """Import, rehearse, and let no collection touch, and so copy, what was made of it."""
    wanted = json.loads(plan)
    for name in wanted["modules"]:
        importlib.import_module(name)
    for words in wanted["rehearsals"]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            _run(words)
    gc.collect()
    gc.freeze()


def _run(words: Sequence[str]) -> None:
    """Run the module as ``python -m`` does."""
    sys.modules.pop(words[0], None)  # imported by a rehearsal: would be warned of
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def main(plan: str) -> None:
    """Serve on standard input, which is a socket; and, in a child, be what was asked for."""
    with socket.socket(fileno=os.dup(0)) as requests:
        _redirect(os.open(os.devnull, os.O_RDONLY), 0)
        _prepare(plan)
        request = _serve(requests)
    if request is not None:
        _run(request.words)


if __name__ == "__main__":
    main(sys.argv[1])
