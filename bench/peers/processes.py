"""NATS and RabbitMQ as plain child processes on free ports of loopback, gone with everything they wrote at the end.

Both are Debian packages whose services are not needed: ``apt-get install nats-server rabbitmq-server``. Their clients
are the extra ``bench`` of this project. What is missing is said in the row (``NotInstalledError``), never a failure.

Invariants:
* Nothing of the machine's own configuration or state is used: configuration, data, cookie and the port mapper of
  Erlang (epmd) are private to the run.
* Every process started here has ended when the block ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from bench.model import NotInstalledError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import free_port

START_S_MAX = 60.0
STOP_S_MAX = 20.0
_RABBIT_HOMES = Path("/usr/lib/rabbitmq/lib")


def require_client(module: str, package: str) -> None:
    """Raise NotInstalledError if the Python client is missing."""
    if find_spec(module) is None:
        raise NotInstalledError(f"not installed: pip install {package}")


def nats_version(program: str) -> tuple[int, ...]:
    """As in (2, 9, 10)."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in said.rpartition("v")[2].split("-")[0].split("."))


@contextmanager
def nats(directory: Path, *, sync_always: bool = False) -> Iterator[int]:
    """NATS with JetStream; its port."""
    require_client("nats", "nats-py")
    program = shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise NotInstalledError("not installed: apt-get install nats-server")
    if sync_always and nats_version(program) < (2, 10):
        version = ".".join(map(str, nats_version(program)))
        raise NotInstalledError(f"NATS {version} cannot sync before it acknowledges; 2.10 can (sync_interval: always)")
    port = free_port()
    sync = ", sync_interval: always" if sync_always else ""
    store = (directory / "jetstream").absolute()
    configuration = directory / "nats.conf"
    configuration.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{store}"{sync} }}\n')
    with _running([program, "-c", str(configuration)], directory, os.environ):
        _await_port(port, directory)
        yield port


@contextmanager
def rabbitmq(directory: Path) -> Iterator[int]:
    """RabbitMQ, one node; its AMQP port."""
    require_client("pika", "pika")
    scripts = sorted(_RABBIT_HOMES.glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    epmd = shutil.which("epmd")
    if not scripts or epmd is None:
        raise NotInstalledError("not installed: apt-get install rabbitmq-server")
    environment = _rabbit_environment(directory.absolute())
    mapper = [epmd, "-address", "127.0.0.1", "-port", environment["ERL_EPMD_PORT"]]
    # The mapper is ours to end: one that the node starts by itself would stay behind as a daemon.
    with _running(mapper, directory, environment), _running([str(scripts[-1])], directory, environment):
        _await_amqp(int(environment["RABBITMQ_NODE_PORT"]), directory)
        yield int(environment["RABBITMQ_NODE_PORT"])


def _rabbit_environment(directory: Path) -> dict[str, str]:
    port = free_port()
    (directory / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\nlog.file.level = warning\nlog.console = false\n"
        "disk_free_limit.absolute = 100MB\n"
    )
    (directory / "enabled_plugins").write_text("[].\n")
    return {
        **os.environ,
        "HOME": str(directory),  # where the Erlang cookie goes
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_PORT": str(free_port()),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
    }


@contextmanager
def _running(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A child in a process group of its own; all of the group is ended with the block."""
    with (directory / "output.log").open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment), cwd=directory,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        _signal_group(process, signal.SIGTERM)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pass
        _signal_group(process, signal.SIGKILL)  # whatever the first child started
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _await_port(port: int, directory: Path) -> None:
    def serves() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            return False
        return True

    log = directory / "output.log"
    eventually(serves, lambda: f"it serves: {log.read_text()[-500:]}", START_S_MAX, TimeoutError)


def _await_amqp(port: int, directory: Path) -> None:
    """The port is open before the node takes logins."""
    import pika
    from pika.exceptions import AMQPConnectionError

    def takes_logins() -> bool:
        try:
            pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)).close()
        except AMQPConnectionError:
            return False
        return True

    _await_port(port, directory)
    eventually(takes_logins, "it takes logins", START_S_MAX, TimeoutError)
