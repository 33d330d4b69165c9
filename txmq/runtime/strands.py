"""Synchronous code on an event loop: strands. The only home of ``greenlet``.

Theory of operation. ``Host.run`` runs a function in a *strand*: a greenlet, that is a stack of its own on the loop's
thread. Where the function would make its thread sleep, the door (``Signal``, ``LoopClock``, ``loop_stream``) parks the
strand: the greenlet is left with something to await, the coroutine that called ``run`` awaits it, and the greenlet goes
on with the result. So the loop never stands still, and code for threads is written once, as SQLAlchemy's core is.

A cancelled task has its CancelledError raised in the door in which its strand is parked. To the code that is what
KeyboardInterrupt is in a thread. It may park again while it cleans up.

What has to go to its end whatever becomes of its caller (``begin_end``) runs in a strand of its own. It begins at once;
a task of the loop drives it if it has to wait. Each waiter has a future of its own, which is cancelled alone.

What would be a thread of its own (``start_daemon``) is a task of the host, which ``Host.close`` waits for. What waits
for a disk or for another library (``off_loop``) runs in one of the host's threads, which nothing else keeps busy. A
strand that is cancelled meanwhile waits for its end: two never meet in one file.

*Locks.* ``LoopLock`` and ``LoopCondition`` are those of the strands of one loop: waiting for one parks the strand.

*SIGTERM* while a loop runs: each strand that listens stops, and the handler that was there before hears it, too.
``signal.signal`` and not the loop's ``add_signal_handler``: that would take the signal away from a server that has
installed a handler of its own (uvicorn), and could not give it back. The handler is there while any strand listens.

Invariants:
    * a strand runs on the thread of its host's loop, and in the context of its task: context variables are shared;
    * other strands run only while this one is parked, so code that parks must hold no ``Lock`` but one of
      ``threads.new_lock``; what it starts begins later, though the application may begin its own tasks in it at once;
    * ``unpark`` ends a park or does nothing: it never counts for a later one.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from txmq.runtime import threads
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
_CLOSE_S_MAX = 5.0  # for daemons and streams that were told to end
_LOCK_LOOK_S = 3600.0  # a strand that waits for a lock looks again
_LOOK_S = 0.001  # whether streams have ended, which takes a turn of the loop or two
_KEEP_S = 0.005  # calls that find their messages there keep the loop at most so long
_BLOCKING_MAX = 16  # threads of a host for what blocks


class Strand:
    """One stack on a host's loop; the port ``threads.Strand``."""

    __slots__ = ("_parked", "host", "may_block", "number")

    def __init__(self, host: Host) -> None:
        self.host = host
        self.may_block = False  # the loop; ``Host.call`` says so
        self.number = 0  # of what runs in it, if that is no task
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
        """The task that it runs in, or what ``begin_end`` has begun."""
        return self.number or id(asyncio.current_task(self.host.loop))

    def run_together(self, name: str, count: int, run: Callable[[], None]) -> None:
        """Run ``count`` strands as tasks, and wait for their end; cancel them if this one is cancelled.

        Raises:
            BaseException: the first one that ended so.
        """
        host = self.host
        tasks = [host.task(host.run(run), f"{name}-{number}") for number in range(count)]
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
        if self.may_block:
            return work()
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
        return until_terminated(self.host.loop, lambda: self.host.call(stop))

    def new_future(self) -> threads.Future[Any]:
        """See ``threads.Strand``."""
        return cast("threads.Future[Any]", LoopFuture(loop=self.host.loop))

    def new_lock(self) -> AbstractContextManager[object]:
        """A lock of the loop's strands."""
        return LoopLock()

    def new_condition(self) -> threading.Condition:
        """A condition of the loop's strands."""
        return LoopCondition()


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


def _wake(parked: Future[None]) -> None:
    if not parked.done():
        parked.set_result(None)


def _resumed(fiber: Any) -> Any:
    """A fiber about to go on: it returns to the fiber that resumes it, not to the one that began it.

    They differ where a task was begun in a strand, by ``asyncio.eager_task_factory``: its first step ran there.
    """
    fiber.parent = getcurrent()
    return fiber


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


