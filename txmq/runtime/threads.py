"""The door to threads: locks, signals, futures, daemon threads, and what happens after ``fork`` and at the exit.

``Signal`` is a binary semaphore: ``set`` wakes one waiter, now or when it comes to wait. It is much cheaper to make
than a ``threading.Event``, and one is made for every request.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from txmq.runtime.ports import Clock

__all__ = [
    "Attempt", "Condition", "Exclusive", "Forked", "Future", "Lock", "RLock", "Signal", "Strand", "ThreadLocal",
    "blocking", "new_condition", "new_future", "new_lock", "off_loop", "processor_count", "sheltered", "start_daemon",
    "start_threads", "thread_number", "to_end", "until_terminated", "watch_exit", "watch_forks", "watch_strands",
]  # fmt: skip

Condition = threading.Condition
Lock = threading.Lock
RLock = threading.RLock
ThreadLocal = threading.local
_JOIN_S = 0.2
_LOOK_S = 0.05  # an interrupt may come between the end of a turn and the signal for those that wait
_TIMEOUT_S_MAX = threading.TIMEOUT_MAX
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def thread_number() -> int:
    """The thread that asks, or the task of a strand; numbers of threads that ended are used again."""
    strand = _watched()
    return threading.get_ident() if strand is None else strand.task_number


def processor_count() -> int:
    """How many processors this machine has."""
    return os.cpu_count() or 1


class Strand(Protocol):
    """What runs on an event loop as if it were a thread (``runtime/strands.py``)."""

    @property
    def task_number(self) -> int:
        """The task that it runs in; numbers of tasks that ended are used again."""

    def park(self, timeout: float, is_woken: Callable[[], bool] | None = None) -> None:
        """Let the loop go on until ``unpark`` is called, ``timeout`` seconds at most.

        Args:
            is_woken: asked when ``unpark`` would be heard already: if it says so, there is nothing to wait for.
        """

    def unpark(self) -> None:
        """End ``park``; from any thread, and nothing if the strand is not parked."""

    def wait_for(self, awaited: Awaitable[T]) -> T:
        """Let the loop go on until ``awaited`` is done; its result, or its exception."""

    def start_daemon(self, name: str, run: Callable[[], None]) -> None:
        """Begin another strand on the same loop."""

    def run_together(self, name: str, count: int, run: Callable[[], None]) -> None:
        """Run ``count`` strands on the same loop, and wait for their end."""

    def until_terminated(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Call ``stop`` in the loop on SIGTERM while the block runs."""

    def off_loop(self, work: Callable[[], T]) -> T:
        """Call what blocks in a thread that is there for that, to its end; the loop goes on meanwhile."""

    def to_end(self, work: Callable[[], T]) -> T:
        """Call ``work``, which goes to its end whatever becomes of this strand."""

    def new_future(self) -> Future[Any]:
        """A future of the loop that strands set, and wait for, as threads do."""

    def new_lock(self) -> AbstractContextManager[object]:
        """A lock of strands, whose holder may park."""

    def new_condition(self) -> Condition:
        """A condition that strands wait for. It has no lock: between two parks no other strand runs."""


def _no_strand() -> Strand | None:
    return None


_watched: Callable[[], Strand | None] = _no_strand


def current_strand() -> Strand | None:
    """The strand in which the caller runs; None: a thread of its own."""
    return None if _watched is _no_strand else _watched()


def watch_strands(current: Callable[[], Strand | None]) -> None:
    """From now on ``current`` says in which strand the caller runs."""
    global _watched
    _watched = current


def off_loop(work: Callable[[], T]) -> T:
    """Call what waits for a disk, or for another library: in a thread, if the caller is on an event loop."""
    strand = _watched()
    return work() if strand is None else strand.off_loop(work)


def to_end(work: Callable[[], T]) -> T:
    """Call ``work``; in a strand it goes to its end, even if the strand is cancelled."""
    strand = _watched()
    return work() if strand is None else strand.to_end(work)


