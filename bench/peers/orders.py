"""A row and its message: what a service does for an order, until a reader in another process has the message.

Ways over the same database: txmq's last resource; txmq's outbox, whose relay is a process of its own or a thread of the
service (``own_outbox.py``); the row and an outbox row in one commit, which a relay brings into a peer (``relay.py``);
and that commit alone, which has moved no message yet. All but the last are measured until the last message has arrived,
with everything running: service, database, broker, relay and reader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import txmq
from bench.model import Measure
from bench.peers.helpers import Arrived, Helper, arrivals, helper
from bench.peers.model import TOPICS, Peer, Running, value_of
from bench.peers.relay import MOVE, POLL_S, relay
from bench.peers.works import CALLERS, Pace, delays, next_number
from bench.rows.databases import ORDER, OUTBOX, VALUE, Database
from txmq.testing.bench.limits import cpu_seconds
from txmq.testing.bench.model import LATENCY_UNITS, Figures, latencies
from txmq.testing.bench.timing import in_threads
from txmq.xa import LastResource

THREADS = (1, CALLERS)
FIRST = 100  # orders before the clock starts: a database that has just started is slow for its first commits
CPU_PARTS = ("CPU: service", "CPU: database", "CPU: broker", "CPU: relay")
UNITS = {
    "rate, 1 thr": "orders/s", f"rate, {CALLERS} thr": "orders/s", **LATENCY_UNITS,
    f"p50, {CALLERS} thr": "ms", f"p99, {CALLERS} thr": "ms", "CPU": "us/order",
    **dict.fromkeys(CPU_PARTS, "us/order"),
}  # fmt: skip

Order = Callable[[int], float]  # does the order of this number; when its COMMIT had returned


class LastCommit(threading.local):
    """When the database's COMMIT returned in this thread: a resolver commits too, in its own."""

    moment = 0.0

    def append(self, moment: float) -> None:
        """Note it."""
        self.moment = moment


@dataclass(frozen=True, slots=True)
class Service:
    """A way to do orders.

    Attributes:
        make: makes the work of one thread.
        arrived: None if no message is moved.
        pids: the processes that share the work with this one, by the names of ``CPU_PARTS``; not the reader's.
        around: what is done before and after each measure.
    """

    make: Callable[[], Order]
    arrived: Arrived | None
    pids: Callable[[], Mapping[str, Sequence[int]]]
    around: Callable[[], AbstractContextManager[None]] = nullcontext


Make = Callable[[Database, ExitStack], Service]


def last_resource(peer: Peer, running: Running, database: Database, stack: ExitStack) -> Service:
    """txmq: the row and its message in one transaction."""
    client = stack.enter_context(txmq.connect(running.address, timeout=60))
    producer = stack.enter_context(client.producer(timeout=60))
    last = LastCommit()
    resource = LastResource("orders", connect=lambda: database.timed(last))
    resource.install(client)
    insert = database.sql(ORDER)

    def order(number: int) -> float:
        with producer.transaction(resource) as tx:
            tx.connection(resource).cursor().execute(insert, (VALUE,))
            producer.send(TOPICS[0], value_of(number), key=b"key", partition=0)
        return last.moment

    arrived = stack.enter_context(arrivals(peer, running.address))
    return Service(lambda: order, arrived, lambda: {**server(database), "CPU: broker": running.pids()})


def outbox(peer: Peer, running: Running, database: Database, stack: ExitStack, poll_s: float = POLL_S) -> Service:
    """The row and an outbox row in one commit, and a relay into the peer, which looks again after ``poll_s``."""
    arrived = stack.enter_context(arrivals(peer, running.address))
    moving = stack.enter_context(helper(relay, database.connect, database.claim, peer, running.address, poll_s))

    return Service(lambda: _both_rows(database), arrived, pids_with(database, running, moving), partial(moved, moving))


