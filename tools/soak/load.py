"""The load: workers that each repeat one kind of work until they are told to stop, through the real client."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import txmq
from txmq.xa.last_resource.resource import LastResource
from txmq.xid import Xid

SMALL, LARGE, WIDE = "small", "large", "wide"
WIDE_PARTITIONS = 200
PREPARED_KEPT = 300  # in doubt at any moment
COUNT_MAX = 50_000_000  # of rounds of one worker: the soak ends there, whatever time is left
_FORMAT_ID = 0x50A4
_TIMEOUT_S = 60.0
_SMALL_BYTES, _ROW_BYTES, _MIB = 100, 1000, 1 << 20

Round = Callable[[], object]


class Worker:
    """One thread that repeats a round.

    Attributes:
        rounds: how many were done.
        failure: what ended it before it was told to stop.
    """

    def __init__(self, name: str, begin: Callable[[ExitStack], Round], stop: threading.Event) -> None:
        self.name, self.rounds = name, 0
        self.failure: BaseException | None = None
        self._begin, self._stop = begin, stop
        self._thread = threading.Thread(target=self._run, name=f"soak-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end of its last round; False if it did not end in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with ExitStack() as resources:
                step = self._begin(resources)
                while not self._stop.is_set() and self.rounds < COUNT_MAX:
                    step()
                    self.rounds += 1
        except BaseException as error:  # noqa: BLE001  the soak reports it, and ends
            self.failure = error
        self._stop.set()


class Load:
    """All workers against one broker, over one directory of the application's own (an SQLite file)."""

    def __init__(self, address: str, directory: Path, seed: int) -> None:
        self._address, self._directory, self._seed = address, directory, seed
        self.stop = threading.Event()
        kinds: list[tuple[str, Callable[[ExitStack], Round]]] = [
            ("one at a time", self._small), ("pipelined", self._pipelined), ("wide", self._wide),
            ("100 KB batches", lambda stack: self._batches(stack, 100)),
            ("1 MiB batches", lambda stack: self._batches(stack, 1000)),
            ("1 MiB values", self._values), ("local transactions", self._local), ("row and message", self._row),
            ("prepared", self._prepared), ("listing", self._listing), ("member a", self._member),
            ("member b", self._member), ("come and go", self._visitor),
        ]  # fmt: skip
        self.workers = [Worker(name, begin, self.stop) for name, begin in kinds]

    def prepare(self) -> None:
        """Make the topics; old segments go by size, so that the disk's use is bounded."""
        kept: dict[str, Any] = {"segment_size_bytes": 8 << 20, "retention_size_bytes": 32 << 20}
        with txmq.connect(self._address) as client:
            client.topics.create(SMALL, partitions=4, **kept)
            client.topics.create(LARGE, partitions=2, **kept)
            client.topics.create(WIDE, partitions=WIDE_PARTITIONS, **kept)

    def start(self) -> None:
        """Let every worker begin."""
        for worker in self.workers:
            worker.start()

    def end(self, timeout: float) -> Iterator[str]:
        """Stop all of them; what failed, by name."""
        self.stop.set()
        for worker in self.workers:
            if not worker.join(timeout):
                yield f"{worker.name}: still busy {timeout:g} s after the end"
            elif worker.failure is not None:
                yield f"{worker.name}: {worker.failure!r}"

    # --- what they do ------------------------------------------------------------------------------------------------

    def _client(self, stack: ExitStack) -> txmq.Client:
        return stack.enter_context(txmq.connect(self._address))

    def _producer(self, stack: ExitStack) -> txmq.Producer:
        return stack.enter_context(self._client(stack).producer(timeout=_TIMEOUT_S))

    def _small(self, stack: ExitStack) -> Round:
        producer, value = self._producer(stack), bytes(_SMALL_BYTES)
        return lambda: producer.send(SMALL, value)

    def _pipelined(self, stack: ExitStack) -> Round:
        producer, value = self._producer(stack), bytes(_SMALL_BYTES)

        def step() -> None:
            for future in [producer.send_async(SMALL, value) for _ in range(200)]:
                future.result(_TIMEOUT_S)

        return step

    def _wide(self, stack: ExitStack) -> Round:
        """Over more partitions than the broker may have files open."""
        producer, chance = self._producer(stack), random.Random(self._seed)
        return lambda: producer.send(WIDE, b"w", partition=chance.randrange(WIDE_PARTITIONS))

    def _batches(self, stack: ExitStack, rows: int) -> Round:
        producer = self._producer(stack)
        pairs = [(b"%d" % number, bytes(_ROW_BYTES)) for number in range(rows)]
        return lambda: producer.send_many(LARGE, pairs)

    def _values(self, stack: ExitStack) -> Round:
        producer, value = self._producer(stack), bytes(_MIB)
        return lambda: producer.send(LARGE, value)

    def _local(self, stack: ExitStack) -> Round:
        producer = self._producer(stack)

        def step() -> None:
            with producer.transaction(timeout=_TIMEOUT_S) as tx:
                for topic in (SMALL, SMALL, LARGE):
                    tx.send(topic, b"t", key=b"k")

        return step

    def _row(self, stack: ExitStack) -> Round:
        path = str(self._directory / "rows.sqlite")
        resource = LastResource("soak", connect=lambda: sqlite3.connect(path, check_same_thread=False))
        resource.install()
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY)")
        connection.commit()
        connection.close()
        producer = self._producer(stack)

        def step() -> None:
            with producer.transaction(resource, timeout=_TIMEOUT_S) as tx:
                tx.connection(resource).cursor().execute("INSERT INTO orders DEFAULT VALUES")
                tx.send(SMALL, b"row", key=b"k")

        return step

    def _prepared(self, stack: ExitStack) -> Round:
        """Branches of another transaction manager: prepared, in doubt for a while, committed."""
        client = self._client(stack)
        producer, resource = stack.enter_context(client.producer(timeout=_TIMEOUT_S)), client.xa_resource()
        numbers, prepared = iter(range(COUNT_MAX)), deque[Xid]()

        def step() -> None:
            xid = Xid(_FORMAT_ID, b"soak-%d" % next(numbers), b"")
            resource.start(xid)
            producer.send(SMALL, b"prepared")
            resource.end(xid)
            resource.prepare(xid)
            prepared.append(xid)
            if len(prepared) > PREPARED_KEPT:
                resource.commit(prepared.popleft())

        return step

    def _listing(self, stack: ExitStack) -> Round:
        client = self._client(stack)

        def step() -> None:
            client.transactions.list("in-doubt")
            self.stop.wait(0.2)

        return step

    def _member(self, stack: ExitStack) -> Round:
        consumer = stack.enter_context(self._client(stack).consumer("soak", [SMALL, LARGE], start="latest"))

        def step() -> None:
            for message in consumer.poll(500, timeout=0.5):
                message.ack()

        return step

    def _visitor(self, stack: ExitStack) -> Round:
        """A client that connects, sends and goes."""

        def step() -> None:
            with txmq.connect(self._address) as client, client.producer(timeout=_TIMEOUT_S) as producer:
                producer.send(SMALL, b"visit")
            self.stop.wait(1.0)

        return step
