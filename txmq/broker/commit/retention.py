"""Retention: segments that are too old, or too many, leave the log.

The new log start is journaled first; the files go when that record is durable (``CommitGroup.unlinked``,
``data_directory``).

Theory of operation. What a clock that is wrong has removed does not come back. A broker that was started with a clock
years ahead follows the corrected one at half the speed of time (``runtime/steady_clock.py``), so for years; messages
would be old when they arrive. ``RetentionClock`` therefore never shows a later time than the machine's. The other way
round, a broker that was started with a clock years behind would remove nothing for years: a machine's clock that has
been later for ``ADOPTED_AFTER_S`` is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.state.state import State
from txmq.redo import entries
from txmq.runtime.steady_clock import SteadyClock

ADOPTED_AFTER_S: Final = 86_400.0  # longer than a wrong clock goes unnoticed, shorter than most retention
DIFFERS_MS: Final = 60_000  # less is of no consequence


class RetentionClock:
    """The time by which messages are old; see the module's docstring."""

    def __init__(self, clock: SteadyClock) -> None:
        self._clock = clock
        self._behind_since: float | None = None

    def now_ms(self) -> int:
        """Ms since 1970-01-01 UTC; asked for now and then."""
        ahead_ms, now = self._clock.ahead_ms(), self._clock.monotonic()
        if ahead_ms >= -DIFFERS_MS:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        is_adopted = self._behind_since is not None and now - self._behind_since >= ADOPTED_AFTER_S
        steady_ms = self._clock.now_ms()
        return steady_ms - ahead_ms if ahead_ms > 0 or is_adopted else steady_ms


def retire(state: State, group_with_room: Callable[[], CommitGroup], now_ms: int) -> None:
    """Put the new log starts of all partitions into the group in the making."""
    for partition in state.all_partitions():
        start, paths = partition.expired_segments(now_ms)
        if paths:
            group = group_with_room()
            group.add_entry(entries.encode_log_start(partition.topic_id, partition.number, start))
            partition.set_log_start(start)
            group.unlinked.append((partition, paths))
            group.needs_sync = True