def pids_with(database: Database, running: Running, moving: Helper) -> Callable[[], Mapping[str, Sequence[int]]]:
    """The processes of an outbox with a relay in a process of its own."""

    def pids() -> Mapping[str, Sequence[int]]:
        own = {"CPU: broker": running.pids(), "CPU: relay": [moving.process.pid or 0]}
        return {**server(database), **own}

    return pids


@contextmanager
def moved(moving: Helper) -> Iterator[None]:
    """A relay's process works for as long as the block lasts."""
    moving.ask(MOVE)
    try:
        yield
    finally:
        moving.ask("rest")


def outbox_alone(database: Database, _: ExitStack) -> Service:
    """The row and an outbox row in one commit; nothing takes the outbox row out."""

    @contextmanager
    def emptied() -> Iterator[None]:
        yield
        empty(database)

    return Service(lambda: _both_rows(database), None, lambda: server(database), emptied)


def empty(database: Database) -> None:
    """Take all rows out of the outbox that is no txmq's."""
    with closing(database.connect()) as connection:
        connection.cursor().execute(database.empty)
        connection.commit()


def _both_rows(database: Database) -> Order:
    last = LastCommit()
    connection = database.timed(last)
    cursor = connection.cursor()
    row, message = database.sql(ORDER), database.sql(OUTBOX)

    def order(number: int) -> float:
        if database.begin:
            cursor.execute(database.begin)
        cursor.execute(row, (VALUE,))
        cursor.execute(message, (TOPICS[0], b"key", value_of(number)))
        connection.commit()
        return last.moment

    return order


def server(database: Database) -> Mapping[str, Sequence[int]]:
    """The database's process."""
    pid = database.pid()
    return {} if pid is None else {"CPU: database": [pid]}


def measured(service: Service, pace: Pace, first: int = FIRST) -> Measure:
    """Rates of one and of eight threads, latencies at a steady pace and at the highest rate, processor time in all."""
    with service.around():
        rates = {threads: _at_once(service, threads, first)["rate"] for threads in THREADS}
    counts = {threads: max(first, int(rate * pace.seconds)) for threads, rate in rates.items()}
    paced = int(pace.seconds / 0.01)

    def measure() -> dict[str, float]:
        one, all_ = (_at_once(service, threads, counts[threads]) for threads in THREADS)
        figures = {"rate, 1 thr": one["rate"], f"rate, {CALLERS} thr": all_["rate"]}
        figures |= {name: used for name, used in all_.items() if name.startswith("CPU")}
        if service.arrived is not None:
            figures |= latencies(delays(service.make(), paced, service.arrived))
            figures |= {f"{name}, {CALLERS} thr": all_[name] for name in ("p50", "p99")}
        return figures

    def around() -> dict[str, float]:
        with service.around():
            return measure()

    return around


def visible(service: Service, count: int) -> dict[str, float]:
    """From the return of each COMMIT to the message at a reader, at a steady pace."""
    assert service.arrived is not None
    with service.around():
        return latencies(delays(service.make(), count, service.arrived))


def _at_once(service: Service, threads: int, count: int) -> Figures:
    """Orders as fast as they go, until the last message has arrived."""
    if service.arrived is not None:
        service.arrived.begin()
    committed: dict[int, float] = {}
    before = _cpu_seconds(service)

    def make() -> Callable[[], None]:
        order = service.make()

        def work() -> None:
            number = next_number()
            committed[number] = order(number)

        return work

    started = time.perf_counter()
    in_threads(make, threads, count)
    ended, spread = time.perf_counter(), {}
    if service.arrived is not None:
        there = service.arrived.of(range(min(committed), max(committed) + 1))
        ended = max(there.values())
        spread = latencies(sorted(there[number] - moment for number, moment in committed.items()))
    used = {name: (after - before[name]) / len(committed) * 1e6 for name, after in _cpu_seconds(service).items()}
    return {"rate": len(committed) / (ended - started), "CPU": sum(used.values()), **used, **spread}


def _cpu_seconds(service: Service) -> dict[str, float]:
    others = {name: sum(map(cpu_seconds, pids)) for name, pids in service.pids().items()}
    return {"CPU: service": time.process_time(), **others}