def blocking(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that is called ``off_loop``."""

    @wraps(method)
    def called(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        return off_loop(partial(method, self, *args, **named))

    return called


def new_future() -> Future[Any]:
    """A result to come: as threads wait for it, or awaited where a strand makes it."""
    strand = _watched()
    return Future() if strand is None else strand.new_future()


def new_lock() -> AbstractContextManager[object]:
    """A lock for calls that wait: of threads, or of strands where a strand makes it."""
    strand = _watched()
    return Lock() if strand is None else strand.new_lock()


def new_condition() -> tuple[AbstractContextManager[object], Condition]:
    """A reentrant lock and its condition: of threads, or of strands where a strand makes them."""
    strand = _watched()
    if strand is None:
        lock = RLock()
        return lock, Condition(lock)
    condition = strand.new_condition()
    return condition, condition


class Signal:
    """Wakes a thread, or a strand. Several ``set`` before a ``wait`` count as one."""

    __slots__ = ("_lock", "_strand")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._strand: Strand | None = None  # that waits

    def set(self) -> None:
        """Wake the waiter, now or when it comes."""
        try:
            self._lock.release()
        except RuntimeError:  # set already: releasing is the test and the deed in one step, so two setters cannot race
            return
        strand = self._strand
        if strand is not None:
            strand.unpark()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; whether the signal came."""
        strand = _watched()
        if strand is None:
            return self._lock.acquire(timeout=min(max(timeout, 0.0), _TIMEOUT_S_MAX))
        return self._wait_in(strand, timeout)

    def _wait_in(self, strand: Strand, timeout: float) -> bool:
        if timeout > 0:
            if self._lock.acquire(blocking=False):
                return True
            self._strand = strand
            try:
                # Listed first, looked second: ``set`` in another thread either finds the strand, or is seen here.
                strand.park(timeout, lambda: not self._lock.locked())
            finally:
                self._strand = None
        return self._lock.acquire(blocking=False)


class Attempt:
    """One attempt to take an ``Exclusive``."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class Exclusive:
    """What one thread has at a time, and may hold over calls.

    A lock would stay taken if a KeyboardInterrupt struck after its ``acquire``. Each attempt has its own object, which
    is over before any call that could be struck::

        me = Attempt()
        try:
            if exclusive.take(me):
                ...
        finally:
            me.is_over = True
            exclusive.leave(me)
    """

    __slots__ = ("_holder", "_lock", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: Attempt | None = None
        self._waiting: list[Signal] = []

    def take(self, me: Attempt) -> bool:
        """Take it if no other attempt has it; whether this one has it now."""
        with self._lock:
            holder = self._holder
            if holder is None or holder.is_over:
                self._holder = me
        return self._holder is me

    @property
    def _is_free(self) -> bool:
        return self._holder is None or self._holder.is_over

    def take_before(self, deadline: float, me: Attempt, clock: Clock) -> bool:
        """Take it when the others have left it; whether this attempt has it before ``deadline`` (monotonic time)."""
        while not self.take(me):
            now = clock.monotonic()
            if now >= deadline:
                return False
            wait_s = min(deadline - now, _LOOK_S)
            if not self._wait(wait_s) and clock.monotonic() == now:
                clock.sleep(wait_s)  # simulated time
        return True

    def _wait(self, timeout: float) -> bool:
        waiter = self._new_signal()
        with self._lock:
            if self._is_free:
                return True
            self._waiting.append(waiter)
        is_left = waiter.wait(timeout)
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
        return is_left

    def _new_signal(self) -> Signal:
        return Signal()

    def leave(self, me: Attempt) -> None:
        """Leave it to others, if this attempt has it."""
        me.is_over = True
        with self._lock:
            if self._holder is not me:
                return
            self._holder = None
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.set()


def start_threads(name: str, count: int, run: Callable[[], None]) -> None:
    """Run ``count`` threads and wait for their end; with one, the caller is it. In a strand: strands."""
    if count == 1:
        run()
        return
    strand = _watched()
    if strand is not None:
        strand.run_together(name, count, run)
        return
    threads = [threading.Thread(target=run, name=f"{name}-{number}", daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(_JOIN_S)  # by and by: a join without end hears no signal


@contextmanager
def until_terminated(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on SIGTERM and SIGINT while the block runs; nothing where this is not the main thread.

    An event loop cancels a task on SIGINT, so that a strand stops on SIGTERM alone.
    """
    strand = _watched()
    if strand is not None:
        with strand.until_terminated(stop):
            yield
        return
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = Signal()

    def heard(_number: int, _frame: object) -> None:
        asked.set()  # no lock may be taken in here: the main thread may hold it

    def watch() -> None:
        if asked.wait(_TIMEOUT_S_MAX):
            stop()

    kept = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    start_daemon("txmq-signals", watch)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        asked.set()


def start_daemon(name: str, run: Callable[[], None]) -> None:
    """Start a thread that does not keep the process alive; in a strand, a strand of the same loop."""
    strand = _watched()
    if strand is None:
        threading.Thread(target=run, name=name, daemon=True).start()
    else:
        strand.start_daemon(name, run)


def sheltered(name: str, work: Callable[[], None]) -> None:
    """Call ``work``, which a KeyboardInterrupt must not leave half done; it raises nothing that a caller must handle.

    An interrupt strikes the main thread alone. There, another thread does the work: the caller's wait may be struck.
    """
    if _watched() is not None or threading.current_thread() is not threading.main_thread():
        work()
        return
    done = Signal()

    def run() -> None:
        try:
            work()
        finally:
            done.set()

    try:
        start_daemon(name, run)
    except RuntimeError:  # the interpreter ends, or there are too many threads
        work()
        return
    done.wait(_TIMEOUT_S_MAX)


class Forked(Protocol):
    """Something that must not go on in a child process as it was in the parent."""

    def forked(self) -> None:
        """Called in the child, where no other thread lives: let go of what the parent goes on using."""


_concerned: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch_forks(owner: Forked) -> None:
    """Have ``owner.forked()`` run in every process forked from this one, for as long as ``owner`` lives."""
    _concerned.add(owner)


def _in_child() -> None:
    for owner in list(_concerned):
        owner.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Exiting(Protocol):
    """Something that has work to end before the process does."""

    def exiting(self) -> None:
        """Called when the main thread has ended; for a short time."""


_exiting: weakref.WeakSet[Exiting] = weakref.WeakSet()


def watch_exit(owner: Exiting) -> None:
    """Have ``owner.exiting()`` run when this process ends in order, if ``owner`` lives then."""
    _exiting.add(owner)


@atexit.register
def _at_exit() -> None:
    for owner in list(_exiting):
        owner.exiting()
