"""MariaDB's error numbers in a simulated database's answers, and what can go wrong with one call."""

from __future__ import annotations

import enum
from typing import Final

DUPLICATE: Final = 1062
LOCK_WAIT_TIMEOUT: Final = 1205
DEADLOCK: Final = 1213
NOTA: Final = 1397
INVAL: Final = 1398
RMFAIL: Final = 1399
OUTSIDE: Final = 1400
RB_ROLLBACK: Final = 1402
DUPID: Final = 1440
LOST: Final = 2013


class SimulatedError(Exception):
    """In place of the driver's error; ``args[0]`` is the number."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(code, text)
        self.code = code


class Fault(enum.Enum):
    """A failure of one call."""

    REQUEST_LOST = "the session ends, the call was not carried out"
    REPLY_LOST = "the call was carried out, the session ends"
    CUT_OFF = "the call was not carried out, its client hears no more, and the session stays"
    CRASH_BEFORE = "the server dies before the call"
    CRASH_AFTER = "the server dies when the call was carried out"
