"""txmq against its peers, from its Python client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import txmq
from bench.peers.model import IN_FLIGHT, TOPICS, WAIT_S, Link, Peer, Publish, Reader, Running
from bench.peers.processes import require_client
from txmq.testing.processes.broker import BrokerProcess

TIMEOUT_S = 60.0
KEY = b"key"


@dataclass(frozen=True)
class Txmq(Peer):
    """One broker.

    Attributes:
        sync: the broker's setting.
    """

    sync: str = "always"

    @contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        """One broker process with both topics, of one partition each."""
        with BrokerProcess(directory / "data", settings={"sync": self.sync}) as broker:
            with txmq.connect(broker.address, timeout=TIMEOUT_S) as client:
                for topic in TOPICS:
                    client.topics.create(topic, partitions=1)
            yield Running(broker.address, lambda: [pid for pid in (broker.pid,) if pid is not None])

    def connect(self, address: str) -> Link:
        """A client with a producer."""
        return _Link(address)

    @asynccontextmanager
    async def tasks(self, address: str) -> AsyncIterator[Publish]:
        """A producer of ``txmq.aio``."""
        require_client("greenlet", "greenlet")
        import txmq.aio

        async with await txmq.aio.connect(address, timeout=TIMEOUT_S) as client:
            yield partial(client.producer(timeout=TIMEOUT_S).send, TOPICS[0], partition=0)

    def reader(self, address: str) -> Reader:
        """A long poll from the end of the topic."""
        return _Reader(address)


class _Link(Link):
    def __init__(self, address: str) -> None:
        self._client = txmq.connect(address, timeout=TIMEOUT_S)
        self._producer = self._client.producer(timeout=TIMEOUT_S)

    def publish(self, value: bytes) -> None:
        self._producer.send(TOPICS[0], value, partition=0)

    def publish_all(self, values: Sequence[bytes]) -> None:
        for first in range(0, len(values), IN_FLIGHT):
            self._producer.send_many(TOPICS[0], [(KEY, value) for value in values[first : first + IN_FLIGHT]])

    def transaction(self, value: bytes) -> None:
        with self._producer.transaction():
            for topic in TOPICS:
                self._producer.send(topic, value, partition=0)

    def close(self) -> None:
        self._client.close()


class _Reader(Reader):
    def __init__(self, address: str) -> None:
        self._client = txmq.connect(address, timeout=TIMEOUT_S)
        self._offset = self._client.offsets(TOPICS[0], 0).end

    def read(self) -> Sequence[bytes]:
        messages = self._client.fetch(TOPICS[0], 0, self._offset, timeout=WAIT_S)
        self._offset += len(messages)
        return [message.value or b"" for message in messages]

    def close(self) -> None:
        self._client.close()
