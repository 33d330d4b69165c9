"""Work off the path of a group: files that go, and the next journal file ahead of need.

Theory of operation. Part of the commit pipeline, as deterministic as the rest. No request waits for these steps but a
checkpoint, which waits for removals. Whether a journal file is lacking is looked at now and then, not at each group,
and not at once: a checkpoint that ends gives files back.

Invariants:
    * one removal and one preparation at a time;
    * one that lacks space or descriptors is tried again ``RETRY_S`` later; meanwhile it holds nothing up.
"""

from __future__ import annotations

from typing import Final

from txmq.broker.commit.data_directory import Store
from txmq.broker.commit.steps import Prepare, Remove, Step

CHECK_S: Final = 0.05
RETRY_S: Final = 1.0


class Upkeep:
    """See the module's docstring."""

    def __init__(self, store: Store, now: float) -> None:
        self._store = store
        self._under_way: set[type[Step]] = set()
        self._prepare_at, self._is_prepare_wanted = now + CHECK_S, False
        self._remove_at = 0.0

    def next_step(self, now: float, *, prepares: bool) -> Step | None:
        """A step that is due, once; a broker that stops prepares nothing."""
        if Remove not in self._under_way and not self._store.removals.is_empty and now >= self._remove_at:
            return self._begin(Remove(self._store))
        if prepares and now >= self._prepare_at and Prepare not in self._under_way:
            self._prepare_at = now + CHECK_S
            if self._is_prepare_wanted or not self._store.journal.is_next_ready:
                self._is_prepare_wanted = False
                return self._begin(Prepare(self._store))
        return None

    @property
    def look_at(self) -> float:
        """When to ask ``next_step`` next, whatever happens until then but ``done``, ``failed`` and removals."""
        return self._prepare_at if self._store.removals.is_empty else 0.0

    def _begin(self, step: Step) -> Step:
        self._under_way.add(type(step))
        return step

    def want_prepare(self) -> None:
        """There is nothing else to do: look whether something can be prepared."""
        self._prepare_at, self._is_prepare_wanted = 0.0, True

    @property
    def is_removing(self) -> bool:
        """Whether files are yet to go, and are not lacking something."""
        return not self._store.removals.is_empty and not self.is_held_up

    @property
    def is_held_up(self) -> bool:
        """Whether the last removal failed, and waits."""
        return self._remove_at > 0.0 and not self._store.removals.is_empty

    def done(self, step: Step, now: float) -> None:
        """A step has run."""
        self._under_way.remove(type(step))
        if isinstance(step, Remove):
            self._remove_at = 0.0
        elif isinstance(step, Prepare) and not step.has_room:
            self._prepare_at = now + RETRY_S

    def failed(self, step: Step, now: float) -> None:
        """A step lacked space or descriptors."""
        self._under_way.remove(type(step))
        if isinstance(step, Remove):
            self._remove_at = now + RETRY_S
        else:
            self._prepare_at = now + RETRY_S
