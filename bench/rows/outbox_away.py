"""Orders with an outbox while the broker is killed for a minute: how long blocks take, and how fast rows are drained.

Three processes take 200 orders/s in all, by a clock: an order that is late is not left out. One of them reaches the
broker through a relay, which is cut with the broker and stays cut for longer. Some keys are shared by the processes.
Each order changes its key's row, so its message can say the how manieth of its key it is; at the end every message of
every key must be there, once, in order.

A block's time is from its ``with`` to its end. "break" are blocks that began within a second of the broker's death;
"away" are those behind them, until all reach the broker again; "before" and "after" are the others.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import txmq
from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.databases import Database, mariadb
from txmq.client.transaction.background_resolver import resolver_of
from txmq.testing.bench.raw import percentile
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.relay import Relay
from txmq.xa import LastResource

PROCESSES, THREADS, RATE = 3, 6, 200.0
AWAY_S, FARTHER_S, BESIDE_S, BREAK_S = 60, 20, 8.0, 1.0
DRAINED_S_MAX = 300.0
TOPIC, PARTITIONS, SHARED, OWN = "bench", 4, 20, 20
VALUE_BYTES = 100
_TABLE = "CREATE TABLE counts (k VARCHAR(20) PRIMARY KEY, n BIGINT NOT NULL)"
_WAITING = "SELECT COUNT(*) FROM txmq_marker_outbox"
_COUNTED = "SELECT k, n FROM counts WHERE n > 0"
LOOK_S = 0.1  # a look counts all rows
MANY = 100  # rows: fewer are of the moment
START_S = 120.0
ERRORS_MAX = 5


class Taken(NamedTuple):
    """One order: when its block began, by the clock of all processes, how long it took, and why it was refused."""

    began: float
    took_s: float
    error: str


def keys_of(process: int) -> list[str]:
    """Keys that all processes share, and those of one."""
    return [f"shared-{number}" for number in range(SHARED)] + [f"own-{process}-{number}" for number in range(OWN)]


def serve(address: str, connect: Callable[[], Any], process: int, ready: Any, stop: Event, results: Any) -> None:
    """Take orders by the clock until ``stop``; then put a list of ``Taken`` into ``results``."""
    resource = LastResource("orders", connect=connect, outbox=True)
    keys, taken = keys_of(process), list[Taken]()
    with txmq.connect(address) as client, client.producer() as producer:

        def order(key: str) -> None:
            with producer.transaction(resource) as tx:
                cursor = tx.connection(resource).cursor()
                cursor.execute("UPDATE counts SET n = n + 1 WHERE k = %s", (key,))
                cursor.execute("SELECT n FROM counts WHERE k = %s", (key,))
                ((number,),) = cursor.fetchall()
                producer.send(TOPIC, f"{key} {number}".ljust(VALUE_BYTES).encode(), key=key.encode())

        def work(thread: int) -> None:
            every = PROCESSES * THREADS / RATE
            due = started + every * (thread / THREADS + process / PROCESSES / THREADS)
            number = thread
            while not stop.wait(max(0.0, due - time.monotonic())):
                taken.append(_timed(order, keys[number % len(keys)]))
                due, number = due + every, number + THREADS

        for key in keys:  # the first blocks find out about tables and topics
            order(key)
        ready.put(process)
        started = time.monotonic()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results.put(taken)


def _timed(order: Callable[[str], None], key: str) -> Taken:
    began, error = time.monotonic(), ""
    try:
        order(key)
    except Exception as raised:  # noqa: BLE001  whatever it is, the order was refused
        error = repr(raised)
    return Taken(began, time.monotonic() - began, error)


class _Minute:
    """One measure: the load, the broker's death, its return, and what is there at the end."""

    def __init__(self, surroundings: Surroundings, database: Database, broker: BrokerProcess, relay: Relay) -> None:
        self._surroundings, self._database = surroundings, database
        self._broker, self._relay = broker, relay

    def measure(self) -> dict[str, float]:
        """Play it."""
        spawned = multiprocessing.get_context("spawn")
        stop, ready, results = spawned.Event(), spawned.Queue(), spawned.Queue()
        addresses = [self._broker.address] * (PROCESSES - 1) + [self._relay.address]
        running = [
            spawned.Process(target=serve, args=(address, self._database.connect, number, ready, stop, results))
            for number, address in enumerate(addresses)
        ]
        try:
            for one in running:
                one.start()
            for _ in running:
                ready.get(timeout=START_S)
            began = time.monotonic()
            broken, reached, drained = self._play()
            stop.set()
            taken = [order for _ in running for order in results.get(timeout=START_S)]
            self._await_empty()
        finally:
            for one in running:
                one.kill()
                one.join()
        return _figures(taken, began, broken, reached) | {"drained": drained} | self._compared()

    def _play(self) -> tuple[float, float, float]:
        """The minute; when the broker broke, when all reached it again, and messages drained a second."""
        away_s, farther_s = (self._surroundings.count(seconds) for seconds in (AWAY_S, FARTHER_S))
        time.sleep(BESIDE_S)
        broken = time.monotonic()
        self._broker.kill()
        self._relay.cut()
        time.sleep(away_s)
        self._broker.start()
        drained = self._drained()
        time.sleep(farther_s)
        self._relay.mend()
        reached = time.monotonic()
        time.sleep(BESIDE_S)
        return broken, reached, drained

    def _drained(self) -> float:
        """How many messages a second leave, from the first to the last ones of the outage."""
        with closing(self._database.connect()) as connection:
            connection.autocommit(True)
            cursor, waited = connection.cursor(), 0
            first = last = time.monotonic()
            while (waiting := _number(cursor, _WAITING)) > MANY:
                last = time.monotonic()
                if waiting >= waited:
                    waited, first = waiting, last
                time.sleep(LOOK_S)
                if last > first + DRAINED_S_MAX:
                    raise AssertionError(f"{waiting} rows wait {DRAINED_S_MAX:.0f} s after the broker's return")
            return waited / (time.monotonic() - first) if waited else 0.0

    def _await_empty(self) -> None:
        """The services are over: their last messages go by a resolver of our own."""
        resource = LastResource("orders", connect=self._database.connect, outbox=True)
        with txmq.connect(self._broker.address) as client, closing(self._database.connect()) as connection:
            connection.autocommit(True)
            resolver_of(client).add(resource)
            cursor = connection.cursor()
            eventually(lambda: not _number(cursor, _WAITING), "the outbox is empty", DRAINED_S_MAX)
            eventually(lambda: not list(client.transactions.list(state="in-doubt")), "nothing is in doubt")

    def _compared(self) -> dict[str, float]:
        """Messages against rows: how many are missing, are there twice, or out of order."""
        with closing(self._database.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(_COUNTED)
            rows = {str(key): int(number) for key, number in cursor.fetchall()}
        found: dict[str, list[int]] = defaultdict(list)
        with txmq.connect(self._broker.address) as client:
            for message in client.browse(TOPIC):
                key, number = (message.value or b"").split()
                found[key.decode()].append(int(number))
        missing = sum(len(set(range(1, number + 1)) - {*found[key]}) for key, number in rows.items())
        twice = sum(len(numbers) - len({*numbers}) for numbers in found.values())
        disordered = sum(later < earlier for numbers in found.values() for earlier, later in pairwise(numbers))
        return {"messages": sum(map(len, found.values())), "missing": missing, "twice": twice, "disordered": disordered}


def _number(cursor: Any, query: str) -> int:
    cursor.execute(query)
    ((number,),) = cursor.fetchall()
    return int(number)


def _figures(taken: Sequence[Taken], began: float, broken: float, reached: float) -> dict[str, float]:
    ends = {"break": (broken - BREAK_S, broken + BREAK_S), "away": (broken + BREAK_S, reached)}
    ends |= {"before": (began, broken - BREAK_S), "after": (reached, float("inf"))}
    found: dict[str, float] = {"refused": sum(bool(order.error) for order in taken)}
    for error in sorted({order.error for order in taken if order.error})[:ERRORS_MAX]:
        print(f"refused: {error}", file=sys.stderr)
    for name, (first, last) in ends.items():
        spread = sorted(order.took_s for order in taken if first <= order.began < last)
        found |= {f"p50 {name}": percentile(spread, 50) * 1000, f"p99 {name}": percentile(spread, 99) * 1000}
        found[f"max {name}"] = spread[-1] * 1000
    away = [order for order in taken if ends["away"][0] <= order.began < ends["away"][1]]
    found["orders away"] = len(away) / (ends["away"][1] - ends["away"][0])
    return found


@contextmanager
def _opened(surroundings: Surroundings) -> Iterator[Measure]:
    with ExitStack() as stack:
        database = stack.enter_context(mariadb(surroundings.directory))
        broker = stack.enter_context(BrokerProcess(surroundings.directory / "data"))
        relay = stack.enter_context(Relay(broker.port))
        with closing(database.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(_TABLE)
            keys = sorted({key for process in range(PROCESSES) for key in keys_of(process)})
            cursor.executemany("INSERT INTO counts VALUES (%s, 0)", [(key,) for key in keys])
            connection.commit()
        with txmq.connect(broker.address) as client:
            client.topics.create(TOPIC, partitions=PARTITIONS)
            LastResource("orders", connect=database.connect, outbox=True).install(client)
        yield _Minute(surroundings, database, broker, relay).measure


_TIMES = {f"{figure} {name}": "ms" for name in ("before", "break", "away", "after") for figure in ("p50", "p99", "max")}

ROWS = (
    Row(
        "outbox-away", "orders with an outbox, 200/s from three processes, the broker killed for 60 s", _opened,
        {
            "refused": "orders", "orders away": "orders/s", "drained": "messages/s", "messages": "messages",
            "missing": "messages", "twice": "messages", "disordered": "messages", **_TIMES,
        },
        (
            Bound("refused", 0, "orders", at_least=False),
            Bound("p99 away", 50, "ms", at_least=False),
            Bound("drained", 5000, "messages/s"),
            *(Bound(name, 0, "messages", at_least=False) for name in ("missing", "twice", "disordered")),
        ),
        repeats=1, is_long=True,
    ),
)  # fmt: skip
