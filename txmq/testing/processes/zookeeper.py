"""Real ZooKeeper servers as child processes over private directories, to be killed, paused and restarted.

Theory of operation. PySpark ships the server's jars: nothing else is installed, or read from this machine. ``start``
waits until the server says in which mode it serves; before that it may say that it is well, and serve no client. It
listens on one port of 127.0.0.1, kept over restarts. Sessions and nodes survive a kill: the server forces each change.
A server of an ensemble serves while most of them run, and uses two more ports for the others.

With certificates it has one more port, which speaks TLS and asks clients for theirs (``secureClientPort``). The plain
one stays, for words of four letters.

Its clock ticks every 200 ms, so that a session may be as short as 400 ms.

Source: ZooKeeper 3.9 Administrator's Guide, "Configuration Parameters", "The Four Letter Words"; Programmer's Guide,
"ZooKeeper Sessions"; "ZooKeeper SSL User Guide".
"""

from __future__ import annotations

import importlib.util
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from txmq.addresses import TlsFiles
from txmq.errors import TxmqError
from txmq.runtime.build import how_to_install
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import free_port
from txmq.testing.processes.child import ChildProcess, ServerGroup
from txmq.testing.processes.spark import find_java

START_TIMEOUT_S = 60.0
TICK_MS = 200
SESSION_TIMEOUT_MS_MIN = 2 * TICK_MS
_ANSWER_TIMEOUT_S = 1.0  # a server that is just starting may take a connection and say nothing: it is asked again
_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_JARS = (  # the server, what it needs to answer (a server without snappy serves nobody), and what writes its log
    "zookeeper-3.*", "zookeeper-jute-3.*", "slf4j-api-*", "metrics-core-*", "snappy-java-*", "log4j-slf4j2-impl-*",
    "log4j-api-*", "log4j-core-*",
)  # fmt: skip
_TLS_JARS = tuple(
    f"netty-{name}-4*.Final"
    for name in ("buffer", "codec-base", "common", "handler", "resolver", "transport", "transport-classes-epoll",
                 "transport-native-unix-common")
)  # fmt: skip
_JVM_OPTIONS = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_CONNECT = struct.Struct(">iiqiqi16sB")  # length, version, newest change seen, timeout, session, password, read-only
_CONNECTED = struct.Struct(">iiiqi16sB")  # length, version, timeout granted, session, password, read-only
_CLOSE = struct.pack(">iii", 8, 1, -11)


class ZooKeeperFailedError(TxmqError):
    """The server's jars or Java are missing, or it ended, or did not serve in time; the text ends with its log."""


class Ports(NamedTuple):
    """A server's ports for the other servers of its ensemble."""

    quorum_port: int
    election_port: int


