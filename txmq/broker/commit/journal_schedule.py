"""The schedule of the journal: when a group is written, when it is forced, and by which thread. The pipeline asks.

*Before the write* (``CommitDelay``). The owner of an XA transaction does not wait for the answer to ``complete``. If
one is lost, the resolver reports the branch again. A ``commit`` says by itself that no caller waits for its answer
(``delayable``): the database of a last resource has decided, or another home. So a group that holds nothing else
(``CommitGroup.may_be_delayed``) is kept for ``WAIT_S``, and needs no sync of its own: the first request that is in a
hurry takes it along, mostly the ``decide`` or ``prepare`` of another transaction. Readers see the messages that much
later.

*After the write* (``SyncSchedule``). With ``sync = always`` a group is forced with its write. With ``interval`` a sync
is due ``sync_interval_ms`` after the first group written since the last sync began, with so many messages, and as soon
as a reader waits for such a group: while one does, a sync begins when the last one has ended, and records are written
meanwhile. With ``never`` one is due once a second, because readers see only what was forced.

*The thread* (``JournalThread``). A hop to the writer thread and back costs more than a fast sync (docs/benchmarks.md,
"The thread of a sync"). So the loop writes and syncs a small group itself as long as recent syncs were fast. Everything
else goes to the writer thread, so that a slow disk never stops reading and answering: a large group, a group after slow
syncs, one during a checkpoint, and one for which the journal has to begin another file.

Invariants:
    * a group waits once before its write, and no longer than ``WAIT_S`` and its driver's own delay;
    * a broker that stops waits for nothing;
    * a sync is due at the latest ``UNSYNCED_BYTES_MAX`` after the first byte; no more than that is written during one.
"""

from __future__ import annotations

from math import inf
from typing import Final

from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.commit.steps import LOOP, StepThread
from txmq.config import BrokerSettings
from txmq.redo.journal import Journal

WAIT_S: Final = 0.001
BACKGROUND_SYNC_MS: Final = 1000  # sync = never
UNSYNCED_BYTES_MAX: Final = 32 << 20  # groups stay in memory until they are forced; as much may come during the sync
LOOP_WRITE_SIZE_BYTES: Final = 1 << 20  # into the page cache, without a sync
_SMOOTHING: Final = 0.2


class CommitDelay:
    """How long a group waits for others before it is written; see the module's docstring.

    Attributes:
        until: when the group that waits goes; infinite if none waits.
    """

    def __init__(self) -> None:
        self.until = inf

    def keeps(self, group: CommitGroup, now: float) -> bool:
        """Whether the group must wait."""
        if not group.may_be_delayed:
            return False
        if self.until == inf:
            self.until = now + WAIT_S
        return now < self.until

    def end(self) -> None:
        """The group goes."""
        self.until = inf


class SyncSchedule:
    """When groups that were answered before they were forced are forced: ``sync = interval | never``.

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


class JournalThread:
    """Which thread writes and syncs the journal: the event loop itself, or the writer thread.

    Attributes:
        sync_ms: how long recent syncs took, smoothed.
    """

    __slots__ = ("_journal", "_sync_ms_max", "_synced_size_bytes_max", "sync_ms")

    def __init__(self, journal: Journal, settings: BrokerSettings) -> None:
        self._journal, self.sync_ms = journal, 0.0
        self._synced_size_bytes_max, self._sync_ms_max = settings.inline_sync_size_bytes, settings.inline_sync_ms

    def choose(self, size_bytes: int, syncs: bool, is_beside_checkpoint: bool) -> StepThread:
        """The thread for a group of that size, which is synced at once or later."""
        if syncs:
            # The files of a checkpoint make the journal wait for the disk (docs/benchmarks.md, "Stalls of the loop").
            is_fast = (
                size_bytes <= self._synced_size_bytes_max
                and self.sync_ms <= self._sync_ms_max
                and not is_beside_checkpoint
            )
        else:
            is_fast = size_bytes <= LOOP_WRITE_SIZE_BYTES
        return LOOP if is_fast and self._journal.has_room(size_bytes) else StepThread.WRITER

    def synced(self, took_ms: float) -> None:
        """A sync has taken so long."""
        self.sync_ms += (took_ms - self.sync_ms) * _SMOOTHING
