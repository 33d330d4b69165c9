"""Redis Streams: one server whose append-only file is synced before each answer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.model import IN_FLIGHT, TOPICS, WAIT_S, Link, Peer, Reader, Running
from bench.peers.processes import await_port, require_client, require_program, server
from txmq.testing.processes.broker import free_port

_FIELD = b"value"


@dataclass(frozen=True)
class RedisStreams(Peer):
    """One server.

    Attributes:
        appendfsync: the server's setting.
    """

    appendfsync: str = "always"

    @contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        """One server process."""
        require_client("redis", "redis")
        program, port = require_program("redis-server", "apt-get install redis-server"), free_port()
        settings = {"bind": "127.0.0.1", "port": str(port), "dir": str(directory.absolute()), "save": ""}
        settings |= {"appendonly": "yes", "appendfsync": self.appendfsync}
        words = [word for name, text in settings.items() for word in (f"--{name}", text)]
        with server([program, *words], directory, os.environ) as pids:
            await_port(port, directory)
            yield Running(str(port), pids)

    def connect(self, address: str) -> Link:
        """One connection."""
        return _Link(address)

    def reader(self, address: str) -> Reader:
        """XREAD with BLOCK, from the stream's end."""
        return _Reader(address)


def _connected(address: str) -> Any:
    import redis

    return redis.Redis("127.0.0.1", int(address))


class _Link(Link):
    def __init__(self, address: str) -> None:
        self._client = _connected(address)

    def publish(self, value: bytes) -> None:
        self._client.xadd(TOPICS[0], {_FIELD: value})

    def publish_all(self, values: Sequence[bytes]) -> None:
        for first in range(0, len(values), IN_FLIGHT):
            with self._client.pipeline(transaction=False) as pipeline:
                for value in values[first : first + IN_FLIGHT]:
                    pipeline.xadd(TOPICS[0], {_FIELD: value})
                pipeline.execute()

    def transaction(self, value: bytes) -> None:
        """MULTI, the commands, EXEC."""
        with self._client.pipeline(transaction=True) as pipeline:
            for topic in TOPICS:
                pipeline.xadd(topic, {_FIELD: value})
            pipeline.execute()

    def close(self) -> None:
        self._client.close()


class _Reader(Reader):
    def __init__(self, address: str) -> None:
        self._client = _connected(address)
        self._last: Any = "0-0"
        for entry, _ in self._client.xrevrange(TOPICS[0], count=1):
            self._last = entry

    def read(self) -> Sequence[bytes]:
        values: list[bytes] = []
        for _, entries in self._client.xread({TOPICS[0]: self._last}, count=1000, block=int(WAIT_S * 1000)) or ():
            values.extend(fields[_FIELD] for _, fields in entries)
            self._last = entries[-1][0]
        return values

    def close(self) -> None:
        self._client.close()
