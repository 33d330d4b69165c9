"""Simulated processes with threads: real threads of which exactly one runs, and the world says which.

Theory of operation. A ``Task`` is a thread of a ``Host`` (a process). It runs only while the world's loop waits for it
(a baton: one lock per task, one for the loop), and gives the baton back where the real thing would sleep: in ``park``.
Every door that may sleep (clock, stream, database, lock, signal) parks; so the order of all steps follows from the
world's events, and these from the seed. ``installed`` puts the doors' simulated versions in place of those that
``txmq.client`` and ``txmq.xa`` imported.

A host dies like a process: from then on every door raises ``Killed`` in its tasks, which unwinds them without effect
on anything outside; what it held outside (streams, database connections) is let go by ``on_death``.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, cast

from txmq.runtime import caller, threads
from txmq.runtime.crashpoints import SimulatedCrash

from .world import Simulation

_RESUME_S_MAX = 60.0  # real time: a step that takes longer hangs, also on a busy machine
_INSIDE = (  # modules that get simulated doors
    "txmq.client", "txmq.xa", "txmq.aio", "txmq.runtime.net", "txmq.runtime.loop_stream", "txmq.registry",
    "txmq.broker.shell",
)  # fmt: skip
_PARK_S_MIN = 1e-6  # less is lost in the clock's rounding, and whoever waits for a deadline would wait for ever


class Killed(SimulatedCrash):
    """The process of this thread is dead."""


class Task:
    """One thread of a host."""

    is_strand = False
    may_park = True  # False where a callback of a loop runs

    def __init__(self, host: Host, name: str, run: Callable[[], None]) -> None:
        self.host, self.name, self._run = host, name, run
        self.number = host.threads.take_number()
        self.is_over = self.is_started = False
        self.turn = 0
        self._thread: threading.Thread | None = None
        self._baton = threading.Lock()
        self._baton.acquire()

    def resume(self, turn: int) -> None:
        """From the world's loop: let the task run until it parks or ends, if it still stands at that turn."""
        if turn != self.turn or self.is_over:
            return
        if self.host.is_paused:
            self.host.when_running(lambda: self.resume(turn))
            return
        all_threads = self.host.threads
        self.turn += 1
        all_threads.current = self
        if self.is_started:
            self._baton.release()
        else:
            self.is_started = True
            self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
            self._thread.start()
        if not all_threads.loop_baton.acquire(timeout=_RESUME_S_MAX):
            raise AssertionError(f"{self.host.name}/{self.name} hangs: {self._stack()}")
        all_threads.current = None
        if all_threads.failure is not None:
            failure, all_threads.failure = all_threads.failure, None
            raise failure

    def _stack(self) -> str:
        """Where it stands, innermost first: a hang may depend on what the seed does not repeat."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "its thread has ended"
        lines = [f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in traceback.extract_stack(frame)[-12:]]
        return " < ".join(reversed(lines))

    def wake(self) -> None:
        """Have it resumed soon, where it is parked."""
        turn = self.turn
        self.host.world.after(0.0, lambda: self.resume(turn))

    def park(self, seconds: float | None) -> None:
        """From the task itself: give the baton back until woken, or so many seconds have passed."""
        host = self.host
        host.require_alive()
        turn = self.turn
        if seconds is not None:
            host.world.after(max(_PARK_S_MIN, seconds), lambda: self.resume(turn))
        host.threads.loop_baton.release()
        self._baton.acquire()
        host.require_alive()

    def _main(self) -> None:
        inside = self.host.threads.inside
        inside.add(threading.get_ident())
        try:
            if self.host.is_alive:
                self._run()
        except SimulatedCrash:
            pass
        except BaseException as failure:  # noqa: BLE001  raised again by the world's loop
            if self.host.is_alive:
                self.host.threads.failure = failure
        finally:
            inside.discard(threading.get_ident())
            self.is_over = True
            self.host.threads.loop_baton.release()


class Host:
    """One process: its tasks, its clock, and what dies with it.

    Attributes:
        ahead_ms: of its wall clock.
        countdown: crash points until it dies by itself; 0 for never.
        on_death: what the system does with what it held.
    """

    def __init__(self, all_threads: Threads, name: str) -> None:
        self.threads, self.name = all_threads, name
        self.world = all_threads.world
        self.is_alive, self.is_paused = True, False
        self._when_running: list[Callable[[], None]] = []
        self.tasks: list[Task] = []
        self.on_death: list[Callable[[], None]] = []
        self.ahead_ms = self.world.rng.choice((0, 0, -600_000, 600_000))
        self.countdown = 0
        all_threads.hosts.append(self)

    def start(self, name: str, run: Callable[[], None]) -> Task:
        """A new thread."""
        task = Task(self, name, run)
        self.tasks.append(task)
        task.wake()
        return task

    def when_running(self, call: Callable[[], None]) -> None:
        """Call now, or when the process, which is stopped, goes on."""
        if self.is_paused:
            self._when_running.append(call)
        else:
            call()

    def pause(self) -> None:
        """The process is stopped."""
        self.is_paused = True

    def go_on(self) -> None:
        """It goes on."""
        self.is_paused = False
        waiting, self._when_running = self._when_running, []
        for call in waiting:
            self.world.after(0.0, call)

    def require_alive(self) -> None:
        """Every door asks first."""
        if not self.is_alive:
            raise Killed(self.name)

    def kill(self) -> None:
        """The process ends here."""
        if not self.is_alive:
            return
        self.is_alive = self.is_paused = False
        self.world.trace(self.name, "dies")
        for release in self.on_death:
            release()
        for task in self.tasks:
            if task is not self.threads.current:
                task.wake()

    def reached(self, name: str) -> None:
        """A crash point, in one of its tasks."""
        self.require_alive()
        self.world.trace(self.name, name)
        if self.countdown:
            self.countdown -= 1
            if not self.countdown:
                self.world.meet("client died at a crash point")
                self.kill()
                raise Killed(name)
        if self.world.chance(0.1) and required_task().may_park:
            pause(self.world.rng.uniform(0.0, 0.02))

    # --- port Clock ---

    def now_ms(self) -> int:
        """Wall clock."""
        return self.world.clock.now_ms() + self.ahead_ms

    def monotonic(self) -> float:
        """Seconds."""
        return self.world.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        pause(seconds)


class TasksOfLoop(Protocol):
    """An event loop, whose strands run in no thread of their own (``loops``)."""

    def task(self) -> Task:
        """What runs there now."""


class Threads:
    """All hosts of a world.

    Attributes:
        inside: the threads of the simulation, by their numbers. Another thread of this process, which a test before
            has left, gets real doors: it has no task that could be parked.
    """

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.inside: set[int] = set()
        self.hosts: list[Host] = []
        self.current: Task | None = None
        self.loop: TasksOfLoop | None = None  # whose callback runs
        self.failure: BaseException | None = None
        self.loop_baton = threading.Lock()
        self.loop_baton.acquire()
        self._numbers = 0

    def take_number(self) -> int:
        """One number per task."""
        self._numbers += 1
        return self._numbers

    def close(self) -> None:
        """End all threads."""
        for host in self.hosts:
            host.is_alive = host.is_paused = False
        for host in self.hosts:
            for task in host.tasks:
                if task.is_started and not task.is_over:
                    task.resume(task.turn)


_threads: Threads | None = None


def current_task() -> Task | None:
    """The task that runs, or None in the world's loop."""
    if _threads is None:
        return None
    return _threads.current if _threads.loop is None else _threads.loop.task()