class Running(Generic[T]):
    """Work that goes to its end in a strand of its own; see ``Host.begin_end``. Any number of tasks may await it."""

    __slots__ = ("_end", "_fiber", "_host", "_task", "_waiting")

    def __init__(self, host: Host, work: Callable[[], T]) -> None:
        self._host = host
        self._waiting: list[Future[None]] = []
        self._end: _End | None = None
        self._fiber = host.take_fiber()
        self._fiber.strand.number = id(self)
        self._take(self._fiber.switch(work))

    def _take(self, handed: Any) -> None:
        """The strand has parked, or ended."""
        if type(handed) is _End:
            self._end = handed
            self._fiber.strand.number = 0
            self._host.leave_fiber(self._fiber)
            for waiting in self._waiting:
                _wake(waiting)
        else:
            self._task = self._host.task(self._drive(handed), None)

    async def _drive(self, handed: Any) -> None:
        """To the end: a loop that is closed by ``asyncio.run`` cancels this once, and waits for it."""
        while type(handed) is not _End:
            try:
                result = await handed
            except BaseException as error:  # noqa: BLE001  the strand's to take
                handed = _resumed(self._fiber).throw(error)
            else:
                handed = _resumed(self._fiber).switch(result)
        self._take(handed)
        self._host.ended(self)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._end is not None

    def waiter(self) -> Future[None]:
        """A future that its end ends."""
        waiting = self._host.loop.create_future()
        if self._end is None:
            self._waiting.append(waiting)
        else:
            waiting.set_result(None)
        return waiting

    def __await__(self) -> Generator[Any, None, T]:
        if self._end is None:
            yield from self.waiter()
        end = self._end
        assert end is not None
        if end.error is not None:
            raise end.error
        return cast("T", end.result)


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
        self._keeps_until = 0.0
        self._daemons: set[Task[None]] = set()
        self._ends: set[Running[Any]] = set()
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
            RuntimeError: the caller is not in this loop.
        """
        self.require_loop()
        fiber = self.take_fiber()
        handed = fiber.switch(work)
        while type(handed) is not _End:
            try:
                found = await handed
            except BaseException as error:  # noqa: BLE001  raised in the door, and from there
                handed = _resumed(fiber).throw(error)
            else:
                handed = _resumed(fiber).switch(found)
        return cast("T", self._result(fiber, handed))

    def require_loop(self) -> None:
        """Refuse other loops and threads before anything is touched: a strand that a thread has made is no one else's.

        Raises:
            RuntimeError: this is another loop, or another thread. Where none runs, this one may have stopped.
        """
        running = _get_running_loop()
        if running is not self.loop and (running is not None or threading.get_ident() != self.thread):
            raise RuntimeError("this client belongs to another event loop: make one in each loop, and use it there")

    def has_kept_loop(self) -> bool:
        """Whether it is time to let the loop go on; for callers whose calls often wait for nothing."""
        now = time.monotonic()  # uvloop's own stands still meanwhile
        if now < self._keeps_until:
            return False
        self._keeps_until = now + _KEEP_S
        return True

    def call(self, work: Callable[[], T], *, may_block: bool = False) -> T:
        """Outside of coroutines: run code that never parks; its result. It waits for a disk only with ``may_block``."""
        self.require_loop()
        fiber = self.take_fiber()
        fiber.strand.may_block = may_block
        handed = fiber.switch(work)
        fiber.strand.may_block = False
        if type(handed) is not _End:
            raise RuntimeError(f"{work!r} waits, in a callback of the event loop")
        return cast("T", self._result(fiber, handed))

    def take_fiber(self) -> Any:
        """A greenlet that waits for work: to begin one costs twenty times what it costs to go on with it."""
        if self._idle:
            fiber = self._idle.pop()
        else:
            fiber = greenlet(_serve)
            fiber.strand = Strand(self)
        fiber.parent = getcurrent()  # a strand may have made it, by ``call``
        fiber.gr_context = fiber.parent.gr_context
        return fiber

    def leave_fiber(self, fiber: Any) -> None:
        """It waits for work again."""
        fiber.gr_context = None
        if len(self._idle) < IDLE_MAX:
            self._idle.append(fiber)

    def _result(self, fiber: Any, end: _End) -> object:
        self.leave_fiber(fiber)
        if end.error is not None:
            raise end.error
        return end.result

    def start_daemon(self, name: str, run: Callable[[], None]) -> None:
        """Run ``run`` as a task of its own."""
        task = self.task(self.run(run), name, Context())
        self._daemons.add(task)
        task.add_done_callback(self._daemons.discard)

    def task(self, work: Coroutine[Any, Any, T], name: str | None, context: Context | None = None) -> Task[T]:
        """A task that begins in a later turn of the loop, as a thread would, whatever the loop's task factory does."""
        return asyncio.Task(work, loop=self.loop, name=name, context=context)

    def begin_end(self, work: Callable[[], T]) -> Running[T]:
        """Begin, in a coroutine, what goes to its end whatever becomes of its caller; ``await_ends`` waits for it.

        Raises:
            RuntimeError: as ``run``.
        """
        self.require_loop()
        running = Running(self, work)
        if not running.is_done:
            self._ends.add(running)
        return running

    def ended(self, running: Running[Any]) -> None:
        """What was begun has ended."""
        self._ends.discard(running)

    async def to_end(self, work: Callable[[], T]) -> T:
        """As ``run``; a caller that is cancelled leaves the work to go to its end."""
        return await self.begin_end(work)

    async def opened(self, make: Callable[[], T], close: Callable[[T], None]) -> T:
        """``make`` what has to be closed; what a caller is cancelled over is closed at once."""
        making = self.begin_end(make)
        try:
            return await making
        except asyncio.CancelledError:
            self.begin_end(lambda: close(required().wait_for(making)))
            raise

    async def await_ends(self, timeout: float) -> None:
        """Wait for what ``begin_end`` has begun, and for what that has begun."""
        until = self.loop.time() + timeout
        while self._ends and (rest := until - self.loop.time()) > 0:
            await asyncio.wait([running.waiter() for running in self._ends], timeout=rest)

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
            await asyncio.sleep(_LOOK_S)  # not 0: that would keep the loop busy all the while
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


