"""Drivers of Spark's sink and their tasks, over several homes: the code that ships, without Spark around it.

A driver draws an epoch, and writes batch after batch. Each task of a batch runs on an executor, a process of its own
that dies; some run twice at once, and the first that is done wins. A driver dies too, and several of them write under
one name, as one that was thought dead does. What fails is given up, as Spark does: the next life of a driver goes on
after the newest batch.

Besides what holds of drivers at one broker (``drivers.check_batches``):

    S1  one home keeps the query
    S2  of an attempt everything is visible, or nothing, at whichever homes
    S3  batches of the query stand in their order in each partition, and the rows of an attempt
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from tools.simulation.application import Program
from tools.simulation.drivers import QUERY, SINK, Written
from tools.simulation.history import Put, Shared
from tools.simulation.threads import Host, Threads, pause
from tools.simulation.users import bootstrap
from tools.simulation.world import Violation
from txmq.client.client import Client
from txmq.errors import FencedError, TransactionConflictError, TxmqError
from txmq.model import TopicPartition
from txmq.spark.sink import queries, task
from txmq.spark.sink.digest import Attempt
from txmq.spark.sink.options import SinkOptions
from txmq.spark.sink.queries import Queries
from txmq.spark.sink.task import Written as Prepared

PARTITIONS = 5
TASK_S_MAX = 8.0  # a driver gives up a task
CHUNK_SIZE_BYTES = 200  # a few rows
Visible = dict[bytes, tuple[TopicPartition, int]]


@contextmanager
def small_chunks() -> Iterator[None]:
    """Tasks prepare a few rows at a time."""
    before, task.CHUNK_SIZE_BYTES = task.CHUNK_SIZE_BYTES, CHUNK_SIZE_BYTES
    try:
        yield
    finally:
        task.CHUNK_SIZE_BYTES = before


class Executor:
    """A process in which tasks of a driver run; another one takes the place of one that has died."""

    def __init__(self, program: Program, threads: Threads) -> None:
        self._program, self._threads, self._lives = program, threads, 0
        self._host: Host | None = None
        self._client: Client | None = None

    def start(self, run: Callable[[Client], None]) -> Host:
        """Run a task; the process that it runs in."""
        if self._host is None or not self._host.is_alive or self._client is None:
            self._lives += 1
            self._host = host = Host(self._threads, f"{self._program.host.name}.x{self._lives}")
            if self._program.world.chance(0.3) and not self._program.shared.stopping:
                host.countdown = self._program.world.rng.randint(1, 40)
            timeout = self._program.world.rng.choice((1.0, 3.0, 10.0))
            shared = self._program.shared
            self._client = Client(bootstrap(shared, shared.user), timeout=timeout, name=host.name, clock=host)
        client, host = self._client, self._host
        host.start("task", lambda: run(client))
        return host

    def die(self) -> None:
        """From outside."""
        if self._host is not None:
            self._host.kill()


class Attempted:
    """One attempt of a task: what it has told, and in which process it runs."""

    def __init__(self, attempt: Attempt, places: list[int], label: bytes) -> None:
        self.attempt, self.places, self.label = attempt, places, label
        self.written: Prepared | None = None
        self.error: TxmqError | None = None
        self.host: Host

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.written is not None or self.error is not None or not self.host.is_alive

    def values(self) -> list[bytes]:
        """Its rows, in order."""
        return [b"%b|%d %d %d" % (self.label, *self.attempt[2:4], n) for n in range(len(self.places))]

    def rows(self) -> Iterator[Any]:
        """The same, as Spark hands them over."""
        columns = {"value": pa.array(self.values(), pa.binary()), "partition": pa.array(self.places, pa.int32())}
        yield pa.record_batch(columns)


class SinkProgram(Program):
    """A driver, and its executors.

    Attributes:
        has_opened: the query, in any of its lives.
    """

    ends_with_the_world = False

    def __init__(self, shared: Shared, threads: Threads, name: str, told: Written) -> None:
        self._told, self._count = told, 0
        self.has_opened = False
        self._executors: list[Executor] = []
        super().__init__(shared, threads, name)

    def _died(self) -> None:
        if self.world.chance(0.5):  # executors hear of it late, or die with it
            for executor in self._executors:
                executor.die()
        super()._died()

    def main(self) -> None:
        """Incarnation after incarnation; the last one, when the world has stopped, only fences."""
        timeout = self.world.rng.choice((1.0, 3.0, 10.0))
        client = Client(bootstrap(self.shared, self.shared.user), timeout=timeout, name=self.host.name, clock=self.host)
        self._until_connected(client)
        is_last = False
        while not is_last:
            is_last = self.shared.stopping
            try:
                self._write_batches(client, is_last=is_last)
            except FencedError:
                self.world.meet("a former driver of the sink was fenced")
                is_last = False
            except TxmqError as error:
                self.world.trace(self.host.name, "gives up", type(error).__name__)
                is_last = False
            pause(self.world.rng.uniform(0.0, 0.1))
        client.close()

    def _until_connected(self, client: Client) -> None:
        while True:
            with suppress(TxmqError):
                client.ping()
                return
            pause(0.05)

    def _write_batches(self, client: Client, *, is_last: bool) -> None:
        rng = self.world.rng
        options = SinkOptions("", SINK, None, client.timeout, QUERY, None)
        self._executors = [Executor(self, self._threads) for _ in range(rng.randint(1, 2))]
        epoch = queries.new_epoch(client)
        opened = queries.open_query(client, rng.choice((SINK, None)), QUERY, epoch, self._told.newest + 1)
        self.has_opened, self._told.epoch = True, max(self._told.epoch, epoch)
        newest = opened.standing.newest
        batch = 0 if newest is None else newest + 1
        if batch <= self._told.newest and not self.shared.may_forget:
            raise Violation(f"P1: batch {self._told.newest} was told to be committed, the newest is {newest}")
        while not self.shared.stopping and not is_last:
            try:
                self._write(client, options, Attempt(QUERY, epoch, batch, 0, 0), opened.home)
            except TxmqError:
                with suppress(TxmqError):
                    Queries(client.routes.link_of_home(opened.home)).abort(QUERY, epoch=epoch, batch=batch)
                raise
            batch += 1
            pause(rng.uniform(0.0, 0.05))

    def _write(self, client: Client, options: SinkOptions, at: Attempt, home: int) -> None:
        """One batch."""
        rng = self.world.rng
        tasks = [self._begin(options, at._replace(task=number), home) for number in range(rng.randint(1, 3))]
        twins = [self._begin(options, one.attempt._replace(attempt=1), home) for one in tasks if rng.random() < 0.3]
        if rng.random() < 0.1:
            self.world.after(rng.uniform(0.0, 0.05), rng.choice(self._executors).die)
        winners = []
        for one in tasks:
            pair = [one, *(twin for twin in twins if twin.attempt.task == one.attempt.task)]
            winners.append(self._won(options, pair, home))
        was_former, transactions = (
            at.epoch < self._told.epoch,
            [one for _, found in winners for one in found.transactions],
        )
        dies = any(one.branches for one in transactions) and rng.random() < 0.2 and not self.shared.stopping
        if dies:
            txids = [one.txid for one in transactions]
            Queries(client.routes.link_of_home(home)).commit(at.query, at.epoch, at.batch, txids)
        else:
            queries.commit(client, home, at, transactions)
        if was_former and not self.shared.may_forget:
            raise Violation(f"P6: a former driver committed batch {at.batch}")
        self._told.newest = max(self._told.newest, at.batch)
        self._told.winners[at.batch] = [one.label.decode() for one, _ in winners]
        self.world.meet("a batch was committed over homes")
        if dies:
            self.world.meet("a driver died behind its decision, and told no home")
            self.host.kill()

    def _begin(self, options: SinkOptions, attempt: Attempt, home: int) -> Attempted:
        rng = self.world.rng
        self._count += 1
        places = [rng.randrange(PARTITIONS) for _ in range(rng.choice((1, 3, 12)))]
        one = Attempted(attempt, places, f"{self.host.name}.{self._count}".encode())
        for value, place in zip(one.values(), places, strict=True):
            self.shared.history.puts.append(Put((SINK, place), (value,)))

        def run(client: Client) -> None:
            try:
                one.written = task.write(client, options, attempt, one.rows(), home)
            except TxmqError as error:
                one.error = error

        one.host = rng.choice(self._executors).start(run)
        return one

    def _won(self, options: SinkOptions, pair: list[Attempted], home: int) -> tuple[Attempted, Prepared]:
        """The first attempt that is done; a task whose attempts have failed is run once more."""
        until = self.world.now + TASK_S_MAX
        for is_last in (False, True):
            while self.world.now < until:
                for one in pair:
                    if one.written is not None:
                        return one, one.written
                if all(one.is_over for one in pair):
                    break
                pause(0.01)
            errors = [one.error for one in pair if one.error is not None]
            if is_last or self.world.now >= until or self.shared.stopping:
                break
            pair = [self._begin(options, pair[0].attempt._replace(attempt=2), home)]
        raise errors[0] if errors else TransactionConflictError("an executor is lost")


def check_sink(shared: Shared, visible: Visible) -> None:
    """What must hold at the end."""
    if shared.may_forget:
        return
    homes_of_query = [node for node in shared.nodes() if QUERY in node.state.queries.named]
    if len(homes_of_query) > 1:
        raise Violation(f"S1: {len(homes_of_query)} homes keep the query")
    there: dict[bytes, set[bool]] = {}
    places: dict[int, list[tuple[int, int, bytes, int]]] = {}
    for put in shared.history.puts:
        if put.place[0] == SINK:
            label, _, words = put.values[0].partition(b"|")
            batch, _, number = map(int, words.split())
            there.setdefault(label, set()).add(put.values[0] in visible)
            if put.values[0] in visible:
                places.setdefault(put.place[1], []).append((visible[put.values[0]][1], batch, label, number))
    if torn := [label for label, seen in there.items() if len(seen) > 1]:
        raise Violation(f"S2: a part of {torn}")
    for partition, rows in places.items():
        _check_order(partition, sorted(rows))


def _check_order(partition: int, rows: list[tuple[int, int, bytes, int]]) -> None:
    newest, last = -1, dict[bytes, int]()
    for offset, batch, label, number in rows:
        if batch < newest:
            raise Violation(f"S3: batch {batch} behind batch {newest} in partition {partition} at {offset}")
        if number < last.get(label, -1):
            raise Violation(f"S3: row {number} of {label!r} behind row {last[label]} in partition {partition}")
        newest, last[label] = batch, number
