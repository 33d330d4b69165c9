"""What keeps placed messages from readers: decisions whose branches have not all completed.

Theory of operation. A decision assigns the offsets of its messages, but a visible message implies readable rows, so the
high watermark of its partitions stays in front of them until every branch has completed. A partition's *holds* queue up
in order of their offsets; its watermark is where the first of them begins, or where the log has got to.

All or none: a transaction that wrote behind a hold in one partition, and in another one that has none, holds that one
too (it is ready at once, and waits only for its turn). A hold leaves when it is ready and first in all its partitions;
then it leaves all of them together.

Invariants:
    * a hold joins when its transaction is accepted (assigned side) and leaves when the record that ended it, or deleted
      its topics, is forced and applied (durable side); ``is_settled`` is its end on the assigned side, which
      checkpoints keep;
    * queues are in order of offsets, so the watermark never passes a hold;
    * without holds, ``applied`` is what ``Partition.publish`` is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from txmq.log.partition import LogPosition, Partition


class VisibilityBarrier:
    """One transaction's messages that readers must not see yet.

    Attributes:
        name: (session, counter) of the transaction.
        places: where its messages begin in each partition.
        is_settled: nothing but its turn keeps it, as far as accepted requests say.
        is_ready: the same, durably.
    """

    __slots__ = ("is_ready", "is_settled", "name", "places")

    def __init__(
        self, name: tuple[int, int], places: Mapping[Partition, LogPosition], *, is_settled: bool = False
    ) -> None:
        self.name, self.places = name, dict(places)
        self.is_settled = self.is_ready = is_settled


class VisibilityBarriers:
    """All holds of a broker, by partition."""

    def __init__(self) -> None:
        self._queues: dict[Partition, dict[VisibilityBarrier, None]] = {}
        self._reached: dict[Partition, LogPosition] = {}  # how far a held partition is forced and in its files
        self._all: dict[VisibilityBarrier, None] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, hold: VisibilityBarrier) -> bool:
        return hold in self._all

    def partitions(self) -> Iterable[Partition]:
        """The partitions whose watermark is held."""
        return self._queues.keys()

    def add(self, hold: VisibilityBarrier) -> None:
        """A transaction was accepted; call in order of offsets."""
        if hold.places:
            self._all[hold] = None
            for partition in hold.places:
                self._queues.setdefault(partition, {})[hold] = None

    def add_behind(self, name: tuple[int, int], places: Mapping[Partition, LogPosition]) -> None:
        """A transaction committed: where it stands behind a hold, all of it waits there."""
        if len(places) > 1 and any(partition in self._queues for partition in places):
            self.add(VisibilityBarrier(name, places, is_settled=True))

    def applied(self, moved: Mapping[Partition, int], ready: Sequence[VisibilityBarrier]) -> Iterable[Partition]:
        """A record is forced and applied.

        Args:
            moved: how far it got in each partition.
            ready: holds that it ended.

        Returns:
            The partitions whose watermark may have moved.
        """
        if not (self._queues or self._reached or ready):
            for partition, next_offset in moved.items():
                partition.publish(next_offset)
            return moved
        for partition, next_offset in moved.items():
            if partition in self._queues:
                self._reached[partition] = partition.end_at(next_offset)
        changed = dict.fromkeys(moved)
        for hold in ready:
            hold.is_settled = hold.is_ready = True
            changed.update(dict.fromkeys(self._leave(hold)))
        for partition in changed:
            if partition in self._queues or partition in self._reached:
                self._show(partition)
            elif partition in moved:
                partition.publish(moved[partition])
        return changed

    def recovered(self, partition: Partition) -> None:
        """A restarted broker shows what it may of a partition; ``applied`` goes on from there."""
        if partition in self._queues:
            self._reached[partition] = partition.end_at(partition.next_offset)
            self._show(partition)
        else:
            partition.publish(partition.next_offset)

    def drop(self, partition: Partition) -> list[Partition]:
        """The partition is deleted, durably: nothing is held in it any more, and nothing elsewhere for its sake.

        Returns:
            The partitions whose watermark may have moved.
        """
        waiting = self._queues.pop(partition, {})
        self._reached.pop(partition, None)
        for hold in waiting:
            del hold.places[partition]
            if not hold.places:
                self._all.pop(hold, None)
        freed: dict[Partition, None] = {}
        for hold in waiting:
            if hold.places and hold.is_ready:
                freed.update(dict.fromkeys(self._leave(hold)))
        for other in freed:
            self._show(other)
        return list(freed)

    def _leave(self, hold: VisibilityBarrier) -> list[Partition]:
        """Take a ready hold out where its turn has come, and those behind it; the partitions it stood in."""
        freed: dict[Partition, None] = {}
        candidates = [hold]
        while candidates:
            candidate = candidates.pop()
            if not candidate.is_ready or candidate not in self._all or not self._is_first(candidate):
                continue
            del self._all[candidate]
            for partition in candidate.places:
                freed[partition] = None
                queue = self._queues[partition]
                del queue[candidate]
                if queue:
                    candidates.append(next(iter(queue)))
                else:
                    del self._queues[partition]
        return list(freed)

    def _is_first(self, hold: VisibilityBarrier) -> bool:
        return all(next(iter(self._queues[partition])) is hold for partition in hold.places)

    def _show(self, partition: Partition) -> None:
        queue = self._queues.get(partition)
        reached = self._reached.get(partition) if queue else self._reached.pop(partition, None)
        if reached is None:
            return
        partition.show(min(reached, next(iter(queue)).places[partition]) if queue else reached)

    # --- snapshot ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[Any]:
        """JSON-able, in order."""
        return [
            [*hold.name, hold.is_settled, [[p.topic_id, p.number, *place] for p, place in hold.places.items()]]
            for hold in self._all
        ]

    def settled(self) -> None:
        """After a restore or redo: let those leave whose end is durable."""
        for hold in list(self._all):
            hold.is_ready = hold.is_settled
            self._leave(hold)