# --- locks -----------------------------------------------------------------------------------------------------------


class LoopLock:
    """A lock of the strands of one loop: waiting for it parks the strand."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Signal] = deque()

    def __enter__(self) -> None:
        while self._is_held:
            waiter = Signal()
            self._waiting.append(waiter)
            try:
                waiter.wait(_LOCK_LOOK_S)
            finally:
                self._waiting.remove(waiter)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        for waiter in self._waiting:  # all: the first one may be cancelled
            waiter.set()


class LoopCondition(threading.Condition):
    """What the strands of one loop wait for. There is nothing to lock: they change only when one parks."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Signal] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        """Park until ``notify_all``, ``timeout`` seconds at most; whether it came."""
        waiter = Signal()
        self._waiting.append(waiter)
        try:
            return waiter.wait(_LOCK_LOOK_S if timeout is None else timeout)
        finally:
            self._waiting.remove(waiter)

    def notify_all(self) -> None:
        """Wake all that wait."""
        for waiter in self._waiting:
            waiter.set()


# --- SIGTERM ---------------------------------------------------------------------------------------------------------

_listening: dict[object, tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = {}
_former_handler: Any = None  # the handler before the first one that listens


@contextmanager
def until_terminated(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` in the loop on SIGTERM while the block runs; nothing where this is not the main thread."""
    global _former_handler
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = object()
    if not _listening:
        _former_handler = signal.signal(signal.SIGTERM, _sigterm_heard)
    _listening[ours] = loop, stop
    try:
        yield
    finally:
        del _listening[ours]
        if not _listening and signal.getsignal(signal.SIGTERM) is _sigterm_heard:
            signal.signal(signal.SIGTERM, _former_handler)


def _sigterm_heard(number: int, frame: FrameType | None) -> None:
    for loop, stop in list(_listening.values()):
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop)  # wakes a loop that waits
    if callable(_former_handler):
        _former_handler(number, frame)


threads.watch_strands(current)
