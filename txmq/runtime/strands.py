"""Synchronous code on an event loop: strands. The only home of ``greenlet``.

Theory of operation. ``Host.run`` runs a function in a *strand*: a greenlet, that is a stack of its own on the loop's
thread. Where the function would make its thread sleep, the door (``Signal``, ``LoopClock``, ``loop_stream``) parks the
strand: the greenlet is left with something to await, the coroutine that called ``run`` awaits it, and the greenlet goes
on with the result. So the loop never stands still, and code that was written for threads is written once. It is
as SQLAlchemy runs its synchronous core on asyncio.

A cancelled task has its CancelledError raised in the door in which its strand is parked. To the code that is what
KeyboardInterrupt is in a thread. It may park again while it cleans up.

What would be a thread of its own (``start_daemon``) is a task of the host, which ``Host.close`` waits for.

Invariants:
    * a strand runs on the thread of its host's loop, and in the context of its task: context variables are shared;
    * other strands run only while this one is parked, so code that parks must hold no ``Lock``;
    * ``unpark`` ends a park or does nothing: it never counts for a later one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar, cast

from txmq.runtime import threads

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ImportError as error:  # pragma: no cover - an extra of the package
    raise ImportError("txmq.aio needs the package greenlet: pip install greenlet") from error

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future, Task

T = TypeVar("T")
IDLE_MAX = 256  # greenlets of a host that wait for work
_CLOSE_S_MAX = 5.0  # for daemons that were told to end


class Strand:
    """One stack on a host's loop; the port ``threads.Strand``."""

    __slots__ = ("_parked", "host")

    def __init__(self, host: Host) -> None:
        self.host = host
        self._parked: Future[None] | None = None

    def park(self, timeout: float, is_woken: Callable[[], bool] | None = None) -> None:
        """See ``threads.Strand``."""
        loop = self.host.loop
        parked = self._parked = loop.create_future()
        try:
            if is_woken is not None and is_woken():
                return
            timer = loop.call_later(timeout, _wake, parked)
            try:
                self.wait_for(parked)
            finally:
                timer.cancel()
        finally:
            self._parked = None

    def unpark(self) -> None:
        """End ``park``; from any thread."""
        host, parked = self.host, self._parked
        if parked is None:
            return
        if threading.get_ident() == host.thread:
            _wake(parked)
        else:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                host.loop.call_soon_threadsafe(_wake, parked)

    def wait_for(self, awaited: Awaitable[T]) -> T:
        """Let the loop go on until ``awaited`` is done; its result, or its exception."""
        return cast("T", getcurrent().parent.switch(awaited))

    def start_daemon(self, name: str, run: Callable[[], None]) -> None:
        """Begin another strand on the same loop, with a context of its own."""
        self.host.start_daemon(name, run)


def _wake(parked: Future[None]) -> None:
    if not parked.done():
        parked.set_result(None)


class _End:
    """The end of a strand's work, handed to the coroutine that runs it."""

    __slots__ = ("error", "result")

    def __init__(self, result: object, error: BaseException | None) -> None:
        self.result, self.error = result, error


def _serve(work: Callable[[], object]) -> None:
    """The life of a greenlet: one piece of work after another."""
    while True:
        try:
            end = _End(work(), None)
        except GreenletExit:  # it is collected
            raise
        except BaseException as error:  # noqa: BLE001  raised again in the coroutine
            end = _End(None, error)
        del work
        work = getcurrent().parent.switch(end)
        del end


class Host:
    """What the strands of one client share: the loop that runs when it is made.

    Attributes:
        loop: where its strands run.
        thread: number of the loop's thread.
    """

    def __init__(self) -> None:
        self.loop: AbstractEventLoop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self._idle: list[Any] = []  # greenlets without work
        self._daemons: set[Task[None]] = set()
        self._ends: set[Task[Any]] = set()
        self._open: dict[object, None] = {}  # streams

    async def run(self, work: Callable[[], T]) -> T:
        """Run synchronous code in a strand; its result, or its exception.

        Raises:
            RuntimeError: another loop runs.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("this client belongs to another event loop: make one in each loop")
        fiber = self._fiber()
        handed = fiber.switch(work)
        while type(handed) is not _End:
            try:
                found = await handed
            except BaseException as error:  # noqa: BLE001  raised in the door, and from there
                handed = fiber.throw(error)
            else:
                handed = fiber.switch(found)
        return cast("T", self._ended(fiber, handed))

    def call(self, work: Callable[[], None]) -> None:
        """From a callback of the loop: run code that never parks, so that what it starts is started here."""
        fiber = self._fiber()
        handed = fiber.switch(work)
        if type(handed) is not _End:
            raise RuntimeError(f"{work!r} waits, in a callback of the event loop")
        self._ended(fiber, handed)

    def _fiber(self) -> Any:
        """A greenlet that waits for work: to begin one costs twenty times what it costs to go on with it."""
        if self._idle:
            fiber = self._idle.pop()
        else:
            fiber = greenlet(_serve)
            fiber.strand = Strand(self)
        fiber.gr_context = getcurrent().gr_context
        return fiber

    def _ended(self, fiber: Any, end: _End) -> object:
        fiber.gr_context = None
        if len(self._idle) < IDLE_MAX:
            self._idle.append(fiber)
        if end.error is not None:
            raise end.error
        return end.result

    def start_daemon(self, name: str, run: Callable[[], None]) -> None:
        """Run ``run`` as a task of its own."""
        task = self.loop.create_task(self.run(run), name=name, context=Context())
        self._daemons.add(task)
        task.add_done_callback(self._daemons.discard)

    def begin_end(self, end: Coroutine[Any, Any, T]) -> Task[T]:
        """Run what has to go to its end whatever becomes of its caller; ``await_ends`` waits for it."""
        task = self.loop.create_task(end, name="txmq-end")
        self._ends.add(task)
        task.add_done_callback(self._end_of_task)
        return task

    def _end_of_task(self, task: Task[Any]) -> None:
        self._ends.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def await_ends(self, timeout: float) -> None:
        """Wait for what ``begin_end`` has begun."""
        if self._ends:
            await asyncio.wait(tuple(self._ends), timeout=timeout)

    def opened(self, stream: object) -> None:
        """A stream is open: ``close`` waits for its end."""
        self._open[stream] = None

    def closed(self, stream: object) -> None:
        """It has ended."""
        self._open.pop(stream, None)

    async def close(self) -> None:
        """Wait for the end of daemons and streams, which were told; those that do not end in time are cancelled."""
        until = self.loop.time() + _CLOSE_S_MAX
        while self._open and self.loop.time() < until:
            await asyncio.sleep(0)
        if self._daemons:
            _, late = await asyncio.wait(tuple(self._daemons), timeout=_CLOSE_S_MAX)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        self._idle.clear()


def current() -> Strand | None:
    """The strand that the caller runs in, or None."""
    return getattr(getcurrent(), "strand", None)


def required() -> Strand:
    """The strand that the caller runs in."""
    strand = current()
    if strand is None:
        raise RuntimeError("a client of an event loop was used outside of its methods")
    return strand


class LoopClock:
    """The system's clock, whose ``sleep`` parks the strand (port ``Clock``)."""

    def __init__(self, clock: Any) -> None:
        self.now_ms: Callable[[], int] = clock.now_ms
        self.monotonic: Callable[[], float] = clock.monotonic

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        required().park(max(seconds, 0.0))


threads.watch_strands(current)
