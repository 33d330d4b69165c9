"""Visibility barriers: they hide placed messages until all branches of the decision have completed.

Theory of operation. A decision assigns the offsets of its messages, but a visible message implies readable rows. So the
high watermark of its partitions stays below them until every branch has completed. A partition's *barriers* queue
up in order of their offsets. Its watermark (Kafka's last stable offset) is where the first barrier begins, or the end
of the log.

All or none: a transaction that wrote above a barrier in one partition, and into another partition that has none, gets
a barrier in both. That one has ended already and only waits for its turn. A barrier leaves when it has ended durably
and is the first in all its partitions; it leaves all of them together.

Invariants:
    * a barrier joins when its transaction is accepted (assigned side). It leaves when the record that ended it, or that
      deleted its topics, is synced and applied (durable side). Checkpoints keep the assigned side (``held``);
    * queues are in order of offsets, so the watermark never passes a barrier;
    * without barriers, ``applied`` is what ``Partition.publish`` is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from txmq.log.partition import LogPosition, Partition

FROZEN_FIELDS: Final = 4
Frozen = tuple[int, int, bool, Mapping[Partition, LogPosition]]


class VisibilityBarrier:
    """One transaction's messages that readers must not see yet.

    Attributes:
        name: (session, counter) of the transaction.
        places: where its messages begin in each partition; replaced, never changed.
        is_ended: only its turn keeps it: every branch has completed, or it has waited too long. Assigned side.
        is_ended_durably: the record that says so is synced.
    """

    __slots__ = ("is_ended", "is_ended_durably", "name", "places")

    def __init__(
        self, name: tuple[int, int], places: Mapping[Partition, LogPosition], *, is_ended: bool = False
    ) -> None:
        self.name, self.places = name, places
        self.is_ended = self.is_ended_durably = is_ended


class VisibilityBarriers:
    """All barriers of a broker, by partition."""

    def __init__(self) -> None:
        self._queues: dict[Partition, dict[VisibilityBarrier, None]] = {}
        self._reached: dict[Partition, LogPosition] = {}  # how far one with barriers is durable and in its files
        self._all: dict[VisibilityBarrier, None] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return len(self._all)

    def partitions(self) -> Iterable[Partition]:
        """The partitions whose watermark is held."""
        return self._queues.keys()

    def add(self, barrier: VisibilityBarrier) -> None:
        """A transaction was accepted; call in order of offsets."""
        if barrier.places:
            self._all[barrier] = None
            for partition in barrier.places:
                self._queues.setdefault(partition, {})[barrier] = None

    def add_behind(self, name: tuple[int, int], places: Mapping[Partition, LogPosition]) -> None:
        """A transaction committed: if a part of it is above a barrier, all of it waits."""
        if len(places) > 1 and any(partition in self._queues for partition in places):
            self.add(VisibilityBarrier(name, places, is_ended=True))

    def applied(self, moved: Mapping[Partition, int], ready: Sequence[VisibilityBarrier]) -> Iterable[Partition]:
        """A record is durable and applied.

        Args:
            moved: how far it got in each partition.
            ready: barriers that it ended.

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
        for barrier in ready:
            barrier.is_ended = barrier.is_ended_durably = True
            changed.update(dict.fromkeys(self._leave(barrier)))
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
        for barrier in waiting:
            barrier.places = {other: place for other, place in barrier.places.items() if other is not partition}
            if not barrier.places:
                self._all.pop(barrier, None)
        freed: dict[Partition, None] = {}
        for barrier in waiting:
            if barrier.places and barrier.is_ended_durably:
                freed.update(dict.fromkeys(self._leave(barrier)))
        for other in freed:
            self._show(other)
        return list(freed)

    def _leave(self, barrier: VisibilityBarrier) -> list[Partition]:
        """Take an ended barrier out if its turn has come, and those after it. Returns the partitions it stood in."""
        freed: dict[Partition, None] = {}
        candidates = [barrier]
        while candidates:
            candidate = candidates.pop()
            if not candidate.is_ended_durably or candidate not in self._all or not self._is_first(candidate):
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

    def _is_first(self, barrier: VisibilityBarrier) -> bool:
        return all(next(iter(self._queues[partition])) is barrier for partition in barrier.places)

    def _show(self, partition: Partition) -> None:
        queue = self._queues.get(partition)
        reached = self._reached.get(partition) if queue else self._reached.pop(partition, None)
        if reached is None:
            return
        partition.show(min(reached, next(iter(queue)).places[partition]) if queue else reached)

    # --- snapshot ----------------------------------------------------------------------------------------------------

    def held(self) -> Iterator[tuple[VisibilityBarrier, Mapping[Partition, LogPosition]]]:
        """The barriers that the journal's records leave, in order, and their places.

        One that has ended, and is first everywhere, leaves when its record is applied here. Who folds the journal has
        let go of it with the record; so it is not among these.
        """
        blocked: set[Partition] = set()
        has_deleted = any(partition.is_deleted for partition in self._queues)
        for barrier in self._all:
            places = barrier.places
            if has_deleted:
                places = {partition: place for partition, place in places.items() if not partition.is_deleted}
            if places and not (barrier.is_ended and blocked.isdisjoint(places)):
                blocked.update(places)
                yield barrier, places

    def by_name(self) -> dict[tuple[int, int], VisibilityBarrier]:
        """Each under its transaction."""
        return {barrier.name: barrier for barrier in self._all}

    def restored(self) -> None:
        """After a restore or redo: let those leave whose end is durable."""
        for barrier in list(self._all):
            barrier.is_ended_durably = barrier.is_ended
            self._leave(barrier)


def row(frozen: Sequence[Any]) -> list[Any]:
    """One barrier, as a checkpoint keeps it, of what ``freeze`` yielded."""
    session, counter, is_ended, places = frozen
    return [session, counter, is_ended, [[p.topic_id, p.number, *place] for p, place in places.items()]]
