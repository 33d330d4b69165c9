"""The offset store of the applier's consumer: the target itself.

Theory of operation. The consumer loads a partition from the store, which fences earlier owners. From then on the offset
is saved in the transactions that hold the rows (``target.py``), one for a batch, and by nothing else: what the consumer
would save by itself stands in the target already, or is newer there. Only where the partition's log is another one than
the target's offset counts in (``txmq.log.history``), the consumer goes back before that offset: then it is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from txmq.client import DatabaseOffsetStore, OffsetPosition, StoredOffset
from txmq.model import TopicPartition

Loaded = Callable[[TopicPartition, int, int | None], None]  # slot, generation, offset
GoesBack = Callable[[TopicPartition, int], None]  # slot, offset


class TargetOffsets:
    """See the module's docstring; implements ``OffsetStore``.

    Args:
        store: in the target.
        on_load: called before the first message of a partition is delivered; the offset is None if none is saved.
        on_going_back: called after that, and before the first message, if the partition begins at a lower offset.
    """

    is_shared = True

    def __init__(self, store: DatabaseOffsetStore, on_load: Loaded, on_going_back: GoesBack) -> None:
        self._store, self._on_load, self._on_going_back = store, on_load, on_going_back
        self._loaded: dict[tuple[TopicPartition, int], int] = {}  # by generation, too

    def enter(self, group: str) -> None:
        """See ``OffsetStore``."""
        self._store.enter(group)

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """See ``OffsetStore``."""
        found = self._store.load(group, slot, generation)
        self._on_load(slot, generation, None if found is None else found.offset)
        self._loaded[slot, generation] = 0 if found is None else found.offset
        return found

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """Save what goes back before the offset that was loaded: see the module's docstring."""
        back = [one for one in positions if one.offset < self._loaded.get((one.slot, one.generation), 0)]
        refused = self._store.save(group, back) if back else ()
        for position in back:
            if position.slot not in refused:
                self._on_going_back(position.slot, position.offset)
                self._loaded[position.slot, position.generation] = position.offset
        return refused

    def leave(self, group: str) -> None:
        """See ``OffsetStore``."""
        self._store.leave(group)