def required_task() -> Task:
    """The task that runs."""
    task = current_task()
    assert task is not None, "a door that sleeps was used outside of a simulated thread"
    return task


def pause(seconds: float) -> None:
    """Sleep, in a task."""
    required_task().park(seconds)


class SimLock:
    """In place of ``threading.Lock``."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See ``threading.Lock``."""
        if self._is_held and not blocking:
            return False
        end = None if timeout < 0 else timeout
        if self._is_held:
            task = required_task()
            assert not task.is_strand, "a strand waits for a lock, whose holder has parked"
            task.host.world.meet("a thread waited for a lock")
            started = task.host.world.now
            while self._is_held:
                left = None if end is None else end - (task.host.world.now - started)
                if left is not None and left <= 0:
                    return False
                self._waiters.append(task)
                task.park(left)
        self._is_held = True
        return True

    def locked(self) -> bool:
        """See ``threading.Lock``."""
        return self._is_held

    def release(self) -> None:
        """See ``threading.Lock``."""
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            task.wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimRLock:
    """In place of ``threading.RLock``: its holder may take it again."""

    def __init__(self) -> None:
        self._lock = SimLock()
        self._holder: Task | None = None
        self._depth = 0

    def acquire(self) -> bool:
        """See ``threading.RLock``."""
        task = required_task()
        if self._holder is not task:
            self._lock.acquire()
            self._holder = task
        self._depth += 1
        return True

    def release(self) -> None:
        """See ``threading.RLock``."""
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Others may take it meanwhile, however often its holder has."""
        task, depth = self._holder, self._depth
        if task is not required_task():
            raise RuntimeError("cannot wait on un-acquired lock")
        self._holder, self._depth = None, 0
        self._lock.release()
        try:
            yield
        finally:
            if task.host.is_alive:
                self._lock.acquire()
            self._holder, self._depth = task, depth


class SimCondition:
    """In place of ``threading.Condition``, with a lock of its own or a given one."""

    def __init__(self, lock: SimRLock | None = None) -> None:
        self._own = SimRLock() if lock is None else lock
        self.acquire, self.release = self._own.acquire, self._own.release
        self._waiters: list[SimSignal] = []

    def __enter__(self) -> bool:
        return self._own.acquire()

    def __exit__(self, *_: object) -> None:
        self._own.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See ``threading.Condition``."""
        signal = SimSignal()
        self._waiters.append(signal)
        with self._own.lent():
            try:
                return signal.wait(1e9 if timeout is None else timeout)
            finally:
                if signal in self._waiters:
                    self._waiters.remove(signal)

    def notify(self, n: int = 1) -> None:
        """See ``threading.Condition``."""
        woken, self._waiters = self._waiters[:n], self._waiters[n:]
        for signal in woken:
            signal.set()

    def notify_all(self) -> None:
        """See ``threading.Condition``."""
        self.notify(len(self._waiters))


