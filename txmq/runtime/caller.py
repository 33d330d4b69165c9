"""The caller: its process, thread and machine, and whether it is called alone.

What must not change hands (database connections) is kept by process and thread. What is called alone (``run_alone``)
has nothing to do with what stands around it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Final, TypeVar

Owner = tuple[int, int]
# Process of the caller. What a parent began is not its forked child's to end. (A block asks four times.)
current_process: Callable[[], int] = os.getpid
T = TypeVar("T")
# Called for each message that a producer sends outside of txmq's transactions: those of others may be open.
SEND_WATCHERS: Final[list[Callable[[], None]]] = []
_alone: ContextVar[bool] = ContextVar("txmq_alone", default=False)


def current_owner() -> Owner:
    """Process and thread of the caller. A thread's number may be used again once it has ended."""
    return os.getpid(), threading.get_ident()


def host_name() -> str:
    """The machine's name, as the operating system has it."""
    return socket.gethostname()


def silence(descriptor: int) -> None:
    """Let this process's copy of a descriptor lead nowhere: its parent goes on with the connection."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)


def run_alone(work: Callable[[], T]) -> T:
    """Call ``work`` in a context of its own, in which ``is_alone``."""
    return Context().run(_run_alone, work)


def _run_alone(work: Callable[[], T]) -> T:
    _alone.set(True)
    return work()


def is_alone() -> bool:
    """Whether the caller is called by ``run_alone``: what is found on the stack is not its own."""
    return _alone.get()
