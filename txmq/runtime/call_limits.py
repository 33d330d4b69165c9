"""Ends calls that wait for a peer without end: a server that is frozen, a network that swallows packets.

Theory of operation. C libraries (mysqlclient, libpq) wait for their socket with ``poll``, and heed no timeout that is
set on it from outside; their own ones must be chosen before they connect. But each of them reads the end of its
connection at once, if the socket is shut down from another thread. So a call says until when it may wait
(``CallLimit``), and one thread of the process looks for those that are due.

Invariants:
    * only the socket of a call that is under way is shut down: the descriptor is copied first, and a call that is still
      under way after that cannot have closed it;
    * a forked child takes over none.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from txmq.runtime.threads import Signal, watch_forks

LOOK_S: Final = 0.1
IDLE_LOOKS_MAX: Final = 100  # without anything to look at; then the thread ends
_NEVER: Final = float("inf")
_THREAD_NAME: Final = "txmq-call-limits"


class CallLimit:
    """Until when the calls on one connection may wait. A ``with`` block of it is a call.

    Args:
        descriptor: of its socket; None if it has none, and nothing can be ended.

    Attributes:
        calls: under way, one in the other.
        has_passed: a call was ended: the connection is lost.

    Thread safety: used by one thread at a time.
    """

    __slots__ = ("_ask", "_descriptor", "_until", "calls", "has_passed")

    def __init__(self, descriptor: Callable[[], int] | None = None) -> None:
        self._ask, self._until = descriptor, _NEVER
        self._descriptor = -1
        self.calls, self.has_passed = 0, False

    def begin(self, seconds: float) -> None:
        """From now on calls may wait so long, all together. No call is under way."""
        self._until = time.monotonic() + seconds
        if self._ask is not None:
            with suppress(Exception):  # closed before, whatever the driver says then
                self._descriptor = self._ask()  # not while a call is under way: mysqlclient refuses then
                _watch.limits.add(self)
                if not _watch.is_running:
                    _watch.start()

    def extend(self, seconds: float) -> None:
        """They may wait so long from now on, at least."""
        self._until = max(self._until, time.monotonic() + seconds)

    def work(self, seconds: float) -> None:
        """Calls follow until ``end``, or until this is said again: so long, all together."""
        self.calls = 1
        self.begin(seconds)

    def end(self) -> None:
        """They may wait for ever."""
        _watch.limits.discard(self)
        self._until = _NEVER

    def __enter__(self) -> CallLimit:
        self.calls += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.calls -= 1

    def look(self, now: float) -> None:
        """End the call that is under way, if it is due."""
        if self.has_passed or not self._is_due(now):
            return
        try:
            copy = socket.socket(fileno=os.dup(self._descriptor))
        except OSError:  # closed meanwhile
            return
        with copy:
            if self._is_due(now):
                self.has_passed = True
                with suppress(OSError):  # the peer has ended it
                    copy.shutdown(socket.SHUT_RDWR)

    def _is_due(self, now: float) -> bool:
        return self.calls > 0 and now >= self._until


class _Watch:
    """The limits of this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self.limits: set[CallLimit] = set()  # added and discarded by one call each, so no lock is needed
        self.is_running, self._lock = False, threading.Lock()
        watch_forks(self)

    def start(self) -> None:
        with self._lock:
            if self.is_running:
                return
            self.is_running = True
            try:
                threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True).start()
            except RuntimeError:  # the interpreter ends, or there are too many: calls wait as they did without a limit
                self.is_running = False

    def _run(self) -> None:
        idle, pause = 0, Signal()
        while idle < IDLE_LOOKS_MAX or not self._ends():
            pause.wait(LOOK_S)
            now = time.monotonic()
            idle = 0 if self.limits else idle + 1
            for limit in list(self.limits):
                limit.look(now)

    def _ends(self) -> bool:
        with self._lock:
            self.is_running = bool(self.limits)
            return not self.is_running

    def forked(self) -> None:
        """In a child there is no thread, and the calls are the parent's."""
        self.limits.clear()
        self.is_running, self._lock = False, threading.Lock()


_watch = _Watch()
