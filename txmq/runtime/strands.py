"""Synchronous code on an event loop: strands. The only home of ``greenlet``.

Theory of operation. ``Host.run`` runs a function in a *strand*: a greenlet, that is a stack of its own on the loop's
thread. Where the function would make its thread sleep, the door (``Signal``, ``LoopClock``, ``loop_stream``) parks the
strand: the greenlet is left with something to await, the coroutine that called ``run`` awaits it, and the greenlet goes
on with the result. So the loop never stands still, and code that was written for threads is written once. It is
as SQLAlchemy runs its synchronous core on asyncio.

A cancelled task has its CancelledError raised in the door in which its strand is parked. To the code that is what
KeyboardInterrupt is in a thread. It may park again while it cleans up.

What would be a thread of its own (``start_daemon``) is a task of the host, which ``Host.close`` waits for. What waits
for a disk or for another library (``off_loop``) runs in one of the host's threads, which nothing else keeps busy. A
strand that is cancelled meanwhile waits for its end: two of them never meet in one file.

Invariants:
    * a strand runs on the thread of its host's loop, and in the context of its task: context variables are shared;
    * other strands run only while this one is parked, so code that parks must hold no ``Lock`` but one of
      ``threads.new_lock``;
    * ``unpark`` ends a park or does nothing: it never counts for a later one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar, cast

from txmq.runtime import loop_signals, threads
from txmq.runtime.threads import Signal

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ImportError as error:  # pragma: no cover - an extra of the package
    raise ImportError("txmq.aio needs the package greenlet: pip install greenlet") from error

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future, Task
    from collections.abc import Sequence

T = TypeVar("T")
IDLE_MAX = 256  # greenlets of a host that wait for work
_CLOSE_S_MAX = 5.0  # for daemons that were told to end
_LOOK_S = 3600.0  # a strand that waits for a lock looks again
_BLOCKING_MAX = 16  # threads of a host for what blocks


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

    @property
    def task_number(self) -> int:
        """The task that it runs in."""
        return id(asyncio.current_task(self.host.loop))

    def run_together(self, name: str, count: int, run: Callable[[], None]) -> None:
        """Run ``count`` strands as tasks, and wait for their end; cancel them if this one is cancelled.

        Raises:
            BaseException: the first one that ended so.
        """
        loop, host = self.host.loop, self.host
        tasks = [loop.create_task(host.run(run), name=f"{name}-{number}") for number in range(count)]
        try:
            self.wait_for(asyncio.wait(tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            self._wait_out(tasks)
            raise
        failures = [error for task in tasks if (error := task.exception()) is not None]
        if failures:
            raise failures[0]

    def off_loop(self, work: Callable[[], T]) -> T:
        """Call what blocks in a thread of the host, to its end."""
        future = self.host.loop.run_in_executor(self.host.executor, work)
        cancelled = self._wait_out([future])
        if cancelled is not None:
            future.exception()
            raise cancelled
        return future.result()

    def to_end(self, work: Callable[[], T]) -> T:
        """Call ``work`` in a strand of its own, which goes to its end."""
        return self.wait_for(self.host.to_end(work))

    def _wait_out(self, futures: Sequence[Future[Any]]) -> BaseException | None:
        """Wait for the end of all, whatever comes; what came."""
        came: BaseException | None = None
        while any(not future.done() for future in futures):
            try:
                self.wait_for(asyncio.wait(futures))
            except (GreenletExit, GeneratorExit):
                raise
            except BaseException as error:  # noqa: BLE001  raised by the caller
                came = came or error
        return came

    def until_terminated(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Call ``stop`` in the loop on SIGTERM while the block runs."""
        return loop_signals.until_terminated(self.host.loop, lambda: self.host.call(stop))

    def new_future(self) -> threads.Future[Any]:
        """See ``threads.Strand``."""
        return cast("threads.Future[Any]", LoopFuture(loop=self.host.loop))

    def new_lock(self) -> AbstractContextManager[object]:
        """A lock of the loop's strands."""
        return _LoopLock()

    def new_condition(self) -> threading.Condition:
        """A condition of the loop's strands."""
        return _LoopCondition()


class LoopFuture(asyncio.Future[Any]):
    """A result to come, as tasks await it and as strands set it."""

    def set_running_or_notify_cancel(self) -> bool:
        """As of ``concurrent.futures.Future``: whether anybody still waits."""
        return not self.done()

    def exception(self) -> BaseException | None:
        """The exception it ended with; a strand waits for the end."""
        self._wait()
        return super().exception()

    def result(self) -> Any:
        """The result; a strand waits for it."""
        self._wait()
        return super().result()

    def _wait(self) -> None:
        strand = current()
        if strand is not None and not self.done():
            strand.wait_for(asyncio.wait((self,)))


class _LoopLock:
    """A lock of the strands of one loop: who waits for it parks."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Signal] = deque()

    def __enter__(self) -> None:
        while self._is_held:
            signal = Signal()
            self._waiting.append(signal)
            try:
                signal.wait(_LOOK_S)
            finally:
                self._waiting.remove(signal)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        for signal in self._waiting:  # all: the first one may be cancelled
            signal.set()


class _LoopCondition(threading.Condition):
    """What the strands of one loop wait for. There is nothing to lock: they change only when one parks."""

    def __init__(self) -> None:
        super().__init__()
        self._signals: list[Signal] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        """Park until ``notify_all``, ``timeout`` seconds at most; whether it came."""
        signal = Signal()
        self._signals.append(signal)
        try:
            return signal.wait(_LOOK_S if timeout is None else timeout)
        finally:
            self._signals.remove(signal)

    def notify_all(self) -> None:
        """Wake all that wait."""
        for signal in self._signals:
            signal.set()


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
        self._executor: ThreadPoolExecutor | None = None

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads for what blocks, of this host alone: nothing else fills them."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_BLOCKING_MAX, thread_name_prefix="txmq-blocking")
        return self._executor

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

    def call(self, work: Callable[[], T]) -> T:
        """Outside of coroutines: run code that never parks, so that what it starts is started here; its result."""
        fiber = self._fiber()
        handed = fiber.switch(work)
        if type(handed) is not _End:
            raise RuntimeError(f"{work!r} waits, in a callback of the event loop")
        return cast("T", self._ended(fiber, handed))

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

    async def to_end(self, work: Callable[[], T]) -> T:
        """As ``run``; a caller that is cancelled leaves the work to go to its end."""
        return await asyncio.shield(self.begin_end(self.run(work)))

    async def opened(self, make: Callable[[], T], close: Callable[[T], None]) -> T:
        """``make`` what has to be closed; what a caller is cancelled over is closed at once."""
        making = self.begin_end(self.run(make))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            self.begin_end(self._given_up(making, close))
            raise

    async def _given_up(self, making: Task[T], close: Callable[[T], None]) -> None:
        made = await making
        await self.run(lambda: close(made))

    def _end_of_task(self, task: Task[Any]) -> None:
        self._ends.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def await_ends(self, timeout: float) -> None:
        """Wait for what ``begin_end`` has begun, and for what that has begun."""
        until = self.loop.time() + timeout
        while self._ends and (rest := until - self.loop.time()) > 0:
            await asyncio.wait(tuple(self._ends), timeout=rest)

    def stream_opened(self, stream: object) -> None:
        """A stream is open: ``close`` waits for its end."""
        self._open[stream] = None

    def stream_closed(self, stream: object) -> None:
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
        if self._executor is not None:
            self._executor.shutdown(wait=False)


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
