"""Loads and saves a consumer's offsets of one home's partitions, in whichever store the group's offsets are.

Invariants:
    * one call of the store at a time: a save that began earlier never overwrites a later one;
    * an offset is saved under the generation it was consumed under; a refused one means that the partition is lost;
    * while a transaction is going to save a partition's offset, nothing else of that partition is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.offsets.offset_store import (
    BrokerOffsetStore,
    OffsetPosition,
    OffsetStore,
    OffsetStoreOfMany,
    StoredOffset,
    asked,
    next_order,
)
from txmq.client.consumer.retry.deferred import DeferredMessages, deferred_text, parsed
from txmq.errors import StorageError
from txmq.model import TopicPartition
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Logger
from txmq.runtime.threads import new_lock

T = TypeVar("T")


class OffsetSaver:
    """See the module's docstring. Thread safety: any thread.

    Attributes:
        home: the number of the consumer's home whose partitions it saves.

    Args:
        saving: held while the store is called; one that the savers of other homes share has one lock.
    """

    def __init__(
        self, assignment: AssignedPartitions, store: OffsetStore, contents: DeferredMessages, group: str, log: Logger,
        home: int = 0, saving: AbstractContextManager[object] | None = None,
    ) -> None:  # fmt: skip
        self._assignment, self._store, self._contents, self._group, self._log = assignment, store, contents, group, log
        self.home, self._saving = home, saving or new_lock()

    @property
    def is_shared(self) -> bool:
        """Whether other members of the group find what this one saves."""
        return self._store.is_shared

    def load(self, slot: TopicPartition, generation: int, in_broker: StoredOffset | None) -> StoredOffset | None:
        """Read what is saved of a partition that was handed over; earlier owners are fenced from then on.

        Args:
            in_broker: what the broker said with the partition.

        Raises:
            FencedError: a newer generation has loaded it.
            StorageError: the store cannot be read now.
        """
        if isinstance(self._store, BrokerOffsetStore):
            self._store.handed_over(slot, generation, in_broker)
            return self._store.load(self._group, slot, generation)
        with self._saving:
            return self._ask(lambda: self._store.load(self._group, slot, generation))

    def load_many(
        self, wanted: Sequence[tuple[TopicPartition, int]]
    ) -> Mapping[TopicPartition, StoredOffset | None]:  # fmt: skip
        """As ``load``, of what the store can tell at once; the others must be loaded one by one."""
        store = self._store
        if len(wanted) < 2 or not isinstance(store, OffsetStoreOfMany):
            return {}
        try:
            with self._saving:
                return asked(lambda: store.load_many(self._group, wanted))
        except StorageError:  # perhaps of one of them alone, which a transaction of the former owner holds
            return {}

    def save(self, *, everything: bool = False) -> Collection[TopicPartition]:
        """Save what the group does not know. Durability: saved when this returns; in the broker: forced.

        Returns:
            Partitions whose offset was refused: they are lost.

        Raises:
            TxmqError: the broker, or the store, cannot be reached.
        """
        with self._saving:
            positions = self.to_save(everything=everything)
            if not positions:
                return ()
            refused = self._ask(lambda: self._store.save(self._group, positions))
            self.were_saved(position for position in positions if position.slot not in refused)
        current = set(self._assignment.held(self.home))
        for position in positions:
            if position.slot in refused and (position.slot, position.generation) in current:  # else it is ours anew
                topic, partition = position.slot
                self._log.warning("offset refused: somebody else has the partition", topic=topic, partition=partition)
                self._assignment.lost(position.slot)
        return refused

    def save_start(self, start: OffsetPosition) -> bool:
        """Save where the group begins in a partition; False if another member has the partition.

        Raises:
            TxmqError: the broker, or the store, cannot be reached.

        Durability: saved when this returns.
        """
        with self._saving:
            return not self._ask(lambda: self._store.save(self._group, [start]))

    def _ask(self, ask: Callable[[], T]) -> T:
        return ask() if isinstance(self._store, BrokerOffsetStore) else asked(ask)

    def to_save(self, *, everything: bool) -> list[OffsetPosition]:
        """Positions that the group does not know; with ``everything`` also partitions at 0 that were never saved."""
        with self._assignment.changed:
            order = next_order()
            return [
                OffsetPosition(slot, consumed.generation, consumed.position, text, order, consumed.log_text)
                for slot, consumed in self._assignment.partitions.items()
                if consumed.home == self.home
                and ((text := deferred_text(consumed)), consumed.position) != (consumed.deferred_saved, consumed.saved)
                and (everything or consumed.saved is not None or consumed.position)
                and consumed.is_ready
                and consumed.saving is None
                and (isinstance(self._store, BrokerOffsetStore) or not (consumed.pending_acks or consumed.in_doubt))
            ]

    def were_saved(self, positions: Iterable[OffsetPosition]) -> None:
        """Note that the group knows these positions."""
        for position in positions:
            with self._assignment.changed:
                consumed = self._assignment.partitions.get(position.slot)
                if consumed is None or consumed.generation != position.generation:
                    continue
                is_other = consumed.deferred_saved != position.deferred
                consumed.saved, consumed.deferred_saved = position.offset, position.deferred
            if is_other:
                self._deferred_saved(consumed, parsed(position.deferred).keys())

    def _deferred_saved(self, consumed: ConsumedPartition, named: Collection[int]) -> None:
        crash_point("client.deferred.saved")
        with self._assignment.changed:
            done = [offset for offset in consumed.dealt if offset not in named]
            consumed.dealt = [offset for offset in consumed.dealt if offset in named]
        if done:
            self._contents.remove(consumed.slot, done)
            crash_point("client.deferred.removed")
