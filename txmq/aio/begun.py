"""Sends that go to their end, whatever becomes of the tasks that wait for them.

So a message is at the broker, on this host's disk or refused, never in between, and later ones come after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from txmq.runtime.strands import Host, Running, required

T = TypeVar("T")


class BegunSends:
    """Those of one producer."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._running: set[Running[Any]] = set()

    async def run(self, send: Callable[[], T]) -> T:
        """Begin ``send`` at once, and wait for its end."""
        running = self._host.begin_end(send)
        if not running.is_done:
            self._running.add(running)
            running.waiter().add_done_callback(lambda _: self._running.discard(running))
        return await running

    async def close(self, close: Callable[[], object]) -> None:
        """Call ``close`` after all that have begun; it goes to its end, too."""
        await self._host.to_end(lambda: self._close(close))

    def _close(self, close: Callable[[], object]) -> None:
        for running in tuple(self._running):
            required().wait_for(running.waiter())
        close()
