"""RocketMQ: a name server, and a broker with the proxy that its Python client talks to; synchronous flush.

A transaction of RocketMQ holds one message: a half message, then its commit; the other works go to a topic of plain
messages, since a topic is of one kind. A group of readers begins at the start of its topic and takes 32 messages at a
time: what nobody reads goes to a topic of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.jars import java
from bench.peers.model import TOPICS, VALUE, Link, Peer, Reader, Running, windowed
from bench.peers.processes import START_S_MAX, await_port, require_client, server
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import free_port

_CLUSTER = "DefaultCluster"
_NAMES, _BROKER = "org.apache.rocketmq.namesrv.NamesrvStartup", "org.apache.rocketmq.proxy.ProxyStartup"
_ADMIN = "org.apache.rocketmq.tools.command.MQAdminStartup"
_HEAP = ("-Xms512m", "-Xmx1g")
_UNREAD = "bench-unread"
_KINDS = {TOPICS[0]: "NORMAL", _UNREAD: "NORMAL", TOPICS[1]: "TRANSACTION"}
_GROUP = "bench-readers"
_REQUEST_S = 30
_READ_MAX, _INVISIBLE_S, _POLL_S = 32, 60, 1


@dataclass(frozen=True)
class RocketMQ(Peer):
    """One broker; its address is the proxy's."""

    @contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        """Both servers and both topics."""
        require_client("rocketmq", "rocketmq-python-client")
        home, names, proxy = directory.absolute(), free_port(), free_port()
        environment = {**os.environ, "ROCKETMQ_HOME": str(home), "HOME": str(home)}
        own = (*_HEAP, f"-Duser.home={home}")
        naming = java("rocketmq", _NAMES, ["-c", str(_naming(home, names))], own)
        words = ["-pm", "local", "-n", f"127.0.0.1:{names}", "-bc", str(_broker(home)), "-pc", str(_proxy(home, proxy))]
        with server(naming, home, environment) as naming_pids:
            await_port(names, home)
            with server(java("rocketmq", _BROKER, words, own), home, environment) as pids:
                await_port(proxy, home)
                for topic, kind in _KINDS.items():
                    words = ["updateTopic", "-t", topic, "-r", "1", "-w", "1", "-a", f"+message.type={kind}"]
                    _administer(words, f"127.0.0.1:{names}", environment)
                _administer(["updateSubGroup", "-g", _GROUP], f"127.0.0.1:{names}", environment)
                yield Running(f"127.0.0.1:{proxy}", lambda: [*naming_pids(), *pids()])

    def connect(self, address: str) -> Link:
        """A producer with a checker of transactions."""
        return _Link(address)

    def reader(self, address: str) -> Reader:
        """A simple consumer; ``read`` waits a second, which is the least that the proxy takes."""
        return _Reader(address)


def _naming(home: Path, port: int) -> Path:
    path = home / "names.conf"
    settings = {"bindAddress": "127.0.0.1", "listenPort": port, "rocketmqHome": home, "kvConfigPath": home / "kv.json"}
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return path


def _broker(home: Path) -> Path:
    path = home / "broker.conf"
    store = home / "store"
    settings = {
        "brokerClusterName": _CLUSTER, "brokerName": "broker-a", "brokerId": 0, "brokerIP1": "127.0.0.1",
        "bindAddress": "127.0.0.1", "listenPort": free_port(), "haListenPort": free_port(), "storePathRootDir": store,
        "storePathCommitLog": store / "commitlog", "flushDiskType": "SYNC_FLUSH", "brokerRole": "ASYNC_MASTER",
        "mappedFileSizeCommitLog": 128 << 20, "rocketmqHome": home,
    }  # fmt: skip
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return path


def _proxy(home: Path, port: int) -> Path:
    path = home / "proxy.json"
    path.write_text(json.dumps({
        "rocketMQClusterName": _CLUSTER, "proxyMode": "LOCAL", "grpcServerPort": port,
        "remotingListenPort": free_port(), "enableACL": False,
    }))  # fmt: skip
    return path


def _administer(words: Sequence[str], names: str, environment: dict[str, str]) -> None:
    """The cluster is known to the name server a moment after the broker serves."""
    command = java("rocketmq", _ADMIN, [*words, "-n", names, "-c", _CLUSTER])

    def is_done() -> bool:
        said = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return "success" in said.stdout

    eventually(is_done, " ".join(words), START_S_MAX, TimeoutError)


def _configuration(address: str) -> Any:
    from rocketmq import ClientConfiguration, Credentials

    return ClientConfiguration(address, Credentials(), request_timeout=_REQUEST_S)


def _message(topic: str, value: bytes) -> Any:
    from rocketmq import Message

    message = Message()
    message.topic, message.body = topic, value
    return message


def _plain(value: bytes) -> Any:
    return _message(_UNREAD if value == VALUE else TOPICS[0], value)


class _Link(Link):
    def __init__(self, address: str) -> None:
        from rocketmq import Producer, TransactionChecker, TransactionResolution

        class Checker(TransactionChecker):  # type: ignore[misc]
            def check(self, message: object) -> Any:
                return TransactionResolution.ROLLBACK

        self._producer = Producer(_configuration(address), tuple(_KINDS), Checker())
        self._producer.startup()

    def publish(self, value: bytes) -> None:
        self._producer.send(_plain(value))

    def publish_all(self, values: Sequence[bytes]) -> None:
        windowed(lambda value: self._producer.send_async(_plain(value)), values)

    def transaction(self, value: bytes) -> None:
        transaction = self._producer.begin_transaction()
        self._producer.send(_message(TOPICS[1], value), transaction)
        transaction.commit()

    def close(self) -> None:
        self._producer.shutdown()


class _Reader(Reader):
    def __init__(self, address: str) -> None:
        from rocketmq import FilterExpression, SimpleConsumer

        subscriptions = {TOPICS[0]: FilterExpression()}
        self._consumer = SimpleConsumer(_configuration(address), _GROUP, subscriptions, _POLL_S)
        self._consumer.startup()
        eventually(self._has_looked, "the consumer may receive", START_S_MAX, TimeoutError)

    def _has_looked(self) -> bool:
        """A group begins at the end as of its first look; the proxy refuses one until it knows the consumer."""
        from rocketmq.v5.exception import ClientException

        try:
            self.read()
        except ClientException:
            return False
        return True

    def read(self) -> Sequence[bytes]:
        messages = self._consumer.receive(_READ_MAX, _INVISIBLE_S)
        for message in messages:
            self._consumer.ack_async(message)
        return [message.body for message in messages]

    def close(self) -> None:
        self._consumer.shutdown()
