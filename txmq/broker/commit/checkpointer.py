"""The checkpoint that is due or under way: from the copy of the state to the release of the journal before it.

Theory of operation. Part of the commit pipeline, as deterministic as the rest. The pipeline says when a checkpoint may
be taken and when it may be written; this module keeps how far it has come:

    taken -> pinned (its group is in the journal) -> running -> written -> released
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from txmq.broker.commit.commit_group import CommitGroup, ReceivedGroup
from txmq.broker.commit.data_directory import PendingCheckpoint, Store
from txmq.broker.commit.steps import Checkpoint, Release
from txmq.config import BrokerSettings
from txmq.model import Lsn
from txmq.runtime.ports import Clock

if TYPE_CHECKING:
    from txmq.broker.core import Core

RETRY_S: Final = 1.0


class _Phase(enum.Enum):
    NONE = "none"
    TAKEN = "the state is copied, its group not yet written"
    PINNED = "its place in the journal is known, not everything before is applied"
    RUNNING = "it is being written"
    WRITTEN = "it is durable, the journal before it is not released"


class Checkpointer:
    """See the module's docstring.

    Attributes:
        pending: the copied state, until it is written and the journal released.
        group: the group whose record ends where the copied state belongs, until that record is written.
        is_wanted: a checkpoint is asked for, whether one is due or not.
        newest_lsn: the end of the newest group's record; before the first, of what was recovered. Marks do not make a
            checkpoint due.
    """

    __slots__ = (
        "_at",
        "_clock",
        "_core",
        "_interval_s",
        "_phase",
        "_place",
        "_retry_at",
        "_store",
        "group",
        "is_wanted",
        "newest_lsn",
        "pending",
    )

    def __init__(self, core: Core, store: Store, settings: BrokerSettings, clock: Clock) -> None:
        self._core, self._store, self._clock = core, store, clock
        self._interval_s = settings.checkpoint_interval_ms / 1000
        self._phase = _Phase.NONE
        self._at, self._retry_at = clock.monotonic() + self._interval_s, 0.0
        self.pending: PendingCheckpoint | None = None
        self.group: CommitGroup | None = None
        self.is_wanted = False
        self.newest_lsn = store.journal.next_lsn
        self._place = Lsn(-1), 0  # end and chain of the newest record that a checkpoint was taken at

    @property
    def look_at(self) -> float:
        """The time at which a checkpoint is due even if the journal grows little."""
        return max(self._at, self._retry_at)

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint was taken whose journal is not released."""
        return self._phase is not _Phase.NONE

    @property
    def pinned(self) -> PendingCheckpoint | None:
        """The copied state whose place in the journal is known, until it is being written."""
        return self.pending if self._phase is _Phase.PINNED else None

    def is_due(self, now: float) -> bool:
        """Whether to take one."""
        if self.is_wanted:
            return True
        if now < self._retry_at:
            return False
        store = self._store
        if store.journal.next_lsn >= store.checkpoint_due_lsn:
            return True
        return now >= self._at and self.newest_lsn > store.checkpoint_lsn

    def put_off(self, now: float) -> None:
        """Take none now: groups wait for space."""
        self.is_wanted, self._retry_at = False, now + RETRY_S

    def take(self, now: float) -> None:
        """Copy the state as of the newest group, whose record says so at its end. The journal is free.

        One that is tried again, and nothing came between, belongs to the same record: no retry fills a full disk. If
        it was written there is nothing to do.
        """
        self.is_wanted, self._at = False, now + self._interval_s
        is_again = self._core.next_group() is None and self.newest_lsn == self._place[0]
        if is_again and self.newest_lsn == self._store.checkpoint_lsn:
            return
        self.group = None if is_again else self._core.cut()
        self.pending = self._store.begin_checkpoint(self._core.state)
        self._phase = _Phase.TAKEN
        if is_again:
            self._pin(self.pending)

    def take_folded(self, group: ReceivedGroup) -> None:
        """The leader took one at the end of this group, which is folded now, and nothing after it.

        None is taken while another one is under way: the next will do.
        """
        if self.pending is None and group.end_lsn > self._store.checkpoint_lsn:
            self._place = group.end_lsn, group.chain
            self.pending = self._store.begin_checkpoint(self._core.state)
            self._pin(self.pending)

    def written(self, group: CommitGroup) -> None:
        """A group's record is in the journal: if it is the copied state's, the journal ends where that belongs."""
        self.newest_lsn = group.end_lsn
        if group is self.group and self.pending is not None:
            self._place = self._store.journal.next_lsn, self._store.journal.chain
            self._pin(self.pending)

    def _pin(self, pending: PendingCheckpoint) -> None:
        pending.lsn, pending.chain = self._place
        self._phase, self.group = _Phase.PINNED, None

    def write(self, pending: PendingCheckpoint) -> Checkpoint:
        """The step that writes it."""
        self._phase = _Phase.RUNNING
        return Checkpoint(self._store, pending, self._clock)

    def durable(self) -> None:
        """It is durable."""
        self._phase = _Phase.WRITTEN

    def next_release(self) -> Release | None:
        """The step that releases the journal before a checkpoint that is durable."""
        if self.pending is None or self._phase is not _Phase.WRITTEN:
            return None
        return Release(self._store, self.pending)

    def released(self) -> None:
        """The journal before it is released."""
        self._phase, self.pending = _Phase.NONE, None

    def give_up(self, now: float) -> None:
        """Space or descriptors are lacking: the older checkpoint and the journal after it are whole."""
        self._phase, self.pending = _Phase.NONE, None
        self._retry_at = self._at = now + RETRY_S
