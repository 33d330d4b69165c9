"""The caller: its process, thread and machine. What must not change hands (database connections) is kept by it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

Owner = tuple[int, int]
# Process of the caller. What a parent began is not its forked child's to end. (A block asks four times.)
current_process: Callable[[], int] = os.getpid


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
