"""A broker that is away is waited for: the binlog keeps what is not published."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from txmq.errors import TxmqError
from txmq.runtime.backoff import Backoff
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.ports import Clock

T = TypeVar("T")
PAUSE_S = Backoff(0.05, 1.0)


class BrokerWait:
    """Asks again, with longer and longer pauses, until the broker answers. Thread safety: any thread.

    Args:
        is_stopped: the reader must end: the last error is raised.
    """

    def __init__(self, clock: Clock, is_stopped: Callable[[], bool]) -> None:
        self._clock, self._is_stopped = clock, is_stopped
        self._sparingly = Sparingly(get_logger(), clock)

    def answer(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns, however long that takes.

        Raises:
            TxmqError: an error that asking again does not mend.
        """
        pause_s = PAUSE_S.first
        while True:
            try:
                return ask()
            except TxmqError as error:
                if not error.retriable or self._is_stopped():
                    raise
                self.say(error)
            self._clock.sleep(pause_s)
            pause_s = PAUSE_S.following(pause_s)

    def say(self, error: TxmqError) -> None:
        """Log it, not too often."""
        self._sparingly.warning("waiting for the broker", error=str(error))
