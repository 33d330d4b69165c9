"""What consumer groups have saved: offsets, what was set aside, generations. A fold over the journal.

Members are not here: they are known by their heartbeats, and join again after a restart. Generations are, so that a
member of a former life of the broker stays fenced.

Invariants:
    * a generation of a partition never falls, and each is handed out once;
    * an offset saved under an older generation than the newest one is refused before it comes here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

Place = tuple[int, int]  # topic id, partition


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
    """All of them."""

    def __init__(self) -> None:
        self.named: dict[str, SavedGroup] = {}

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

    def delete(self, group: str) -> None:
        """Forget a group."""
        self.named.pop(group, None)

    def forget_topic(self, topic_id: int) -> None:
        """The topic was deleted: nothing of it is kept."""
        for saved in self.named.values():
            saved.forget_topic(topic_id)

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
