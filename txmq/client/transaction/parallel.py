"""The same thing for several databases at once: one of them in the caller's thread, the others in threads of their own.

Theory of operation. Databases answer while others do, so two branches take as long as one. Work for one database only
runs in the caller's thread, and no thread is made.

The caller waits for all. If it is interrupted meanwhile (Ctrl-C), it waits ``GRACE_S`` more: a database that does
not answer must not hold a person who wants to leave. A job that has not returned by then is *late*: it still uses its
connection, so no other thread may. Other work on that connection is given to ``Job.when_free`` and done at the end of
the late job's thread.

Invariants:
    * a connection is used by one thread at a time;
    * an exception in any of the threads is raised in the caller, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from txmq.runtime.threads import Lock, Signal, start_daemon

GRACE_S = 2.0
_WAIT_S = 3600.0  # a wait that comes back early is begun again
_THREAD_NAME = "txmq-branch"


class Job:
    """Work of one thread for one database, once at a time.

    Attributes:
        is_busy: it runs, in whichever thread.

    Thread safety: ``run`` and ``when_free`` from different threads.
    """

    __slots__ = ("_afterwards", "_lock", "_signal", "error", "is_busy")

    def __init__(self) -> None:
        self.is_busy = False
        self.error: BaseException | None = None
        self._afterwards: Callable[[], None] | None = None
        self._lock = Lock()
        self._signal = Signal()

    def start(self, work: Callable[[], None]) -> None:
        """Run it in a thread of its own, or here if the system has none left."""
        self.is_busy, self.error = True, None
        try:
            start_daemon(_THREAD_NAME, lambda: self._run(work))
        except RuntimeError:
            self._run(work)

    def run(self, work: Callable[[], None]) -> None:
        """Run it here; its exception is kept."""
        self.is_busy, self.error = True, None
        self._run(work)

    def when_free(self, work: Callable[[], None]) -> None:
        """Do something with the connection: now, or when the late one has ended."""
        with self._lock:
            if self.is_busy:
                self._afterwards = work
                return
        work()

    def wait(self, timeout_s: float = _WAIT_S) -> None:
        """Wait until it has run."""
        while self.is_busy and (self._signal.wait(timeout_s) or timeout_s == _WAIT_S):
            pass  # a signal may be left from an earlier run

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised again by ``run_all``
            self.error = error
        with self._lock:
            self.is_busy = False
            afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            afterwards()
        self._signal.set()


def run_all(jobs: Sequence[Job], works: Sequence[Callable[[], None]]) -> None:
    """Run each work as its job, all at once, and wait for them.

    Raises:
        BaseException: a work's; or the caller was interrupted, and some may be late.
    """
    try:
        for job, work in zip(jobs[1:], works[1:], strict=True):
            job.start(work)
        jobs[0].run(works[0])
        interrupt = jobs[0].error
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt
        for job in jobs[1:]:
            job.wait()
    except BaseException:
        for job in jobs[1:]:
            job.wait(GRACE_S)
        raise
    for job in jobs:
        if job.error is not None:
            raise job.error
