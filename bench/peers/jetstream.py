"""NATS JetStream: one server, a stream of both subjects in files."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count as counting
from pathlib import Path
from typing import Any

from bench.model import DeclinedError, NotInstalledError
from bench.peers.model import IN_FLIGHT, TOPICS, VALUE, WAIT_S, Link, Peer, Publish, Reader, Running
from bench.peers.processes import await_port, require_client, require_program, server
from txmq.testing.processes.broker import free_port

INSTALL = "GOBIN=~/.cache/txmq-peers/bin go install github.com/nats-io/nats-server/v2@v2.12.1"
SYNC_ALWAYS, ATOMIC_BATCHES = (2, 10), (2, 12)  # the first versions that can
_TIMEOUT_S = 60.0
_STREAM = "bench"
_CREATE = f"$JS.API.STREAM.CREATE.{_STREAM}"
_batches = counting(1)


def version_of(program: str) -> tuple[int, ...]:
    """As in (2, 9, 10)."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in said.rpartition("v")[2].split("-")[0].split("."))


@dataclass(frozen=True)
class JetStream(Peer):
    """One server.

    Attributes:
        sync_always: it syncs before it acknowledges.
    """

    sync_always: bool = False

    @contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        """One server process and the stream."""
        require_client("nats", "nats-py")
        program = require_program("nats-server", f"{INSTALL} (an older one: apt-get install nats-server)")
        version = version_of(program)
        if self.sync_always and version < SYNC_ALWAYS:
            said = ".".join(map(str, version))
            raise NotInstalledError(f"NATS {said} cannot sync before it acknowledges; 2.10 can: {INSTALL}")
        port, configuration = free_port(), directory / "nats.conf"
        sync = ", sync_interval: always" if self.sync_always else ""
        store = (directory / "jetstream").absolute()
        configuration.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{store}"{sync} }}\n')
        with server([program, "-c", str(configuration)], directory, os.environ) as pids:
            await_port(port, directory)
            _create_stream(f"nats://127.0.0.1:{port}", version)
            yield Running(f"nats://127.0.0.1:{port}", pids)

    def connect(self, address: str) -> Link:
        """A connection with an event loop of its own."""
        return _Link(address)

    @asynccontextmanager
    async def tasks(self, address: str) -> AsyncIterator[Publish]:
        """One connection."""
        import nats

        connection = await nats.connect(address)
        try:
            yield partial(connection.jetstream(timeout=_TIMEOUT_S).publish, TOPICS[0])
        finally:
            await connection.close()

    def reader(self, address: str) -> Reader:
        """A push consumer that acknowledges nothing."""
        return _Reader(address)


def _create_stream(address: str, version: tuple[int, ...]) -> None:
    """By a request as the protocol has it: the client does not know all fields."""
    asked: dict[str, object] = {"name": _STREAM, "subjects": list(TOPICS), "storage": "file", "retention": "limits"}
    asked |= {"max_consumers": -1, "max_msgs": -1, "max_bytes": -1, "num_replicas": 1, "discard": "old"}
    if version >= ATOMIC_BATCHES:
        asked["allow_atomic"] = True
    with _Connected(address) as connected:
        answer = connected.run(connected.connection.request(_CREATE, json.dumps(asked).encode(), timeout=_TIMEOUT_S))
    _require_good(answer)


def _require_good(answer: Any) -> None:
    said = json.loads(answer.data)
    if "error" in said:
        raise AssertionError(f"NATS refused: {said['error']}")


class _Connected:
    """A connection and the event loop that drives it, in the calling thread."""

    def __init__(self, address: str) -> None:
        import nats

        self._loop = asyncio.new_event_loop()
        self.connection: Any = self.run(nats.connect(address))

    def __enter__(self) -> _Connected:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        self.run(self.connection.close())
        self._loop.close()


class _Link(Link):
    def __init__(self, address: str) -> None:
        self._connected = _Connected(address)
        self._connection = self._connected.connection
        self._stream = self._connection.jetstream(timeout=_TIMEOUT_S)
        version = self._connection.connected_server_version
        self._is_atomic = (version.major, version.minor) >= ATOMIC_BATCHES

    def publish(self, value: bytes) -> None:
        self._connected.run(self._stream.publish(TOPICS[0], value))

    def alone(self, count: int) -> list[float]:
        """Timed inside of the loop, as an asynchronous program would run."""
        return sorted(self._connected.run(self._one_by_one(count)))

    async def _one_by_one(self, count: int) -> list[float]:
        clock, taken = time.perf_counter, []
        for _ in range(count):
            started = clock()
            await self._stream.publish(TOPICS[0], VALUE)
            taken.append(clock() - started)
        return taken

    def publish_all(self, values: Sequence[bytes]) -> None:
        self._connected.run(self._all(values))

    async def _all(self, values: Sequence[bytes]) -> None:
        """As many callers as may be in flight; the client's ``publish_async`` is slower."""
        left = iter(values)

        async def caller() -> None:
            for value in left:
                await self._stream.publish(TOPICS[0], value)

        await asyncio.gather(*(caller() for _ in range(min(IN_FLIGHT, len(values)))))

    def transaction(self, value: bytes) -> None:
        """An atomic batch, all of one stream: the client has no call for it, the protocol has headers."""
        if not self._is_atomic:
            raise DeclinedError("no transactions before NATS 2.12 (atomic batches)")
        self._connected.run(self._batch(value))

    async def _batch(self, value: bytes) -> None:
        headers = {"Nats-Batch-Id": f"{os.getpid()}-{next(_batches)}"}
        last = len(TOPICS)
        for number, topic in enumerate(TOPICS, 1):
            told = headers | {"Nats-Batch-Sequence": str(number)}
            if number < last:
                await self._connection.publish(topic, value, headers=told)
            else:
                told["Nats-Batch-Commit"] = "1"
                _require_good(await self._connection.request(topic, value, timeout=_TIMEOUT_S, headers=told))

    def close(self) -> None:
        self._connected.close()


class _Reader(Reader):
    def __init__(self, address: str) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        self._connected = _Connected(address)
        stream = self._connected.connection.jetstream(timeout=_TIMEOUT_S)
        config = ConsumerConfig(deliver_policy=DeliverPolicy.NEW, ack_policy=AckPolicy.NONE)
        self._subscription = self._connected.run(stream.subscribe(TOPICS[0], config=config))

    def read(self) -> Sequence[bytes]:
        return self._connected.run(self._read())  # type: ignore[no-any-return]

    async def _read(self) -> Sequence[bytes]:
        from nats.errors import TimeoutError as NoMessageError

        try:
            values = [(await self._subscription.next_msg(timeout=WAIT_S)).data]
        except NoMessageError:
            return []
        while self._subscription.pending_msgs:
            values.append((await self._subscription.next_msg(timeout=WAIT_S)).data)
        return values

    def close(self) -> None:
        self._connected.close()
