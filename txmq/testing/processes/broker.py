"""A real broker as a child process, to be killed and restarted: for tests, the demo and benchmarks.

Theory of operation. ``txmq broker`` is started with ``--ready-file``; ``start`` returns when that file holds the
address. With port 0 a free port is chosen *below the ephemeral range* and kept over restarts: clients that reconnect
while the broker is away then cannot connect to themselves on that port, nor can the system hand it to another process.
In the block of a ``ForkServer`` the broker is forked (``fork_server.py``), in all else the same.

Invariants, besides those of ``child.py``:
* The child inherits no ``TXMQ_*`` variable: what it runs with is what the caller said, and ``BrokerProcess.defaults``.
* The log is next to the data directory.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlencode

from txmq.addresses import TlsFiles, join_address, split_address
from txmq.config import ENVIRONMENT_PREFIX
from txmq.errors import TxmqError
from txmq.testing.processes.child import ChildProcess

START_TIMEOUT_S = 60.0
_PORT_MIN, _PORT_MAX = 18_000, 31_999  # Linux hands out 32768 and up by itself
_PORT_TRIES_MAX = 100
_START_TRIES_MAX = 5  # another program may take a port at the same moment


class BrokerFailedError(TxmqError):
    """The broker process ended, or did not serve or stop in time; the text ends with the end of its log."""


class BrokerProcess(ChildProcess):
    """One broker over one data directory. Usable as a block: killed at its end.

    Args:
        data_dir: the broker's data directory; made by the broker.
        listen: HOST:PORT; port 0 takes a free one at the first start and keeps it.
        settings: any settings of the broker by name.
        env: environment variables for the broker, such as ``TXMQ_CRASH``; they hold for every start unless
            ``start`` is given others.
        tls: what brokers and clients show each other alike; nobody speaks to the broker without it.

    Attributes:
        defaults: settings of all brokers of this process, under those that each is given; none unless assigned.
        ports_file: counts the ports that processes which share it give out; None unless assigned.
    """

    defaults: ClassVar[Mapping[str, object]] = {}
    ports_file: ClassVar[Path | None] = None

    failure = BrokerFailedError
    title = "the broker"

    def __init__(
        self,
        data_dir: Path | str,
        *,
        listen: str = "127.0.0.1:0",
        settings: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        super().__init__(self.data_dir.with_name(self.data_dir.name + ".log"))
        self._ready_file = self.data_dir.with_name(self.data_dir.name + ".ready")
        self._host, self._port = split_address(listen)
        self._port_is_free = self._port == 0
        self._settings = {**self.defaults, **({} if tls is None else _mutual(tls)), **(settings or {})}
        self.tls = tls
        self._env = dict(env or {})

    @property
    def address(self) -> str:
        """``txmq://HOST:PORT`` for ``txmq.connect``; with TLS ``txmqs://HOST:PORT?...`` with the files."""
        return address_of([self])

    @property
    def host(self) -> str:
        """The host it serves on."""
        return self._host

    @property
    def port(self) -> int:
        """The port it serves on; 0 before the first start."""
        return self._port

    def start(self, *, env: Mapping[str, str] | None = None, timeout: float = START_TIMEOUT_S) -> Self:
        """Start the broker and wait until it serves.

        Raises:
            BrokerFailedError: it ended, or does not serve after ``timeout`` seconds.
        """
        for last in (False,) * (_START_TRIES_MAX - 1) + (True,):
            self.launch(env=env)
            try:
                return self.wait_until_ready(timeout)
            except BrokerFailedError as error:
                if last or not self._port_is_free or "address already in use" not in str(error).lower():
                    raise
                self._port = 0
        raise AssertionError("the last try returns or raises")

    def launch(self, *, env: Mapping[str, str] | None = None) -> None:
        """Start the broker without waiting, for instance one that is to die while it recovers."""
        self._require_stopped()
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        self._ready_file.unlink(missing_ok=True)
        if self._port == 0:
            self._port = free_port(self._host)
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        registry = self._settings.get("registry")  # it may hold a password, and others can list command lines
        secret = {f"{ENVIRONMENT_PREFIX}REGISTRY": str(registry)} if registry else {}
        self._spawn(self._command(), inherited | secret | (self._env if env is None else dict(env)))

    def wait_until_ready(self, timeout: float = START_TIMEOUT_S) -> Self:
        """Wait until the broker serves; see ``start``."""
        self._wait_until(self._ready_file.exists, timeout)
        served = self._ready_file.read_text("utf-8").strip().removeprefix("txmq://")
        self._host, self._port = split_address(served)
        return self

    def restart(self, *, env: Mapping[str, str] | None = None) -> Self:
        """Kill (if it runs) and start again, at the same address."""
        self.kill()
        return self.start(env=env)

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "txmq.cli.main", "broker", "--data", str(self.data_dir)]
        command += ["--listen", join_address(self._host, self._port), "--ready-file", str(self._ready_file)]
        for name, value in self._settings.items():
            command += ["--set", f"{name}={_word(value)}"] if name != "registry" else []
        return command


def address_of(brokers: Sequence[BrokerProcess]) -> str:
    """Of some brokers for ``txmq.connect``, the first one first. All have TLS, or none."""
    hosts, tls = ",".join(join_address(broker.host, broker.port) for broker in brokers), brokers[0].tls
    if tls is None:
        return f"txmq://{hosts}"
    files = {name: path for name, path in asdict(tls).items() if path}
    return f"txmqs://{hosts}?{urlencode(files)}"


def _mutual(tls: TlsFiles) -> dict[str, object]:
    """Settings of a broker that lets nobody in without a certificate."""
    shown = {"tls_certificate": tls.cert, "tls_key": tls.key}
    return {**shown, "tls_ca": tls.ca, "tls_client_certificates": "required"}


def free_port(host: str = "127.0.0.1") -> int:
    """A port without a listener, outside the range that the system gives to outgoing connections.

    Drawn at random, or by ``BrokerProcess.ports_file``: then none comes again soon. Else a test's clients, whose broker
    is away for a while, may find another test's broker at its port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_PORT_TRIES_MAX):
        port = _PORT_MIN + _next_number() % (_PORT_MAX - _PORT_MIN + 1)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise BrokerFailedError(f"no free port on {host} between {_PORT_MIN} and {_PORT_MAX}")


def _next_number() -> int:
    drawn = secrets.randbelow(1 << 20)
    if BrokerProcess.ports_file is None:
        return drawn
    with BrokerProcess.ports_file.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        said = file.read()
        number = int(said) + 1 if said.isdigit() else drawn
        file.truncate(0)
        file.write(b"%d" % number)
    return number


def _word(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