class ZooKeeper(ChildProcess):
    """One server over one directory. Usable as a block: killed at its end.

    Args:
        directory: for settings, data and log; made if it is missing. A directory used before is started again.
        number: which of ``servers`` it is, from 0.
        servers: the servers of its ensemble; none if it is alone.
        tls: what it shows and trusts at its secure port; None: it has none.
    """

    failure = ZooKeeperFailedError
    title = "ZooKeeper"

    def __init__(
        self, directory: Path | str, number: int = 0, servers: Sequence[Ports] = (), tls: TlsFiles | None = None
    ) -> None:
        self.directory = Path(directory).absolute()
        self._number, self._servers = number, tuple(servers)
        super().__init__(self.directory / "zookeeper.log")
        self._port = self._secure_port = 0
        self._tls = tls

    @property
    def port(self) -> int:
        """The port on 127.0.0.1; 0 before the first start."""
        return self._port

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"127.0.0.1:{self._port}"

    @property
    def secure_address(self) -> str:
        """The same of the port for TLS."""
        return f"127.0.0.1:{self._secure_port}"

    def start(self, timeout: float = START_TIMEOUT_S) -> Self:
        """Start the server and wait until it serves.

        Raises:
            ZooKeeperFailedError: see the class.
        """
        self.launch()
        return self.wait_until_ready(timeout)

    def launch(self) -> None:
        """Start the server without waiting."""
        self._require_stopped()
        self._port = self._port or free_port()
        self._secure_port = self._secure_port or free_port()
        settings, data = self.directory / "zoo.cfg", self.directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        settings.write_text(self._settings(), "utf-8")
        (data / "myid").write_text(f"{self._number}\n", "utf-8")
        java = find_java("ZooKeeper", ZooKeeperFailedError)
        self._spawn(
            [
                java,
                *_JVM_OPTIONS,
                "-cp",
                _class_path(_JARS if self._tls is None else _JARS + _TLS_JARS),
                _MAIN,
                str(settings),
            ]
        )

    def wait_until_ready(self, timeout: float = START_TIMEOUT_S) -> Self:
        """Wait until the server serves; see ``start``."""
        return self._wait_until(lambda: "Mode:" in self.ask("srvr"), timeout)

    def restart(self) -> Self:
        """Kill (if it runs) and start again, at the same address."""
        self.kill()
        return self.start()

    def ask(self, word: str) -> str:
        """The answer to a word of four letters, such as ``srvr`` or ``cons``; empty if it does not answer."""
        with suppress(OSError), self._connection() as connection:
            connection.sendall(word.encode())
            with connection.makefile("rb") as answer:
                return answer.read().decode()
        return ""

    def expire(self, number: int, password: bytes) -> None:
        """End a session now, as its expiry would: another connection takes it over and closes it.

        Its client learns of it when it connects again, which it does at once.
        """
        what = f"the end of session {number:x}"
        eventually(lambda: self._has_ended(number, password), what, failure=self._failure)

    def _has_ended(self, number: int, password: bytes) -> bool:
        """Try to end a session. Its client may take it back in the meantime: then the connection is closed."""
        request = _CONNECT.pack(_CONNECT.size - 4, 0, 0, SESSION_TIMEOUT_MS_MIN, number, 16, password, 0)
        with suppress(OSError), self._connection() as connection:
            connection.sendall(request + _CLOSE)
            with connection.makefile("rb") as answers:
                connected = answers.read(_CONNECTED.size)
                if len(connected) == _CONNECTED.size:
                    timeout_ms = _CONNECTED.unpack(connected)[2]
                    return timeout_ms <= 0 or bool(answers.read(1))  # there is no such session, or it is closed now
        return False

    def _connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=_ANSWER_TIMEOUT_S)

    def _settings(self) -> str:
        return "\n".join(
            [
                f"tickTime={TICK_MS}",
                f"dataDir={self.directory / 'data'}",
                "clientPortAddress=127.0.0.1",
                f"clientPort={self._port}",
                "admin.enableServer=false",
                "maxClientCnxns=0",
                "4lw.commands.whitelist=*",
                f"minSessionTimeout={SESSION_TIMEOUT_MS_MIN}",
                "maxSessionTimeout=60000",
                "initLimit=50",
                "syncLimit=25",
                *self._secure_settings(),
                *(f"server.{number}=127.0.0.1:{one}:{two}" for number, (one, two) in enumerate(self._servers)),
                "",
            ]
        )

    def _secure_settings(self) -> list[str]:
        if self._tls is None:
            return []
        both = self.directory / "own.pem"  # the key and the certificate in one file
        both.touch(mode=0o600)
        both.write_text(Path(self._tls.key).read_text() + Path(self._tls.cert).read_text())
        return [
            f"secureClientPort={self._secure_port}",
            "secureClientPortAddress=127.0.0.1",
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            f"ssl.keyStore.location={both}",
            f"ssl.trustStore.location={self._tls.ca}",
        ]


class Ensemble(ServerGroup):
    """One server, or an ensemble of three. Usable as a block: killed at its end.

    Args:
        directory: for the directories of the servers.
        size: how many servers.
        tls: as of ``ZooKeeper``.
    """

    def __init__(self, directory: Path | str, size: int = 1, tls: TlsFiles | None = None) -> None:
        self.tls = tls
        ports = [Ports(free_port(), free_port()) for _ in range(size)] if size > 1 else []
        self.servers = [
            ZooKeeper(Path(directory) / f"zookeeper-{number}", number, ports, tls) for number in range(size)
        ]

    @property
    def hosts(self) -> str:
        """``HOST:PORT`` of each server, with commas between them."""
        return ",".join(server.address for server in self.servers)

    @property
    def secure_hosts(self) -> str:
        """The same of the ports for TLS."""
        return ",".join(server.secure_address for server in self.servers)

    def start(self) -> Self:
        """Start the servers that do not run, and wait until all serve.

        Raises:
            ZooKeeperFailedError: see the class.
        """
        for server in self.servers:
            if not server.is_running:
                server.launch()
        for server in self.servers:
            server.wait_until_ready()
        return self

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def pause(self) -> None:
        """Freeze all of them."""
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        """Let all of them go on."""
        for server in self.servers:
            server.resume()

    @property
    def leader(self) -> ZooKeeper:
        """The server that leads the ensemble now, or is alone.

        Raises:
            ZooKeeperFailedError: none says so.
        """
        for server in self.servers:
            if any(mode in server.ask("srvr") for mode in ("Mode: leader", "Mode: standalone")):
                return server
        raise ZooKeeperFailedError("no server leads the ensemble")


def _class_path(wanted: Sequence[str]) -> str:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise ZooKeeperFailedError(
            f"ZooKeeper's jars are those of PySpark, which is missing: {how_to_install('spark')}"
        )
    directory = Path(found.origin).parent / "jars"
    jars = [next(directory.glob(f"{pattern}.jar"), None) for pattern in wanted]
    if None in jars:
        missing = [pattern for pattern, jar in zip(wanted, jars, strict=True) if jar is None]
        raise ZooKeeperFailedError(f"{directory} has no {', '.join(missing)}: PySpark 4.2 and 4.3 have them")
    return ":".join(map(str, jars))
