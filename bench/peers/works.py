"""The work that every peer does, timed alike: publishing alone, by tasks and in flight, transactions, delivery.

Theory of operation. Each work opens what it needs once and is then measured in turns with the other peers. How much one
measure does is found by trying: a first small measure, then one that warms caches and compilers up, tell the rate; from
then on a measure takes about ``Pace.seconds``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    closing,
    contextmanager,
)
from dataclasses import dataclass
from functools import partial
from itertools import count as counting

from bench.model import Measure
from bench.peers.helpers import Arrived, arrivals
from bench.peers.model import IN_FLIGHT, VALUE, Link, Peer, Publish, Running, value_of
from txmq.testing.bench.loads import new_loop
from txmq.testing.bench.model import LATENCY_UNITS, Figures, latencies
from txmq.testing.bench.timing import in_tasks, in_threads, timed

CALLERS, TASKS = 8, 64
PACE_S = 0.005  # between two messages whose way is timed
COUNT_MAX = 2_000_000
_FIRST = {"alone": 50, "tasks": 640, "in-flight": 600, "transactions": 20}
_numbers = counting(1)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long one measure takes, about."""

    seconds: float


Open = Callable[[Peer, Running, Pace], AbstractContextManager[Measure]]


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work.

    Attributes:
        name: for ``--works`` and names of rows.
        units: of every figure.
    """

    name: str
    title: str
    open: Open
    units: Mapping[str, str]


def steady(measure: Callable[[int], Figures], first: int, pace: Pace) -> Measure:
    """``measure`` with the count that takes as long as ``pace`` says, warmed up."""
    count = first
    for seconds in (pace.seconds / 4, pace.seconds):
        rate = measure(count)["rate"]
        count = max(first, min(COUNT_MAX, int(rate * seconds)))
    return lambda: dict(measure(count))


@contextmanager
def _alone(peer: Peer, running: Running, pace: Pace) -> Iterator[Measure]:
    with closing(peer.connect(running.address)) as link:

        def measure(count: int) -> Figures:
            taken = link.alone(count)
            return {"rate": count / sum(taken)} | latencies(taken)

        yield steady(measure, _FIRST["alone"], pace)


@contextmanager
def _tasks(peer: Peer, running: Running, pace: Pace) -> Iterator[Measure]:
    """One producer and one loop, uvloop's if that is installed."""
    with asyncio.Runner(loop_factory=new_loop()) as runner:
        stack = AsyncExitStack()
        publish = runner.run(_entered(stack, peer.tasks(running.address)))
        try:

            def measure(count: int) -> Figures:
                rate, taken = runner.run(in_tasks(partial(publish, VALUE), TASKS, count))
                return {"rate": rate} | latencies(taken)

            yield steady(measure, _FIRST["tasks"], pace)
        finally:
            runner.run(stack.aclose())


async def _entered(stack: AsyncExitStack, producer: AbstractAsyncContextManager[Publish]) -> Publish:
    return await stack.enter_async_context(producer)


@contextmanager
def _in_flight(peer: Peer, running: Running, pace: Pace) -> Iterator[Measure]:
    with closing(peer.connect(running.address)) as link:

        def measure(count: int) -> Figures:
            values = [VALUE] * count
            started = time.perf_counter()
            link.publish_all(values)
            return {"rate": count / (time.perf_counter() - started)}

        yield steady(measure, _FIRST["in-flight"], pace)


@contextmanager
def _transactions(peer: Peer, running: Running, pace: Pace) -> Iterator[Measure]:
    with ExitStack() as stack:
        links: list[Link] = []
        for _ in range(CALLERS):
            link = peer.connect(running.address)
            stack.callback(link.close)
            link.transaction(VALUE)
            links.append(link)

        def lone(count: int) -> Figures:
            taken = timed(partial(links[0].transaction, VALUE), count)
            return {"rate": count / sum(taken)} | latencies(taken)

        def together(count: int) -> Figures:
            free = iter(links)
            rate, _ = in_threads(lambda: partial(next(free).transaction, VALUE), CALLERS, count)
            return {"rate": rate}

        one, all_ = (steady(measure, _FIRST["transactions"], pace) for measure in (lone, together))
        yield lambda: {**one(), f"rate, {CALLERS} callers": all_()["rate"]}


@contextmanager
def _delivery(peer: Peer, running: Running, pace: Pace) -> Iterator[Measure]:
    """From before the publish to the message in another process, one message each few milliseconds."""
    with closing(peer.connect(running.address)) as link, arrivals(peer, running.address) as arrived:

        def publish(number: int) -> float:
            started = time.perf_counter()
            link.publish(value_of(number))
            return started

        count = max(1, int(pace.seconds / PACE_S))
        delays(publish, count // 4 + 1, arrived)
        yield lambda: latencies(delays(publish, count, arrived))


def delays(publish: Callable[[int], float], count: int, arrived: Arrived) -> list[float]:
    """Publish so many at a steady pace; seconds from what ``publish`` returned to the arrival, sorted."""
    arrived.begin()
    begun: dict[int, float] = {}
    due = time.perf_counter()
    for _ in range(count):
        due = max(due + PACE_S, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        number = next(_numbers)
        begun[number] = publish(number)
    there = arrived.of(range(min(begun), max(begun) + 1))
    return sorted(there[number] - began for number, began in begun.items())


def next_number() -> int:
    """The next unused number of a message."""
    return next(_numbers)


ALONE = Work("alone", "one publish at a time", _alone, {"rate": "msg/s"} | LATENCY_UNITS)
BY_TASKS = Work(
    "tasks", f"{TASKS} tasks of one process, each one publish at a time", _tasks, {"rate": "msg/s"} | LATENCY_UNITS
)
FLYING = Work("in-flight", f"{IN_FLIGHT} in flight", _in_flight, {"rate": "msg/s"})
TRANSACTIONS = Work(
    "tx", "transactions of two messages in two topics", _transactions,
    {"rate": "tx/s"} | LATENCY_UNITS | {f"rate, {CALLERS} callers": "tx/s"},
)  # fmt: skip
DELIVERY = Work("delivery", "from the publish to a reader in another process", _delivery, LATENCY_UNITS)
WORKS = (ALONE, BY_TASKS, FLYING, TRANSACTIONS, DELIVERY)
