"""When groups that were answered before they were forced are forced: ``sync = interval | never``.

Theory of operation. With ``interval`` a sync is due ``sync_interval_ms`` after the first group written since
the last sync began, with so many messages, and as soon as a reader waits for such a group: while one does, a sync
begins when the last one has ended, and records are written meanwhile. With ``never`` one is due once a second, because
readers see only what was forced.

Invariants:
    * a sync is due at the latest ``UNSYNCED_BYTES_MAX`` after the first byte; no more than that is written during one.
"""

from __future__ import annotations

from math import inf
from typing import Final

from txmq.broker.commit.commit_group import CommitGroup
from txmq.config import BrokerSettings

BACKGROUND_SYNC_MS: Final = 1000  # sync = never
UNSYNCED_BYTES_MAX: Final = 32 << 20  # groups stay in memory until they are forced; as much may come during the sync


class SyncDue:
    """See the module's docstring.

    Attributes:
        at: when time makes a sync due; infinite if all is forced.
        is_wanted: one is due at once.
    """

    __slots__ = ("_bytes", "_interval_s", "_is_for_readers", "_messages", "_messages_max", "at", "is_wanted")

    def __init__(self, settings: BrokerSettings) -> None:
        self._is_for_readers = is_interval = settings.sync == "interval"
        self._interval_s = (settings.sync_interval_ms if is_interval else BACKGROUND_SYNC_MS) / 1000
        self._messages_max = settings.sync_interval_messages if is_interval else 1 << 62
        self._messages = self._bytes = 0
        self.at, self.is_wanted = inf, False

    def written(self, group: CommitGroup, now: float) -> None:
        """A group is in the journal, and not forced."""
        self._messages += group.message_count
        self._bytes += group.size_bytes
        self.at = min(self.at, now + self._interval_s)
        if self._is_for_readers and (group.is_awaited or group.has_polls()):
            self.is_wanted = True

    def began(self) -> None:
        """A sync of all that was written begins, or has ended."""
        self._messages = self._bytes = 0
        self.at, self.is_wanted = inf, False

    def is_due(self, now: float, newest: CommitGroup) -> bool:
        """Whether a sync is due; ``newest``: the last group that was sealed."""
        return self.is_wanted or now >= self.at or self.is_much or newest.needs_sync or self._is_awaited(newest)

    @property
    def is_much(self) -> bool:
        """Whether so much was written since the last sync began that no more may be before the next one begins."""
        return self._messages >= self._messages_max or self._bytes >= UNSYNCED_BYTES_MAX

    def may_follow(self, newest: CommitGroup | None) -> bool:
        """While a sync is under way: whether another group may be written, after the newest one that is not forced."""
        if newest is None:  # the sync has ended, and took along what was written meanwhile
            return not self.is_much
        self.is_wanted = self.is_wanted or self._is_awaited(newest)
        return not (self.is_much or newest.needs_sync)

    def _is_awaited(self, group: CommitGroup) -> bool:
        return self._is_for_readers and group.is_awaited
