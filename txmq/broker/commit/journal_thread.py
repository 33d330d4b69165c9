"""The thread that writes and syncs the journal: the event loop itself, or the writer thread.

Theory of operation. A hop to the writer thread and back costs more than a fast sync (docs/benchmarks.md, "The thread of
a sync"). So the loop writes and syncs a small group itself as long as recent syncs were fast. Everything else goes to
the writer thread, so that a slow disk never stops reading and answering: a large group, a group after slow syncs, one
during a checkpoint, and one for which the journal has to begin another file.
"""

from __future__ import annotations

from typing import Final

from txmq.broker.commit.steps import LOOP, StepThread
from txmq.config import BrokerSettings
from txmq.redo.journal import Journal

LOOP_WRITE_SIZE_BYTES: Final = 1 << 20  # into the page cache, without a sync
_SMOOTHING: Final = 0.2


class JournalThread:
    """See the module's docstring.

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
