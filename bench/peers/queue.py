"""The work ``queue``: an order's row and its message in one transaction of PostgreSQL, until it is handled.

The service is this process, with one caller or eight, tasks of one loop; the handler is a process of its own. Rates
count until the last message is handled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection

from bench.model import Measure
from bench.peers.helpers import Arrivals, Arrived, helper
from bench.peers.queues import Order, Queue, create_orders
from bench.peers.works import CALLERS, PACE_S, Pace, next_number
from txmq.testing.bench.loads import new_loop
from txmq.testing.bench.model import LATENCY_UNITS, latencies

ONE, ALL = "rate, 1 caller", f"rate, {CALLERS} callers"
UNITS = {ONE: "orders/s", ALL: "orders/s", **LATENCY_UNITS}
FIRST = 100


@contextmanager
def measured(queue: Queue, dsn: str, address: str, pace: Pace, first: int = FIRST) -> Iterator[Measure]:
    """Rates, and latencies at a steady pace, warmed up."""
    queue.require()
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=new_loop()))
        runner.run(create_orders(dsn))
        runner.run(queue.install(dsn, address))
        arrived = None
        if queue.is_handled:
            arrived = Arrived(stack.enter_context(helper(_serve, queue, dsn, address)))

        async def at_once(callers: int, count: int) -> float:
            async with queue.service(dsn, address) as new_caller:
                return await _at_once([await new_caller() for _ in range(callers)], count, arrived)

        async def steady(arrived: Arrived) -> dict[str, float]:
            async with queue.service(dsn, address) as new_caller:
                return latencies(await _delays(await new_caller(), int(pace.seconds / 0.01), arrived))

        counts = dict.fromkeys((1, CALLERS), first)
        for _ in range(2):
            for callers, count in counts.items():
                counts[callers] = max(first, int(pace.seconds * runner.run(at_once(callers, count))))

        def measure() -> dict[str, float]:
            one, all_ = (runner.run(at_once(callers, count)) for callers, count in counts.items())
            return {ONE: one, ALL: all_, **(runner.run(steady(arrived)) if arrived is not None else {})}

        yield measure


async def _at_once(callers: list[Order], count: int, arrived: Arrived | None) -> float:
    """Orders as fast as they go, until the last one is handled; how many a second."""
    if arrived is not None:
        await asyncio.to_thread(arrived.begin)
    numbers = [next_number() for _ in range(count)]
    left = iter(numbers)

    async def work(order: Order) -> None:
        for number in left:
            await order(number)

    started = time.perf_counter()
    await asyncio.gather(*map(work, callers))
    ended = time.perf_counter()
    if arrived is not None:
        ended = max((await _arrivals(arrived, numbers)).values())
    return count / (ended - started)


async def _delays(order: Order, count: int, arrived: Arrived) -> list[float]:
    """Seconds from COMMIT to the handler, sorted."""
    await asyncio.to_thread(arrived.begin)
    committed: dict[int, float] = {}
    due = time.perf_counter()
    for _ in range(count):
        due = max(due + PACE_S, time.perf_counter())
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        number = next_number()
        committed[number] = await order(number)
    there = await _arrivals(arrived, list(committed))
    return sorted(there[number] - moment for number, moment in committed.items())


async def _arrivals(arrived: Arrived, numbers: list[int]) -> Arrivals:
    """Waited for in a thread: a relay goes on in this loop."""
    return await asyncio.to_thread(arrived.of, range(numbers[0], numbers[-1] + 1))


def _serve(connection: Connection, queue: Queue, dsn: str, address: str) -> None:
    """The work of a helper process, which takes the words of ``Arrived``."""
    with asyncio.Runner(loop_factory=new_loop()) as runner:
        runner.run(_handle(connection, partial(queue.handle, dsn, address)))


async def _handle(connection: Connection, handle: Callable[[Callable[[int], None]], Awaitable[None]]) -> None:
    seen: Arrivals = {}
    wanted: range | None = None
    ended = asyncio.get_running_loop().create_future()

    def handled(number: int) -> None:
        seen.setdefault(number, time.perf_counter())
        tell()

    def tell() -> None:
        nonlocal wanted
        if wanted is not None and len(seen) >= len(wanted) and all(number in seen for number in wanted):
            connection.send({number: seen[number] for number in wanted})
            wanted = None

    def told() -> None:
        nonlocal wanted
        try:
            word = connection.recv()
        except EOFError:
            loop.remove_reader(connection.fileno())
            ended.set_result(None)
            return
        if isinstance(word, range):
            wanted = word
            tell()
        else:
            seen.clear()
            connection.send("ready")

    loop = asyncio.get_running_loop()
    handling = asyncio.ensure_future(handle(handled))
    loop.add_reader(connection.fileno(), told)
    connection.send("ready")
    try:
        await asyncio.wait([handling, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if handling.done():
            handling.result()
        handling.cancel()
        await asyncio.wait([handling], timeout=5)
