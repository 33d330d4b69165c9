"""How much waits in an outbox, and for how long: looked at now and then, and told where messages wait too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from txmq.outbox.tables import Backlog
from txmq.runtime.ports import Clock

LOOK_EVERY_S: Final = 2.0
WAITS_MS_MAX: Final = 60_000
TOLD_EVERY_S: Final = 60.0
_LOOKS_SHARE: Final = 100  # of the time at most: a million rows take a fifth of a second to count


class BacklogWatch:
    """See the module's docstring.

    Args:
        look: asks the database; None if it is away.

    Attributes:
        backlog: what was seen last; None: nothing yet.

    Thread safety: the relay's thread.
    """

    def __init__(self, look: Callable[[], Backlog | None], clock: Clock, log: Any) -> None:
        self._look, self._clock, self._log = look, clock, log
        self._due_at = self._tell_at = float("-inf")
        self.backlog: Backlog | None = None

    def look(self, reason: str) -> None:
        """Look, if it is time to. In no transaction.

        Args:
            reason: why messages may wait.
        """
        begun = self._clock.monotonic()
        if begun < self._due_at:
            return
        found = self._look()
        now = self._clock.monotonic()
        self._due_at = now + max(LOOK_EVERY_S, (now - begun) * _LOOKS_SHARE)
        if found is None:
            return
        self.backlog = found
        if found.oldest_ms is not None and found.oldest_ms >= WAITS_MS_MAX and now >= self._tell_at:
            self._tell_at = now + TOLD_EVERY_S
            self._log.warning(
                "outbox: messages wait", waiting=found.waiting, oldest_s=found.oldest_ms // 1000, parked=found.parked,
                reason=reason,
            )  # fmt: skip
