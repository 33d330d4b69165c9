"""Offsets, deferred messages and generations that consumer groups have saved. A fold over the journal.

Members are not saved: they are known by their heartbeats, and join again after a restart. Generations are saved, so
that a member of a former incarnation of the broker stays fenced.

Invariants:
    * a generation of a partition never falls, and each is handed out once;
    * an offset saved under an older generation than the newest one is refused before it comes here;
    * a partition that a transaction holds is handed to no member until the transaction is settled (``offsets``);
    * ``size_bytes`` is the memory of the groups' entries and texts, held ones included: a function of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from txmq.registry.port import PlacedTopic

PartitionId = tuple[int, int]  # topic id, partition
Name = tuple[int, int]  # session and counter of a transaction
PLACE_BYTES = 500  # of memory, for one partition of one group: its generation and its offset: 140 to 250, and 270


def text_bytes(deferred: str | None) -> int:
    """Of memory, at most."""
    return 0 if deferred is None else len(deferred) if deferred.isascii() else 4 * len(deferred)


class Saved(NamedTuple):
    """One partition's offset: the next one to be consumed; ``deferred`` is the consumer's own text about what waits."""

    offset: int
    deferred: str | None
    time_ms: int


Frozen = tuple[str, dict[PartitionId, Saved], dict[PartitionId, int], dict[int, int]]


class SavedGroup:
    """One group.

    Attributes:
        began: by topic id, how many partitions the topic had when the group was first handed one here. Of topics whose
            partitions have homes: other homes have the others.
    """

    __slots__ = ("began", "generations", "offsets")

    def __init__(self) -> None:
        self.offsets: dict[PartitionId, Saved] = {}
        self.generations: dict[PartitionId, int] = {}
        self.began: dict[int, int] = {}

    @property
    def size_bytes(self) -> int:
        """Its memory; walks over all of it."""
        texts = sum(text_bytes(saved.deferred) for saved in self.offsets.values())
        return PLACE_BYTES * len(self.offsets.keys() | self.generations.keys()) + texts

    def growth_bytes(self, place: PartitionId, deferred: str | None) -> int:
        """The memory that saving this adds; negative if it replaces a longer text."""
        known = self.offsets.get(place)
        if known is None:
            return text_bytes(deferred) + (0 if place in self.generations else PLACE_BYTES)
        return text_bytes(deferred) - text_bytes(known.deferred)

    def forget_topic(self, topic_id: int) -> None:
        """The topic was deleted."""
        for place in [place for place in self.offsets if place[0] == topic_id]:
            del self.offsets[place]
        for place in [place for place in self.generations if place[0] == topic_id]:
            del self.generations[place]
        self.began.pop(topic_id, None)


class SavedGroups:
    """All of them.

    Attributes:
        held: partitions of groups whose offset an unsettled transaction is going to save. Derived: transactions and
            decisions have it in their meta.
        generation_floor: no generation up to here is handed out to a partition whose own is not known: a deleted
            group, or one of a topic that was made anew, may have had it, and a member that holds it may still be alive.
        size_bytes: see the module.
    """

    def __init__(self) -> None:
        self.named: dict[str, SavedGroup] = {}
        self.held: dict[tuple[str, int, int], Name] = {}
        self.generation_floor = 0
        self.size_bytes = 0
        self._held_bytes: dict[tuple[str, int, int], int] = {}  # of texts that are going to be saved

    def save(self, group: str, offsets: Iterable[Iterable[Any]], time_ms: int) -> None:
        """(topic id, partition, offset, deferred) each."""
        known = self._group(group)
        for topic_id, partition, offset, deferred in offsets:
            place = topic_id, partition
            self.size_bytes += known.growth_bytes(place, deferred)
            known.offsets[place] = Saved(offset, deferred, time_ms)

    def hand_over(
        self, group: str, generations: Iterable[Iterable[int]], placed: Mapping[int, PlacedTopic]
    ) -> None:  # fmt: skip
        """(topic id, partition, generation) each; ``placed``: the topics whose partitions have homes."""
        known = self._group(group)
        for topic_id, partition, generation in generations:
            if topic_id in placed:
                known.began.setdefault(topic_id, len(placed[topic_id].homes))
            place = topic_id, partition
            if place not in known.generations and place not in known.offsets:
                self.size_bytes += PLACE_BYTES
            known.generations[place] = generation

    def growth_bytes(self, group: str, offsets: Iterable[Iterable[Any]]) -> int:
        """The bytes that ``save`` adds to ``size_bytes``."""
        known = self.named.get(group) or SavedGroup()
        return sum(known.growth_bytes((topic_id, partition), deferred) for topic_id, partition, _, deferred in offsets)

    def generation(self, group: str, place: PartitionId) -> int:
        """The newest one handed out; 0 if there was none."""
        known = self.named.get(group)
        return known.generations.get(place, 0) if known is not None else 0

    def topics_of(self, group: str) -> set[int]:
        """The topics of which the group was ever handed a partition: ids."""
        known = self.named.get(group)
        return {topic_id for topic_id, _ in known.generations} if known is not None else set()

    def is_new_to(self, group: str, place: PartitionId) -> bool:
        """Whether the group never had a partition, and nothing is saved for it."""
        known = self.named.get(group)
        return known is None or (place not in known.generations and place not in known.offsets)

    def next_generation(self, group: str, place: PartitionId) -> int:
        """The one that is handed out next."""
        return (self.generation(group, place) or self.generation_floor) + 1

    def delete(self, group: str) -> None:
        """Forget a group, but for how far its generations went."""
        known = self.named.pop(group, None)
        if known is not None:
            self.size_bytes -= known.size_bytes
        if known is not None and known.generations:
            self.generation_floor = max(self.generation_floor, *known.generations.values())

    def forget_topic(self, topic_id: int) -> None:
        """The topic was deleted: nothing of it is kept."""
        for saved in self.named.values():
            gone = [generation for place, generation in saved.generations.items() if place[0] == topic_id]
            self.generation_floor = max(self.generation_floor, *gone, 0)
            before_bytes = saved.size_bytes
            saved.forget_topic(topic_id)
            self.size_bytes += saved.size_bytes - before_bytes
        for key in [key for key in self.held if key[1] == topic_id]:
            self._drop_held(key)

    # --- transactions ------------------------------------------------------------------------------------------------

    def hold(self, name: Name, offsets: Iterable[Any], is_there: Callable[[int, int], object]) -> None:
        """An unsettled transaction is going to save these: ``offsets`` of its meta; nothing of deleted topics."""
        for group, rows in offsets:
            for topic_id, partition, _, deferred in rows:
                if is_there(topic_id, partition) is not None:
                    key = group, topic_id, partition
                    self.size_bytes += text_bytes(deferred) - self._held_bytes.get(key, 0)
                    self.held[key], self._held_bytes[key] = name, text_bytes(deferred)

    def let_go(self, name: Name, offsets: Iterable[Any]) -> None:
        """The transaction is settled."""
        for group, rows in offsets:
            for topic_id, partition, *_ in rows:
                if self.held.get((group, topic_id, partition)) == name:
                    self._drop_held((group, topic_id, partition))

    def _drop_held(self, key: tuple[str, int, int]) -> None:
        del self.held[key]
        self.size_bytes -= self._held_bytes.pop(key)

    def save_of_transaction(self, offsets: Iterable[Any], time_ms: int, is_there: Callable[[int, int], object]) -> None:
        """A transaction was committed or decided; offsets of topics that were deleted meanwhile are left out."""
        for group, rows in offsets:
            self.save(group, [row for row in rows if is_there(row[0], row[1]) is not None], time_ms)

    def _group(self, name: str) -> SavedGroup:
        group = self.named.get(name)
        if group is None:
            group = self.named[name] = SavedGroup()
        return group

    def freeze(self) -> list[Frozen]:
        """A copy; ``row`` makes each JSON-able, in any thread."""
        return [
            (name, group.offsets.copy(), group.generations.copy(), group.began.copy())
            for name, group in self.named.items()
        ]

    def snapshot(self) -> list[Any]:
        """JSON-able state."""
        return [row(frozen) for frozen in self.freeze()]

    def restore(self, snapshot: list[Any]) -> None:
        """The reverse of ``snapshot``."""
        for name, offsets, generations, *began in snapshot:
            group = self._group(name)
            group.offsets = {(t, p): Saved(offset, deferred, time_ms) for t, p, offset, deferred, time_ms in offsets}
            group.generations = {(t, p): generation for t, p, generation in generations}
            group.began = dict(*began)
            self.size_bytes += group.size_bytes


def row(frozen: Frozen) -> list[Any]:
    """One group, as ``SavedGroups.restore`` takes it."""
    name, offsets, generations, began = frozen
    return [
        name,
        [[*place, *saved] for place, saved in offsets.items()],
        [[*place, generation] for place, generation in generations.items()],
        *([list(map(list, began.items()))] if began else []),
    ]
