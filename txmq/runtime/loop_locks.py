"""Locks and conditions for the strands of one loop (``runtime/strands.py``): waiting for one parks the strand."""

from __future__ import annotations

import threading
from collections import deque

from txmq.runtime.threads import Signal

_LOOK_S = 3600.0  # a strand that waits looks again


class LoopLock:
    """A lock of the strands of one loop: waiting for it parks the strand."""

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


class LoopCondition(threading.Condition):
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
