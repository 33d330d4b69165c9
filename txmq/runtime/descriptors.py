"""How many descriptors this process may have open, how they are divided, and which ones files never get.

Theory of operation. A broker without free descriptors cannot open a segment, and a broker that cannot write must
stop. So connections must never use up the descriptors that files need. ``raise_limit`` raises the soft limit (1024 on
most machines) to the hard one; ``divide`` sets aside the broker's own descriptors and gives connections the rest.

``backlog`` bounds what one iteration of the loop accepts: a connection that is refused is closed in the next one, so
that many stand open meanwhile.

A process may be started with 0, 1 or 2 closed, and the next file that it opens gets that number. Then ``print``, a
crash's last words and the programs that it starts write into that file. ``take_standard`` opens them first.
"""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

# Loop, signals, log, journal, lock, listener: 19 at rest. Then a checkpoint, a walk through directories, two readers'
# pinned files and the journal's next file: 12 at most.
OWN = 36
FILES_MIN = 8
CONNECTIONS_MIN = 4
BACKLOG_MAX = 1024
_STANDARD = 3  # 0, 1 and 2


class Budget(NamedTuple):
    """Descriptors by use."""

    connections: int
    files: int
    backlog: int


def raise_limit(wanted: int) -> int:
    """Raise the soft limit towards ``wanted`` as far as the hard one lets; returns what holds from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (limit if limit != resource.RLIM_INFINITY else 1 << 30 for limit in (soft, hard))
    if soft >= wanted:
        return soft
    target = min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):  # some systems have a lower limit of their own
        return soft
    return target


def needed(connections: int, files: int) -> int:
    """The limit under which both have what they ask for."""
    return OWN + BACKLOG_MAX + files + connections


def divide(limit: int, connections: int, files: int) -> Budget | None:
    """The part of ``connections`` and ``files`` that fits under ``limit``; None if a broker cannot live under it."""
    backlog = max(8, min(BACKLOG_MAX, limit // 8))
    free = limit - OWN - backlog
    if free < FILES_MIN + CONNECTIONS_MIN:
        return None
    files = min(files, max(FILES_MIN, free // 3))
    return Budget(min(connections, free - files), files, backlog)


def take_standard() -> None:
    """Let 0 to 2 lead nowhere if they are closed: no file and no socket gets their numbers from now on.

    SQLite does the same for its own files. Raises OSError if there is no descriptor left.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < _STANDARD:  # the lowest that is free
        os.set_inheritable(number, True)
    os.close(number)
