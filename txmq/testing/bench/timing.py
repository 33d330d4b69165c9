"""Do something many times, alone, in threads or in tasks, and know how long each took."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager


def timed(work: Callable[[], object], count: int) -> list[float]:
    """Do it ``count`` times; seconds each took, sorted."""
    clock, taken = time.perf_counter, []
    for _ in range(count):
        started = clock()
        work()
        taken.append(clock() - started)
    return sorted(taken)


@contextmanager
def one_processor() -> Iterator[None]:
    """The calling thread, and those it starts meanwhile, stay on one processor, if one can be chosen.

    Threads of Python take turns at the interpreter's lock, wherever they run; between two processors a turn wakes one
    of them up (``docs/benchmarks.md``).
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def in_threads(make: Callable[[], Callable[[], object]], threads: int, count: int) -> tuple[float, list[float]]:
    """Do it ``count`` times in all, by several threads, each with what ``make`` made in it.

    Each thread does it once before the clock starts. Ends early, and raises, if a thread fails or this one is
    interrupted; no thread is left then.

    Returns:
        How many a second, and the seconds each took, sorted.
    """
    crew = _Crew(make, max(1, count // threads), threading.Barrier(threads + 1))
    running = [threading.Thread(target=crew.run) for _ in range(threads)]
    try:
        for thread in running:  # in here: the first ones work already, and an interrupt must end them
            thread.start()
        crew.start()
        started = time.perf_counter()
        for thread in running:
            thread.join()
        seconds = time.perf_counter() - started
    finally:
        crew.stop = True
        crew.ready.abort()
        for thread in running:
            if thread.ident is not None:
                thread.join()
    if crew.failures:
        raise crew.failures[0]
    return crew.each * threads / seconds, sorted(crew.taken)


async def in_tasks(work: Callable[[], Awaitable[object]], tasks: int, count: int) -> tuple[float, list[float]]:
    """As ``in_threads``, by several tasks of the loop."""
    each, clock = max(1, count // tasks), time.perf_counter
    taken: list[float] = []

    async def repeat() -> None:
        for _ in range(each):
            started = clock()
            await work()
            taken.append(clock() - started)

    await asyncio.gather(*(work() for _ in range(tasks)))
    started = clock()
    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(repeat())
    return each * tasks / (clock() - started), sorted(taken)


class _Crew:
    """State that the threads share. Lists are appended to by one operation each, which threads may do."""

    def __init__(self, make: Callable[[], Callable[[], object]], each: int, ready: threading.Barrier) -> None:
        self.make, self.each, self.ready = make, each, ready
        self.stop = False
        self.taken: list[float] = []
        self.failures: list[BaseException] = []

    def start(self) -> None:
        try:
            self.ready.wait()
        except threading.BrokenBarrierError:
            if self.failures:
                raise self.failures[0] from None
            raise

    def run(self) -> None:
        try:
            work = self.make()
            work()
            self.ready.wait()
            self.taken.extend(self._repeat(work))
        except threading.BrokenBarrierError:
            pass
        except Exception as error:  # noqa: BLE001  raised in the measuring thread
            self.failures.append(error)
            self.stop = True
            self.ready.abort()

    def _repeat(self, work: Callable[[], object]) -> list[float]:
        clock, taken = time.perf_counter, []
        for _ in range(self.each):
            if self.stop:
                break
            started = clock()
            work()
            taken.append(clock() - started)
        return taken
