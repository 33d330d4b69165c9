"""Event loops of simulated processes: ``txmq.aio`` and its strands, as they ship, in the world's time.

Theory of operation. A ``SimLoop`` is an asyncio loop whose callbacks are events of the world: tasks, futures and timers
are asyncio's own. Its callbacks run where the world's loop runs, one at a time, as those of a process's main thread.
Streams tell it when there is something to read; what blocks (``run_in_executor``, a connection's thread) is a ``Task``
of the same host. In a strand the doors that ask for their task find one that parks the strand (``StrandTask``).

A process that dies runs no callback any more. Its strands are unwound at once, by ``Killed``, as its threads are.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, Future, Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, cast

from txmq.runtime import loop_stream, strands, workers
from txmq.runtime.caller import current_process
from txmq.runtime.ports import Stream
from txmq.runtime.tls import ClientTls

from .stream import Network, SimStream
from .threads import Host, Killed, SimSignal, Task, required_task
from .tls_streams import shake

_THROWS_MAX = 1000  # waits of one strand that ends, before it counts as endless


class StrandTask(Task):
    """What the doors find in a strand: it parks that."""

    is_strand = True

    def __init__(self, host: Host, strand: strands.Strand | None) -> None:
        super().__init__(host, "strand", lambda: None)
        self._strand, self.is_over = strand, True

    @property
    def may_park(self) -> bool:  # type: ignore[override]
        """Whether a task of the loop, or an end, awaits it."""
        return self._strand is not None and bool(self._strand.number or asyncio.current_task(self._strand.host.loop))

    def wake(self) -> None:
        """See ``Task``."""
        if self._strand is not None:
            self._strand.unpark()

    def park(self, seconds: float | None) -> None:
        """See ``Task``."""
        self.host.require_alive()
        assert self._strand is not None, "a door that sleeps was used in a coroutine"
        self._strand.park(1e9 if seconds is None else seconds)
        self.host.require_alive()


class SimLoop(AbstractEventLoop):
    """The loop of one process."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.failure: BaseException | None = None  # raised by the world's loop
        self.hosts: list[strands.Host] = []  # of strands
        self._main = StrandTask(host, None)
        self._tasks: dict[strands.Strand, StrandTask] = {}
        self._coroutines: dict[Coroutine[Any, Any, Any], asyncio.Task[Any]] = {}
        self._readers: dict[int, Callable[[], None]] = {}
        self._numbers = 0
        host.on_death.append(self._died)

    def task(self) -> StrandTask:
        """What runs now: a strand, or a callback."""
        strand = strands.current()
        if strand is None:
            return self._main
        return self._tasks.setdefault(strand, StrandTask(self.host, strand))

    def _died(self) -> None:
        self.host.world.after(0.0, self._unwind)

    def _unwind(self) -> None:
        """Nothing of it goes on: what its strands hold is let go of, and has no effect."""
        for running in [running for host in self.hosts for running in host._ends]:
            self._in_loop(partial(_torn, running))
        for coroutine, task in list(self._coroutines.items()):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            self._in_loop(partial(_unwound, coroutine))

    def _in_loop(self, work: Callable[[], object]) -> None:
        threads, before = self.host.threads, asyncio._get_running_loop()
        threads.loop = self
        asyncio._set_running_loop(self)
        try:
            work()
        finally:
            threads.loop = None
            asyncio._set_running_loop(before)
        if self.failure is not None and self.host.is_alive:
            failure, self.failure = self.failure, None
            raise failure

    # --- the port of asyncio -----------------------------------------------------------------------------------------

    def time(self) -> float:
        """See asyncio."""
        return self.host.world.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        """See asyncio."""
        handle = Handle(callback, args, self, context)
        self._plan(0.0, handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        """See asyncio."""
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """See asyncio."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """See asyncio."""
        handle = TimerHandle(when, callback, args, self, context)
        self._plan(max(1e-6, when - self.time()), handle)
        return handle

    def _plan(self, seconds: float, handle: Handle) -> None:
        def run() -> None:
            if self.host.is_alive and not handle.cancelled():
                self.host.when_running(lambda: self._in_loop(handle._run))

        if self.host.is_alive:
            self.host.world.after(seconds, run)

    def _timer_handle_cancelled(self, _handle: TimerHandle) -> None:
        """See asyncio."""

    def create_future(self) -> Future[Any]:
        """See asyncio."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        """See asyncio."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._coroutines[coro] = task
        task.add_done_callback(lambda _: self._coroutines.pop(coro, None))
        return task

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, func: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        """In a thread of the process."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001  raised by the caller
                self.call_soon(_set, future, None, error)
            else:
                self.call_soon(_set, future, result, None)

        self.host.start("blocking", run)
        return future

    def get_debug(self) -> bool:
        """See asyncio."""
        return False

    def is_running(self) -> bool:
        """See asyncio."""
        return True

    def is_closed(self) -> bool:
        """See asyncio."""
        return not self.host.is_alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nobody hears of it in asyncio: it fails the world."""
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.failure = error or AssertionError(f"{self.host.name}: {context['message']}")

    # --- streams -----------------------------------------------------------------------------------------------------

    def take_number(self) -> int:
        """A descriptor."""
        self._numbers += 1
        return self._numbers

    def add_reader(self, number: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """See asyncio."""
        self._readers[number] = lambda: callback(*args)
        self.readable(number)  # what has arrived before

    def readable(self, number: int) -> None:
        """There is something to read, or was."""

        def read() -> None:
            if number in self._readers:
                self._readers[number]()

        self.call_soon(read)

    def remove_reader(self, number: Any) -> bool:
        """See asyncio."""
        return self._readers.pop(number, None) is not None

    def add_writer(self, _number: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """There is room a moment later."""
        self.call_later(0.001, callback, *args)

    def remove_writer(self, _number: Any) -> bool:
        """See asyncio."""
        return True


def _set(future: Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _torn(running: strands.Running[Any]) -> None:
    handed: object = None
    for _ in range(_THROWS_MAX):
        handed = running._fiber.throw(Killed())
        if type(handed) is strands._End:
            return
    raise AssertionError(f"{running!r} does not end")


def _unwound(coroutine: Coroutine[Any, Any, Any]) -> None:
    for _ in range(_THROWS_MAX):
        try:
            coroutine.throw(Killed())
        except (StopIteration, Killed, asyncio.CancelledError):
            return
        except RuntimeError:  # it has not begun, or is over
            return
    raise AssertionError(f"{coroutine!r} does not end")


class _Stream(SimStream):
    """One that a loop reads."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(loop.host)
        self._loop, self.number = loop, loop.take_number()

    def _wake(self) -> None:
        super()._wake()  # a strand that shakes hands
        self._loop.readable(self.number)


def connect_by_loop(network: Network) -> Callable[..., loop_stream.LoopStream]:
    """``loop_stream.connect`` of a world."""

    def connect(host: str, _port: int, timeout: float, tls: ClientTls | None = None) -> loop_stream.LoopStream:
        strand = strands.required()
        stream = _Stream(cast("SimLoop", strand.host.loop))
        network.open(stream, host, timeout)
        tcp = stream if tls is None else shake(stream, tls.session(host), timeout)
        return loop_stream.LoopStream(strand.host, stream.number, cast("Stream", tcp))

    return connect


class _Jobs:
    """In place of ``SimpleQueue``."""

    def __init__(self) -> None:
        self._jobs: deque[Any] = deque()
        self._signal = SimSignal()

    def put(self, job: Any) -> None:
        """See ``queue.SimpleQueue``."""
        self._jobs.append(job)
        self._signal.set()

    def get(self) -> Any:
        """See ``queue.SimpleQueue``."""
        while not self._jobs:
            self._signal.wait(1e9)
        return self._jobs.popleft()


class SimWorker(workers.Worker):
    """In place of ``txmq.runtime.workers.Worker``: its thread is a task of the process."""

    def __init__(self, name: str) -> None:
        self._jobs = cast("Any", _Jobs())
        self._process = current_process()
        required_task().host.start(name, lambda: workers._serve(self._jobs))
