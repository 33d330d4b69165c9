"""RabbitMQ, one node: a quorum queue with publisher confirms; two classic durable queues for transactions.

Quorum queues take part in no transaction. The port mapper of Erlang (epmd) and the cookie are private to the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.model import NotInstalledError
from bench.peers.model import IN_FLIGHT, TOPICS, WAIT_S, Link, Peer, Reader, Running
from bench.peers.processes import START_S_MAX, await_port, require_client, server
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import free_port

_HOMES = Path("/usr/lib/rabbitmq/lib")
_QUEUE = TOPICS[0]
_CLASSIC = tuple(f"{topic}-classic" for topic in TOPICS)


@dataclass(frozen=True)
class RabbitMQ(Peer):
    """One node; its address is the AMQP port."""

    @contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        """The node, and the mapper: one that the node starts by itself would stay as a daemon."""
        require_client("pika", "pika")
        scripts = sorted(_HOMES.glob("rabbitmq_server-*/sbin/rabbitmq-server"))
        epmd = shutil.which("epmd")
        if not scripts or epmd is None:
            raise NotInstalledError("not installed: apt-get install rabbitmq-server")
        environment = _environment(directory.absolute())
        mapper = [epmd, "-address", "127.0.0.1", "-port", environment["ERL_EPMD_PORT"]]
        with (
            server(mapper, directory, environment),
            server([str(scripts[-1])], directory, environment) as pids,
        ):
            _await_logins(int(environment["RABBITMQ_NODE_PORT"]), directory)
            yield Running(environment["RABBITMQ_NODE_PORT"], pids)

    def connect(self, address: str) -> Link:
        """Blocking connections, and one of callbacks for many in flight."""
        return _Link(address)

    def reader(self, address: str) -> Reader:
        """A consumer of the quorum queue that acknowledges automatically."""
        return _Reader(address)


def _environment(directory: Path) -> dict[str, str]:
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


def _await_logins(port: int, directory: Path) -> None:
    """The port is open before the node takes logins."""
    import pika
    from pika.exceptions import AMQPConnectionError

    def takes_logins() -> bool:
        try:
            pika.BlockingConnection(_parameters(port)).close()
        except AMQPConnectionError:
            return False
        return True

    await_port(port, directory)
    eventually(takes_logins, "it takes logins", START_S_MAX, TimeoutError)


def _parameters(port: int | str) -> Any:
    import pika

    return pika.ConnectionParameters("127.0.0.1", int(port), heartbeat=0)


def _persistent() -> Any:
    import pika

    return pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)


class _Link(Link):
    def __init__(self, address: str) -> None:
        import pika

        self._address, self._properties = address, _persistent()
        self._connection = pika.BlockingConnection(_parameters(address))
        self._confirming = self._connection.channel()
        self._confirming.confirm_delivery()
        self._confirming.queue_declare(_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        self._transactional: Any = None
        self._flying: _Flying | None = None

    def publish(self, value: bytes) -> None:
        self._confirming.basic_publish("", _QUEUE, value, self._properties, mandatory=True)

    def publish_all(self, values: Sequence[bytes]) -> None:
        if self._flying is None:
            self._flying = _Flying(self._address)
        self._flying.publish(values)

    def transaction(self, value: bytes) -> None:
        if self._transactional is None:
            self._transactional = self._connection.channel()
            self._transactional.tx_select()
            for queue in _CLASSIC:
                self._transactional.queue_declare(queue, durable=True, arguments={"x-queue-type": "classic"})
        for queue in _CLASSIC:
            self._transactional.basic_publish("", queue, value, self._properties, mandatory=True)
        self._transactional.tx_commit()

    def close(self) -> None:
        if self._flying is not None:
            self._flying.close()
        self._connection.close()


class _Flying:
    """A connection of callbacks that keeps ``IN_FLIGHT`` messages unconfirmed."""

    def __init__(self, address: str) -> None:
        import pika

        self._values: Sequence[bytes] = ()
        self._sent = self._confirmed = self._before = self._refused = 0
        self._properties = _persistent()
        self._channel: Any = None
        self._connection = pika.SelectConnection(_parameters(address), on_open_callback=self._opened)
        self._connection.ioloop.start()

    def publish(self, values: Sequence[bytes]) -> None:
        """Publish all; return when all are confirmed."""
        self._values, self._before, self._sent, self._confirmed = values, self._before + self._sent, 0, 0
        if values:
            self._fill()
            self._connection.ioloop.start()
        if self._refused or self._confirmed < len(values):
            raise AssertionError(f"{self._confirmed} of {len(values)} confirmed, {self._refused} refused")

    def close(self) -> None:
        """Close the connection."""
        self._connection.add_on_close_callback(lambda *_: self._connection.ioloop.stop())
        self._connection.close()
        self._connection.ioloop.start()

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._confirm)

    def _confirm(self, channel: Any) -> None:
        self._channel = channel
        channel.confirm_delivery(self._answered, callback=lambda _: self._connection.ioloop.stop())

    def _fill(self) -> None:
        while self._sent < len(self._values) and self._sent - self._confirmed < IN_FLIGHT:
            self._channel.basic_publish("", _QUEUE, self._values[self._sent], self._properties)
            self._sent += 1

    def _answered(self, frame: Any) -> None:
        """A confirm may stand for all before it; tags count the messages of the channel."""
        self._refused += frame.method.NAME != "Basic.Ack"
        tag = frame.method.delivery_tag - self._before
        self._confirmed = tag if frame.method.multiple else self._confirmed + 1
        if self._confirmed < len(self._values):
            self._fill()
        else:
            self._connection.ioloop.stop()


class _Reader(Reader):
    def __init__(self, address: str) -> None:
        import pika

        self._connection = pika.BlockingConnection(_parameters(address))
        self._values: list[bytes] = []
        channel = self._connection.channel()
        channel.queue_declare(_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_purge(_QUEUE)
        channel.basic_consume(_QUEUE, partial(_arrived, self._values), auto_ack=True)

    def read(self) -> Sequence[bytes]:
        self._connection.process_data_events(WAIT_S)
        values = list(self._values)
        self._values.clear()
        return values

    def close(self) -> None:
        self._connection.close()


def _arrived(values: list[bytes], _channel: Any, _method: Any, _properties: Any, body: bytes) -> None:
    values.append(body)
