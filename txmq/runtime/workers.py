"""A thread that works for others: for one caller at a time, in the order of their calls.

What may block, and belongs to one thread (a database's connection), is used in there. Its caller waits: a thread
sleeps, a strand lets its loop go on.

Invariants:
    * one piece of work at a time, each in a copy of its caller's context;
    * a caller that gives up its wait (cancelled, Ctrl-C) leaves the work running: what is handed over next comes after
      it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from txmq.runtime.caller import current_process
from txmq.runtime.threads import Signal

T = TypeVar("T")
_WAIT_S = 3600.0  # a wait that comes back early is begun again


class WorkUnendedError(Exception):
    """A piece of work took too long, and goes on."""


class _Job:
    """A piece of work, and what became of it."""

    __slots__ = ("context", "done", "error", "is_over", "result", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.context, self.done = copy_context(), Signal()
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False

    def run(self) -> None:
        assert self.work is not None
        try:
            self.result = self.context.run(self.work)
        except BaseException as error:  # noqa: BLE001  raised again in the caller
            self.error = error
        self.work = None
        self.is_over = True
        self.done.set()


class Worker:
    """See the module's docstring. Its thread begins when it is made, and keeps no process alive.

    Thread safety: any thread, any strand.
    """

    __slots__ = ("_jobs", "_process")

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._process = current_process()
        threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True).start()

    def call(self, work: Callable[[], T], on_left: Callable[[], None], timeout_s: float = math.inf) -> T:
        """Run ``work`` there and wait for its end; its result, or its exception.

        Args:
            on_left: called if the caller's wait is interrupted, or too long: the work goes on then.

        Raises:
            WorkUnendedError: it has not ended after ``timeout_s`` seconds.
            RuntimeError: the thread is that of the process which this one was forked from.
        """
        job, until = self._hand_over(work), time.monotonic() + timeout_s
        try:
            while not job.is_over:
                job.done.wait(min(until - time.monotonic(), _WAIT_S))
                if not job.is_over and time.monotonic() >= until:
                    raise WorkUnendedError(f"it has not ended after {timeout_s:g} s")
        except BaseException:
            on_left()
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # the exception's traceback holds this frame
        return cast("T", job.result)

    def post(self, work: Callable[[], None]) -> None:
        """Have ``work`` run after what was handed over before; what it raises is lost."""
        self._hand_over(work)

    def _hand_over(self, work: Callable[[], Any]) -> _Job:
        if self._process != current_process():
            raise RuntimeError("this connection's thread is that of the process which this one was forked from")
        job = _Job(work)
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """End the thread after what was handed over before."""
        self._jobs.put(None)


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # what it holds is not kept until the next one comes
