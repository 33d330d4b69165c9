"""Which session numbers this broker's history has issued. A fold over the journal, without an entry of its own.

A broker that was restored from an older copy of its directory does not know the sessions that it issued after the
copy was made; databases may hold committed rows under their transaction ids. It must not take these for sessions that
have ended: of those it has told every outcome.

Numbers are issued one after another, and each start of the broker begins at its time (``broker/state/session.py``), so
a start is one *run* of numbers, and what a history has issued is a run for each of its starts.

Invariants:
    * runs are in order, and neither meet nor overlap;
    * only a number that was issued changes anything: no request that names a session makes this grow;
    * a run that is beyond ``RUNS_MAX`` is forgotten, the oldest first: its sessions look never issued, so that what
      would prove a loss is kept once too often rather than never.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final

RUNS_MAX: Final = 10_000  # starts in which a session was issued
FROZEN_FIELDS: Final = 2


class IssuedSessions:
    """All of them: the last number of each run, and with it the first."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self) -> None:
        self._firsts, self._lasts = list[int](), list[int]()

    def __contains__(self, number: int) -> bool:
        run = bisect_left(self._lasts, number)
        return run < len(self._lasts) and self._firsts[run] <= number

    def add(self, number: int) -> None:
        """A number was issued. Numbers come in order; those that another source of ids draws need not."""
        run = bisect_left(self._lasts, number)
        if run < len(self._lasts) and self._firsts[run] <= number:
            return
        is_behind = run > 0 and self._lasts[run - 1] == number - 1
        is_before = run < len(self._lasts) and self._firsts[run] == number + 1
        if is_behind and is_before:
            del self._firsts[run], self._lasts[run - 1]
        elif is_behind:
            self._lasts[run - 1] = number
        elif is_before:
            self._firsts[run] = number
        else:
            self._firsts.insert(run, number)
            self._lasts.insert(run, number)
            if len(self._lasts) > RUNS_MAX:
                del self._firsts[0], self._lasts[0]

    def freeze(self) -> Iterator[tuple[int, int]]:
        """A copy of each run."""
        return zip(self._firsts, self._lasts, strict=True)

    def restore(self, runs: Iterable[tuple[int, int]]) -> None:
        """What ``freeze`` copied."""
        self._firsts, self._lasts = list[int](), list[int]()
        for first, last in runs:
            self._firsts.append(first)
            self._lasts.append(last)
