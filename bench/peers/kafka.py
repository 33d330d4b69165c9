"""Kafka, one node that is broker and controller (KRaft), from confluent-kafka; tasks of asyncio from aiokafka."""

from __future__ import annotations

import base64
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.jars import java
from bench.peers.model import IN_FLIGHT, TOPICS, WAIT_S, Link, Peer, Publish, Reader, Running
from bench.peers.processes import await_port, require_client, server
from txmq.testing.processes.broker import free_port

_TIMEOUT_S = 60.0
_HEAP = ("-Xms512m", "-Xmx1g")
_READ_MAX = 1000
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
controller.quorum.voters=1@127.0.0.1:{controller}
log.dirs={logs}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""
_FLUSH_EACH = "log.flush.interval.messages=1\n"


@dataclass(frozen=True)
class Kafka(Peer):
    """One node.

    Attributes:
        flushes_each: it syncs each batch before it acknowledges (``log.flush.interval.messages = 1``).
    """

    flushes_each: bool = False

    @contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        """A node over a formatted directory, and both topics."""
        require_client("confluent_kafka", "confluent-kafka")
        port, properties = free_port(), directory.absolute() / "server.properties"
        text = _PROPERTIES.format(port=port, controller=free_port(), logs=directory.absolute() / "logs")
        properties.write_text(text + (_FLUSH_EACH if self.flushes_each else ""))
        name = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        form = ["format", "-t", name, "-c", str(properties)]
        command = java("kafka", "kafka.Kafka", [str(properties)], _HEAP)
        subprocess.run(java("kafka", "kafka.tools.StorageTool", form), check=True, capture_output=True)
        with server(command, directory, os.environ) as pids:
            await_port(port, directory)
            _create_topics(f"127.0.0.1:{port}")
            yield Running(f"127.0.0.1:{port}", pids)

    def connect(self, address: str) -> Link:
        """An idempotent producer, and a transactional one as soon as it is needed."""
        return _Link(address)

    @asynccontextmanager
    async def tasks(self, address: str) -> AsyncIterator[Publish]:
        """An idempotent producer of aiokafka, which is a library that txmq needs, too."""
        from aiokafka import AIOKafkaProducer

        producer = AIOKafkaProducer(bootstrap_servers=address, acks="all", enable_idempotence=True, linger_ms=0)
        await producer.start()
        try:
            yield partial(producer.send_and_wait, TOPICS[0], partition=0)
        finally:
            await producer.stop()

    def reader(self, address: str) -> Reader:
        """A consumer of committed messages."""
        return _Reader(address)


def _create_topics(address: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": address})
    made = admin.create_topics([NewTopic(topic, 1, 1) for topic in TOPICS], operation_timeout=_TIMEOUT_S)
    for future in made.values():
        future.result()


class _Link(Link):
    def __init__(self, address: str) -> None:
        self._settings = {"bootstrap.servers": address, "acks": "all", "linger.ms": 0}
        self._settings |= {"enable.idempotence": True, "socket.nagle.disable": True}
        self._producer = self._made({})
        self._transactional: Any = None
        self._waiting, self._failures = 0, list[object]()

    def _made(self, settings: dict[str, object]) -> Any:
        from confluent_kafka import Producer

        return Producer(self._settings | settings)

    def publish(self, value: bytes) -> None:
        self._send(value)
        self._wait(0)

    def publish_all(self, values: Sequence[bytes]) -> None:
        for value in values:
            self._wait(IN_FLIGHT - 1)
            self._send(value)
        self._wait(0)

    def _send(self, value: bytes) -> None:
        self._waiting += 1
        self._producer.produce(TOPICS[0], value, partition=0, on_delivery=self._delivered)

    def _wait(self, unanswered_max: int) -> None:
        while self._waiting > unanswered_max:
            self._producer.poll(1.0)
        if self._failures:
            raise AssertionError(f"Kafka refused: {self._failures[0]}")

    def _delivered(self, error: object, _message: object) -> None:
        self._waiting -= 1
        if error is not None:
            self._failures.append(error)

    def transaction(self, value: bytes) -> None:
        if self._transactional is None:
            self._transactional = self._made({"transactional.id": uuid.uuid4().hex})
            self._transactional.init_transactions(_TIMEOUT_S)
        self._transactional.begin_transaction()
        for topic in TOPICS:
            self._transactional.produce(topic, value, partition=0)
        self._transactional.commit_transaction(_TIMEOUT_S)

    def close(self) -> None:
        self._producer.flush(_TIMEOUT_S)


class _Reader(Reader):
    def __init__(self, address: str) -> None:
        from confluent_kafka import Consumer, TopicPartition

        self._consumer = Consumer(
            {"bootstrap.servers": address, "group.id": uuid.uuid4().hex, "enable.auto.commit": False}
        )
        where = TopicPartition(TOPICS[0], 0)
        _, where.offset = self._consumer.get_watermark_offsets(where, timeout=_TIMEOUT_S)
        self._consumer.assign([where])

    def read(self) -> Sequence[bytes]:
        messages = self._consumer.consume(1, WAIT_S) + self._consumer.consume(_READ_MAX, 0)
        for message in messages:
            if message.error() is not None:
                raise AssertionError(f"Kafka refused: {message.error()}")
        return [message.value() for message in messages]

    def close(self) -> None:
        self._consumer.close()
