"""Holds every seed to the commit pipeline's promise of liveness, in simulated time: what is due happens."""

from __future__ import annotations

from tools.images.node import Node
from txmq.broker.commit.checkpointer import RETRY_S
from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.commit.journal_schedule import BACKGROUND_SYNC_MS
from txmq.broker.commit.pipeline import MARK_BUSY_S
from txmq.broker.commit.steps import Append, Mark, Step
from txmq.config import BrokerSettings

from .world import Simulation, Violation

ALLOWED_S = 0.15  # for the parts of the steps on the way, each of which takes up to 3 ms, and to look again
GAP_S = 0.11  # not looked at for so long: the broker was paused
ROOM_BYTES = 1 << 20  # with less, a checkpoint may lack space


class Watch:
    """Looked at every 50 ms; raises a violation for what is late."""

    def __init__(self, world: Simulation, settings: BrokerSettings) -> None:
        self._world = world
        sync_ms = {"always": 0, "interval": settings.sync_interval_ms, "never": BACKGROUND_SYNC_MS}[settings.sync]
        self._stable_s = sync_ms / 1000 + ALLOWED_S
        self._begin()

    def _begin(self) -> None:
        now = self._looked_at = self._world.now
        self._oldest: CommitGroup | None = None
        self._oldest_since = self._due_since = now
        self._unmarked_since: float | None = None
        self._checkpoint_lsn = -1

    def done(self, step: Step) -> None:
        """A step has run."""
        if isinstance(step, Mark):
            self._unmarked_since = None
        elif isinstance(step, Append) and self._unmarked_since is None:
            self._unmarked_since = self._world.now

    def look(self, node: Node) -> None:
        """Time has passed."""
        now = self._world.now
        if now - self._looked_at > GAP_S:
            self._begin()
        self._looked_at = now
        oldest = node.pipeline.oldest_unapplied
        if oldest is not self._oldest:
            self._oldest, self._oldest_since = oldest, now
        elif oldest is not None and now - self._oldest_since > self._stable_s:
            raise Violation(f"liveness: a group is not forced and applied after {now - self._oldest_since:.2f} s")
        store = node.store
        is_hindered = store.has_unapplied or node.disk.free_bytes() < ROOM_BYTES or not node.core.is_leading
        is_due = store.journal.next_lsn >= store.checkpoint_due_lsn
        if is_hindered or not is_due or store.checkpoint_lsn != self._checkpoint_lsn:
            self._due_since, self._checkpoint_lsn = now, store.checkpoint_lsn
        elif now - self._due_since > self._stable_s + RETRY_S:
            raise Violation(f"liveness: a checkpoint is due for {now - self._due_since:.2f} s")
        if self._unmarked_since is not None and now - self._unmarked_since > MARK_BUSY_S + ALLOWED_S:
            raise Violation(f"liveness: no mark for {now - self._unmarked_since:.2f} s")
