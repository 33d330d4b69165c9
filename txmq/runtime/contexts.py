"""Calls that have nothing to do with what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Final, TypeVar

T = TypeVar("T")
SEND_WATCHERS: Final[list[Callable[[], None]]] = []
"""Called for each message that a producer sends outside of txmq's transactions: those of others may be open."""
_alone: ContextVar[bool] = ContextVar("txmq_alone", default=False)


def run_alone(work: Callable[[], T]) -> T:
    """Call ``work`` in a context of its own, in which ``is_alone``."""
    return Context().run(_run_alone, work)


def _run_alone(work: Callable[[], T]) -> T:
    _alone.set(True)
    return work()


def is_alone() -> bool:
    """Whether the caller is called by ``run_alone``: what is found on the stack is not its own."""
    return _alone.get()
