"""What consumer groups have saved: offsets, what was set aside, generations. A fold over the journal.

Members are not here: they are known by their heartbeats, and join again after a restart. Generations are, so that a
member of a former life of the broker stays fenced.

Invariants:
    * a generation of a partition never falls, and each is handed out once;
    * an offset saved under an older generation than the newest one is refused before it comes here;
    * what a transaction holds is handed to nobody until the transaction is settled (``offsets``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Place = tuple[int, int]  # topic id, partition
Name = tuple[int, int]  # session and counter of a transaction


class Saved(NamedTuple):
    """One partition's offset: the next one to be consumed; ``aside`` is the consumer's own text about what waits."""

    offset: int
    aside: str | None
    time_ms: int


class SavedGroup:
    """One group."""

    __slots__ = ("generations", "offsets")

    def __init__(self) -> None:
        self.offsets: dict[Place, Saved] = {}
        self.generations: dict[Place, int] = {}

    def forget_topic(self, topic_id: int) -> None:
        """The topic was deleted."""
        for place in [place for place in self.offsets if place[0] == topic_id]:
            del self.offsets[place]
        for place in [place for place in self.generations if place[0] == topic_id]:
            del self.generations[place]


class SavedGroups:
    """All of them.

    Attributes:
        held: partitions of groups whose offset an unsettled transaction is going to save. Derived: transactions and
            decisions have it in their meta.
        generation_floor: no generation up to here is handed out to a partition whose own is not known: a deleted
            group, or one of a topic that was made anew, may have had it, and a member that holds it may still be alive.
    """

    def __init__(self) -> None:
        self.named: dict[str, SavedGroup] = {}
        self.held: dict[tuple[str, int, int], Name] = {}
        self.generation_floor = 0

    def save(self, group: str, offsets: Iterable[Iterable[Any]], time_ms: int) -> None:
        """(topic id, partition, offset, aside) each."""
        saved = self._group(group).offsets
        for topic_id, partition, offset, aside in offsets:
            saved[topic_id, partition] = Saved(offset, aside, time_ms)

    def hand_over(self, group: str, generations: Iterable[Iterable[int]]) -> None:
        """(topic id, partition, generation) each."""
        known = self._group(group).generations
        for topic_id, partition, generation in generations:
            known[topic_id, partition] = generation

    def generation(self, group: str, place: Place) -> int:
        """The newest that was handed out; 0 where there was none."""
        known = self.named.get(group)
        return known.generations.get(place, 0) if known is not None else 0

    def topics_of(self, group: str) -> set[int]:
        """The topics of which the group was ever handed a partition: ids."""
        known = self.named.get(group)
        return {topic_id for topic_id, _ in known.generations} if known is not None else set()

    def is_new_to(self, group: str, place: Place) -> bool:
        """Whether the group never had a partition, and nothing is saved for it."""
        known = self.named.get(group)
        return known is None or (place not in known.generations and place not in known.offsets)

    def next_generation(self, group: str, place: Place) -> int:
        """The one that is handed out next."""
        return (self.generation(group, place) or self.generation_floor) + 1

    def delete(self, group: str) -> None:
        """Forget a group, but for how far its generations went."""
        known = self.named.pop(group, None)
        if known is not None and known.generations:
            self.generation_floor = max(self.generation_floor, *known.generations.values())

    def forget_topic(self, topic_id: int) -> None:
        """The topic was deleted: nothing of it is kept."""
        for saved in self.named.values():
            gone = [generation for place, generation in saved.generations.items() if place[0] == topic_id]
            self.generation_floor = max(self.generation_floor, *gone, 0)
            saved.forget_topic(topic_id)
        self.held = {key: name for key, name in self.held.items() if key[1] != topic_id}

    # --- transactions ------------------------------------------------------------------------------------------------

    def hold(self, name: Name, offsets: Iterable[Any], is_there: Callable[[int, int], object]) -> None:
        """An unsettled transaction is going to save these: ``offsets`` of its meta; nothing of deleted topics."""
        for group, rows in offsets:
            for topic_id, partition, *_ in rows:
                if is_there(topic_id, partition) is not None:
                    self.held[group, topic_id, partition] = name

    def let_go(self, name: Name, offsets: Iterable[Any]) -> None:
        """The transaction is settled."""
        for group, rows in offsets:
            for topic_id, partition, *_ in rows:
                if self.held.get((group, topic_id, partition)) == name:
                    del self.held[group, topic_id, partition]

    def save_of_transaction(self, offsets: Iterable[Any], time_ms: int, is_there: Callable[[int, int], object]) -> None:
        """A transaction was committed or decided; what topics that were deleted meanwhile had is left out."""
        for group, rows in offsets:
            self.save(group, [row for row in rows if is_there(row[0], row[1]) is not None], time_ms)

    def _group(self, name: str) -> SavedGroup:
        group = self.named.get(name)
        if group is None:
            group = self.named[name] = SavedGroup()
        return group

    def snapshot(self) -> list[Any]:
        """JSON-able state."""
        return [
            [
                name,
                [[*place, *saved] for place, saved in group.offsets.items()],
                [[*place, generation] for place, generation in group.generations.items()],
            ]
            for name, group in self.named.items()
        ]

    def restore(self, snapshot: list[Any]) -> None:
        """The reverse of ``snapshot``."""
        for name, offsets, generations in snapshot:
            group = self._group(name)
            group.offsets = {(t, p): Saved(offset, aside, time_ms) for t, p, offset, aside, time_ms in offsets}
            group.generations = {(t, p): generation for t, p, generation in generations}
