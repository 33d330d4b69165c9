"""Assignors: which member of a group gets which partition. Pure functions, called by the group's coordinator.

An assignor gets the members with the topics they want, the partitions there are, and their current owners; it answers
one owner a partition. Its result depends on nothing else, so that every process that computes it from the same facts
reaches the same result.

Invariants of every assignor:
    * each partition of a subscribed topic has exactly one owner, which subscribed to it; surplus members have none;
    * partitions of topics without a subscriber have none.

=================  ====================================================================================================
range              per topic, contiguous ranges of partitions; the first members get one more (MetaQ's default)
round-robin        all partitions of all topics dealt out in turn
consistent-hash    a ring of hashes: a member that comes or goes moves its own share only; shares differ (MetaQ's
                   second strategy)
sticky             a member keeps the partitions that it has; only what balance asks for moves (the default here)
exclusive          the member that has most has everything, the others stand by (a named member of a broadcast)
=================  ====================================================================================================

Sources: Kafka, "partition.assignment.strategy"; MetaQ, DefaultLoadBalanceStrategy, ConsisHashStrategy.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, cycle

from txmq.model import TopicPartition

Members = Mapping[str, Sequence[str]]  # member -> the topics it wants
Owners = dict[TopicPartition, str]
Assignor = Callable[[Members, Mapping[str, int], Mapping[TopicPartition, str]], Owners]

_POINTS_PER_MEMBER = 100  # shares of 10 members then differ by about a tenth


def range_(members: Members, partitions: Mapping[str, int], _current: Mapping[TopicPartition, str]) -> Owners:
    """Contiguous ranges per topic."""
    owners: Owners = {}
    for topic, wanting in _wanting(members, partitions).items():
        count = partitions[topic]
        for rank, member in enumerate(wanting):
            share, more = divmod(count, len(wanting))
            start = rank * share + min(rank, more)
            for number in range(start, start + share + (rank < more)):
                owners[topic, number] = member
    return owners


def round_robin(members: Members, partitions: Mapping[str, int], _current: Mapping[TopicPartition, str]) -> Owners:
    """Dealt out in turn, over all topics; members that do not want a topic are passed over."""
    owners: Owners = {}
    turn = cycle(sorted(members))
    wanting = {topic: frozenset(names) for topic, names in _wanting(members, partitions).items()}
    for topic, number in _slots(wanting, partitions):
        owners[topic, number] = next(member for member in turn if member in wanting[topic])
    return owners


def consistent_hash(members: Members, partitions: Mapping[str, int], _current: Mapping[TopicPartition, str]) -> Owners:
    """The first member on the ring after the partition's hash."""
    owners: Owners = {}
    points = {
        member: [(_hash(f"{member}#{point}"), member) for point in range(_POINTS_PER_MEMBER)] for member in members
    }
    rings: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for topic, names in _wanting(members, partitions).items():
        wanting = tuple(names)
        if wanting not in rings:
            rings[wanting] = sorted(point for member in wanting for point in points[member])
        ring = rings[wanting]
        for number in range(partitions[topic]):
            at = bisect_left(ring, (_hash(f"{topic}-{number}"), ""))
            owners[topic, number] = ring[at % len(ring)][1]
    return owners


class _Owned:
    """A member's partitions: numbers by topic, the newest last; and these topics, sorted."""

    __slots__ = ("load", "numbers", "topics", "wants")

    def __init__(self, wants: frozenset[str]) -> None:
        self.wants, self.load = wants, 0
        self.numbers: dict[str, list[int]] = {}
        self.topics: list[str] = []

    def take(self, topic: str, number: int) -> None:
        numbers = self.numbers.get(topic)
        if numbers is None:
            numbers = self.numbers[topic] = []
            insort(self.topics, topic)
        numbers.append(number)
        self.load += 1

    def give(self, poor: _Owned) -> None:
        """Hand over one partition that the other one wants, of the last of such topics."""
        at = len(self.topics) - 1
        while self.topics[at] not in poor.wants:  # the last one of all, where both want the same
            at -= 1
        topic = self.topics[at]
        poor.take(topic, self.numbers[topic].pop())
        self.load -= 1
        if not self.numbers[topic]:
            del self.numbers[topic], self.topics[at]


