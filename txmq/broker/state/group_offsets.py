"""Offsets, deferred messages and generations that consumer groups have saved. A fold over the journal.

Members are not saved: they are known by their heartbeats, and join again after a restart. Generations are saved, so
that a member of a former incarnation of the broker stays fenced.

There may be 100,000 groups, so nothing on the event loop walks over all of them. A checkpoint's copy shares them, and
each is copied when it changes for the first time after that. What groups keep of a deleted topic counts no more at once
(ids of topics are never used again, so nothing finds it), is in no checkpoint, and is swept out some groups at a time.

Invariants:
    * a generation of a partition never falls, and each is handed out once;
    * an offset saved under an older generation than the newest one is refused before it comes here;
    * a partition that a transaction holds is handed to no member until the transaction is settled (``offsets``);
    * ``size_bytes`` is the memory of the groups' entries and texts of topics that are there, held ones included: a
      function of the rest;
    * a group that a checkpoint's copy shares is not changed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from txmq.log.partition import Partition
from txmq.model import Storage
from txmq.registry.cluster_metadata import PlacedTopic

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


class SavedGroup:
    """One group.

    Attributes:
        began: by topic id, how many partitions the topic had when the group was first handed one here. Of topics whose
            partitions have homes: other homes have the others.
        freezes: how many copies for checkpoints there had been when it was made: a later one shares it.
    """

    __slots__ = ("began", "freezes", "generations", "offsets")

    def __init__(self, freezes: int = 0) -> None:
        self.offsets: dict[PartitionId, Saved] = {}
        self.generations: dict[PartitionId, int] = {}
        self.began: dict[int, int] = {}
        self.freezes = freezes

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Topic and memory of each of its partitions."""
        for place in self.offsets.keys() | self.generations.keys():
            saved = self.offsets.get(place)
            yield place[0], PLACE_BYTES + text_bytes(saved.deferred if saved is not None else None)

    def growth_bytes(self, place: PartitionId, deferred: str | None) -> int:
        """The memory that saving this adds; negative if it replaces a longer text."""
        known = self.offsets.get(place)
        if known is None:
            return text_bytes(deferred) + (0 if place in self.generations else PLACE_BYTES)
        return text_bytes(deferred) - text_bytes(known.deferred)

    def copy(self, freezes: int, without: Container[int] = ()) -> SavedGroup:
        """One that may be changed, without what is of these topics."""
        copied = SavedGroup(freezes)
        copied.offsets = {place: saved for place, saved in self.offsets.items() if place[0] not in without}
        copied.generations = {place: newest for place, newest in self.generations.items() if place[0] not in without}
        copied.began = {topic_id: count for topic_id, count in self.began.items() if topic_id not in without}
        return copied

    def row(self, name: str, deleted: Container[int]) -> list[Any]:
        """As ``SavedGroups.restore`` takes it, without what is of deleted topics."""
        began = [[topic_id, count] for topic_id, count in self.began.items() if topic_id not in deleted]
        return [
            name,
            [[*place, *saved] for place, saved in self.offsets.items() if place[0] not in deleted],
            [[*place, newest] for place, newest in self.generations.items() if place[0] not in deleted],
            *([began] if began else []),
        ]


class Frozen(NamedTuple):
    """A copy for a checkpoint: the groups, one by one, and the topics that were deleted."""

    names: deque[str]
    groups: deque[SavedGroup]
    deleted: frozenset[int]