class SimSignal:
    """In place of ``txmq.runtime.threads.Signal``."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: Task | None = None

    def set(self) -> None:
        """Wake the waiter."""
        self._is_set = True
        if self._waiter is not None:
            self._waiter.wake()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds."""
        if not self._is_set and timeout > 0:
            self._waiter = required_task()
            try:
                self._waiter.park(timeout)
            finally:
                self._waiter = None
        found, self._is_set = self._is_set, False
        return found


class SimExclusive(threads.Exclusive):
    """In place of ``txmq.runtime.threads.Exclusive``: waits in simulated time."""

    def _new_signal(self) -> threads.Signal:
        return cast("threads.Signal", SimSignal())


class SimFuture(Future[Any]):
    """In place of ``concurrent.futures.Future``."""

    def result(self, timeout: float | None = None) -> Any:
        """See ``Future``."""
        if not self.done():
            signal = SimSignal()
            self.add_done_callback(lambda _: signal.set())
            signal.wait(1e9 if timeout is None else timeout)
        return super().result(0)


def _start_daemon(name: str, run: Callable[[], None]) -> None:
    required_task().host.start(name, run)


def _start_threads(name: str, count: int, run: Callable[[], None]) -> None:
    if count == 1:
        run()
        return
    tasks = [required_task().host.start(f"{name}-{number}", run) for number in range(count)]
    while not all(task.is_over for task in tasks):
        pause(0.001)


def _current_owner() -> tuple[int, int]:
    task = required_task()
    return task.host.tasks[0].number, task.number


def _new_condition() -> tuple[SimRLock, SimCondition]:
    lock = SimRLock()
    return lock, SimCondition(lock)


_OF_THREADS: dict[Callable[..., Any], Callable[..., Any]] = {
    threads.Signal: SimSignal, threads.Exclusive: SimExclusive, threads.new_lock: SimLock,
    threads.new_future: SimFuture, threads.new_condition: _new_condition, threads.start_daemon: _start_daemon,
    threads.start_threads: _start_threads,
}  # fmt: skip


def _but_in_strands(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    """What strands do is done by the loop, which is simulated beneath them."""
    return lambda *args: (simulated if threads.current_strand() is None else real)(*args)


def _inside(all_threads: Threads, real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    inside, number = all_threads.inside, threading.get_ident
    return lambda *args, **named: (simulated if number() in inside else real)(*args, **named)


@contextmanager
def installed(all_threads: Threads, replaced: dict[Any, Any]) -> Iterator[None]:
    """Simulated doors in every module of the client; ``replaced`` has more of them: the real one and its stand-in."""
    global _threads
    doors: dict[Any, Any] = {
        threads.Lock: SimLock, threads.Condition: SimCondition, threads.RLock: SimRLock, threads.Future: SimFuture,
        caller.current_owner: _current_owner,
    } | {real: _but_in_strands(real, simulated) for real, simulated in _OF_THREADS.items()} | replaced  # fmt: skip
    all_threads.inside.add(threading.get_ident())
    doors = {real: _inside(all_threads, real, simulated) for real, simulated in doors.items()}
    undo: list[tuple[Any, str, Any]] = []
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith(_INSIDE):
            for name, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__hash__", None) and value in doors:
                    undo.append((module, name, value))
                    setattr(module, name, doors[value])
    _threads = all_threads
    try:
        yield
    finally:
        all_threads.close()
        _threads = None
        for module, name, value in undo:
            setattr(module, name, value)