def sticky(members: Members, partitions: Mapping[str, int], current: Mapping[TopicPartition, str]) -> Owners:
    """As few moves as balance allows: loads differ by at most one where all want the same topics.

    A few microseconds a partition: members join and leave while all others wait for the broker.
    """
    wishes = [(frozenset(topics), names) for topics, names in _by_wish(members).items()]
    wants = {member: wish for wish, names in wishes for member in names}  # one object: two are compared item by item
    shares = {member: _Owned(wants[member]) for member in sorted(members)}
    free: dict[str, list[int]] = {}
    wanting = _wanting(members, partitions)
    for topic, number in _slots(wanting, partitions):
        share = shares.get(current.get((topic, number), ""))
        if share is not None and topic in share.wants:
            share.take(topic, number)
        else:
            free.setdefault(topic, []).append(number)
    for topic, numbers in free.items():
        _deal(shares, wanting[topic], topic, numbers)
    while _level(list(shares.values())):
        pass
    return {
        (topic, number): member
        for member, share in shares.items()
        for topic, numbers in share.numbers.items()
        for number in numbers
    }


def _deal(shares: Mapping[str, _Owned], wanting: Sequence[str], topic: str, free: Sequence[int]) -> None:
    """Each to the member with the least load of those that want the topic."""
    ranking = [(shares[member].load, member) for member in wanting]
    heapify(ranking)
    for number in free:
        load, member = ranking[0]
        shares[member].take(topic, number)
        heapreplace(ranking, (load + 1, member))


def _level(shares: Sequence[_Owned]) -> bool:
    """Move one partition after the other from the member with most to the one with least, while that helps.

    Members with the same wishes stand in one heap; an entry whose load is not its member's (any more) is passed over.

    Returns:
        False if nothing needs to be moved.
    """
    richest = [(-share.load, rank, share) for rank, share in enumerate(shares)]
    heapify(richest)
    poorest: dict[frozenset[str], list[tuple[int, int, _Owned]]] = {}
    for rank, share in enumerate(shares):
        heappush(poorest.setdefault(share.wants, []), (share.load, rank, share))
    has_moved = False
    while richest:
        load, rank, rich = richest[0]
        candidates = [_first(heap) for wants, heap in poorest.items() if not wants.isdisjoint(rich.numbers)]
        if load != -rich.load or not candidates or rich.load - min(candidates)[0] < 2:
            heappop(richest)
            continue
        _, poor_rank, poor = min(candidates)
        rich.give(poor)
        has_moved = True
        for changed_rank, changed in ((rank, rich), (poor_rank, poor)):
            heappush(richest, (-changed.load, changed_rank, changed))
            heappush(poorest[changed.wants], (changed.load, changed_rank, changed))
    return has_moved


def _first(heap: list[tuple[int, int, _Owned]]) -> tuple[int, int, _Owned]:
    while heap[0][0] != heap[0][2].load:
        heappop(heap)
    return heap[0]


def exclusive(members: Members, partitions: Mapping[str, int], current: Mapping[TopicPartition, str]) -> Owners:
    """Everything to one member: the one that has most already, else the first by name."""
    held = Counter(owner for (topic, _), owner in current.items() if topic in partitions)
    ranking = sorted(members, key=lambda member: (-held[member], member))
    firsts: dict[str, str] = {}
    for member in ranking:
        for topic in members[member]:
            firsts.setdefault(topic, member)
    return {slot: firsts[slot[0]] for slot in _slots(firsts, partitions)}


def _wanting(members: Members, partitions: Mapping[str, int]) -> dict[str, list[str]]:
    """Of each topic that is there and wanted, the members that want it, sorted. Walks over each different wish once."""
    found: dict[str, list[list[str]]] = {}
    for topics, names in _by_wish(members).items():
        for topic in dict.fromkeys(topics):
            if topic in partitions:
                found.setdefault(topic, []).append(names)
    return {topic: lists[0] if len(lists) == 1 else sorted(chain(*lists)) for topic, lists in found.items()}


def _by_wish(members: Members) -> dict[tuple[str, ...], list[str]]:
    """The members, sorted, by what they want: most often all want the same."""
    found: dict[tuple[str, ...], list[str]] = {}
    for member in sorted(members):
        found.setdefault(tuple(members[member]), []).append(member)
    return found


def _slots(wanted: Container[str], partitions: Mapping[str, int]) -> list[TopicPartition]:
    """All partitions of wanted topics, in order of topic and number."""
    return [(topic, n) for topic in sorted(partitions) if topic in wanted for n in range(partitions[topic])]


def _hash(text: str) -> int:
    # CRC32 of short, similar texts lies close together; its square does not.
    crc = zlib.crc32(text.encode())
    return (crc * crc) >> 16 & 0xFFFFFFFF


ASSIGNORS: Mapping[str, Assignor] = {
    "range": range_,
    "round-robin": round_robin,
    "consistent-hash": consistent_hash,
    "sticky": sticky,
    "exclusive": exclusive,
}
