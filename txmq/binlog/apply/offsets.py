"""The offset store of the applier's consumer: the target itself.

Theory of operation. The consumer loads a partition from the store, which fences earlier owners. From then on the offset
is saved in the transactions that hold the rows (``target.py``), one for a batch, and by nothing else: what the consumer
would save by itself stands in the target already, or is newer there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from txmq.client import MySQLOffsetStore, OffsetPosition, StoredOffset
from txmq.model import TopicPartition

Loaded = Callable[[TopicPartition, int, int | None], None]  # slot, generation, offset


class TargetOffsets:
    """See the module's docstring; implements ``OffsetStore``.

    Args:
        store: in the target.
        on_load: called before the first message of a partition is delivered; the offset is None if none is saved.
    """

    is_shared = True

    def __init__(self, store: MySQLOffsetStore, on_load: Loaded) -> None:
        self._store, self._on_load = store, on_load

    def enter(self, group: str) -> None:
        """See ``OffsetStore``."""
        self._store.enter(group)

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """See ``OffsetStore``."""
        found = self._store.load(group, slot, generation)
        self._on_load(slot, generation, None if found is None else found.offset)
        return found

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """Save nothing: see the module's docstring."""
        return ()

    def leave(self, group: str) -> None:
        """See ``OffsetStore``."""
        self._store.leave(group)
