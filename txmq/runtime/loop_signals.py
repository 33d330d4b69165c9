"""SIGTERM while an event loop runs: whoever listens stops, and the handler that was there before hears it, too.

``signal.signal`` and not the loop's ``add_signal_handler``: that would take the signal away from a server that has
installed a handler of its own (uvicorn), and could not give it back. The handler is there while anybody listens.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_listening: dict[object, tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = {}
_former: Any = None  # the handler before the first one that listens


@contextmanager
def until_terminated(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` in the loop on SIGTERM while the block runs; nothing where this is not the main thread."""
    global _former
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = object()
    if not _listening:
        _former = signal.signal(signal.SIGTERM, _heard)
    _listening[ours] = loop, stop
    try:
        yield
    finally:
        del _listening[ours]
        if not _listening and signal.getsignal(signal.SIGTERM) is _heard:
            signal.signal(signal.SIGTERM, _former)


def _heard(number: int, frame: FrameType | None) -> None:
    for loop, stop in list(_listening.values()):
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop)  # wakes a loop that waits
    if callable(_former):
        _former(number, frame)