class SavedGroups:
    """All of them.

    Attributes:
        held: partitions of groups whose offset an unsettled transaction is going to save. Derived: transactions and
            decisions have it in their meta.
        generation_floor: no generation up to here is handed out: a deleted group, or one of a topic that was made anew,
            may have had it, and a member that holds it may still be alive. Each start but a directory's first raises it
            to its time in ms: it may be an older copy, and members and offset stores know more than its journal.
        size_bytes: see the module.
    """

    def __init__(self) -> None:
        self.named: dict[str, SavedGroup] = {}
        self.held: dict[tuple[str, int, int], Name] = {}
        self.generation_floor = 0
        self.size_bytes = 0
        self._held_bytes: dict[tuple[str, int, int], int] = {}  # of texts that are going to be saved
        self._bytes_of = Counter[int]()  # of ``size_bytes``, by topic, what is not held
        self._newest_of: dict[int, int] = {}  # by topic, the highest generation that was handed out
        self._freezes = 0
        self._deleted: set[int] = set()  # topics of which groups may keep something
        self._unswept: list[str] = []  # these groups

    def save(self, group: str, offsets: Iterable[Iterable[Any]], time_ms: int) -> None:
        """(topic id, partition, offset, deferred) each."""
        known = self._group(group)
        for topic_id, partition, offset, deferred in offsets:
            place = topic_id, partition
            self._grow(topic_id, known.growth_bytes(place, deferred))
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
                self._grow(topic_id, PLACE_BYTES)
            known.generations[place] = generation
            self._newest_of[topic_id] = max(self._newest_of.get(topic_id, 0), generation)

    def _grow(self, topic_id: int, more: int) -> None:
        self.size_bytes += more
        self._bytes_of[topic_id] += more

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
        return max(self.generation(group, place), self.generation_floor) + 1

    def started(self, time_ms: int, find: Callable[[int, int], Partition | None], *, is_first: bool) -> None:
        """The broker started, in a directory that had a life before unless this is the first.

        Messages in memory are gone: their readers go on with the first one of this life.
        """
        if not is_first:
            self.generation_floor = max(self.generation_floor, time_ms)
        for known in self.named.values():
            for place, saved in known.offsets.items():
                partition = find(*place)
                if partition is not None and partition.config.storage is Storage.MEMORY:
                    known.offsets[place] = saved._replace(offset=partition.next_offset)

    def delete(self, group: str) -> None:
        """Forget a group, but for how far its generations went."""
        known = self.named.pop(group, None)
        if known is not None:
            for topic_id, size in known.sizes():
                if topic_id not in self._deleted:
                    self._grow(topic_id, -size)
            self.generation_floor = max(self.generation_floor, *known.generations.values(), 0)

    def forget_topic(self, topic_id: int) -> None:
        """The topic was deleted: nothing of it is kept."""
        self.generation_floor = max(self.generation_floor, self._newest_of.pop(topic_id, 0))
        self.size_bytes -= self._bytes_of.pop(topic_id, 0)
        if self.named:
            self._deleted.add(topic_id)
            self._unswept = list(self.named)
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
        """One that may be changed."""
        group = self.named.get(name)
        if group is None:
            group = self.named[name] = SavedGroup(self._freezes)
        elif group.freezes != self._freezes:
            group = self.named[name] = group.copy(self._freezes)
        return group

    def sweep(self, count: int) -> None:
        """Let go of what so many more groups keep of deleted topics. Changes nothing that anybody sees."""
        for name in self._unswept[-count:]:
            if (group := self.named.get(name)) is not None:
                self.named[name] = group.copy(self._freezes, self._deleted)
        del self._unswept[-count:]
        if not self._unswept:
            self._deleted.clear()

    @property
    def is_swept(self) -> bool:
        """Whether nothing is kept of deleted topics."""
        return not self._unswept

    def freeze(self) -> Frozen:
        """A copy, which shares the groups; ``rows`` makes it JSON-able, in any thread."""
        self._freezes += 1
        return Frozen(deque(self.named), deque(self.named.values()), frozenset(self._deleted))

    def snapshot(self) -> list[Any]:
        """JSON-able state."""
        return list(rows(self.freeze()))

    def restore(self, snapshot: list[Any]) -> None:
        """The reverse of ``snapshot``."""
        for name, offsets, generations, *began in snapshot:
            group = self._group(name)
            group.offsets = {(t, p): Saved(offset, deferred, time_ms) for t, p, offset, deferred, time_ms in offsets}
            group.generations = {(t, p): generation for t, p, generation in generations}
            group.began = dict(*began)
            for topic_id, size in group.sizes():
                self._grow(topic_id, size)
            for (topic_id, _), generation in group.generations.items():
                self._newest_of[topic_id] = max(self._newest_of.get(topic_id, 0), generation)


def rows(frozen: Frozen) -> Iterator[list[Any]]:
    """Each group once, as ``SavedGroups.restore`` takes it; it is let go of then."""
    while frozen.names:
        yield frozen.groups.popleft().row(frozen.names.popleft(), frozen.deleted)
