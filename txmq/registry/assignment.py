"""Who of a group consumes which partition: pure functions, used by the broker's coordinator and by ZooKeeper clients.

A strategy gets the members with the topics they want, the partitions there are, and who has them now; it answers one
owner a partition. Its result depends on nothing else, so that everybody who computes it from the same facts comes to
the same end.

Invariants of every strategy:
    * each partition of a topic that somebody wants has exactly one owner, who wants it; surplus members have none;
    * partitions of topics that nobody wants have none.

=================  ====================================================================================================
range              per topic, contiguous ranges of partitions; the first members get one more (MetaQ's default)
round-robin        all partitions of all topics dealt out in turn
consistent-hash    a ring of hashes: who comes or goes moves only his own share; shares differ (MetaQ's second strategy)
sticky             who has a partition keeps it; only what balance asks for moves (the default here)
exclusive          who has most has everything, the others stand by (a named member of a broadcast)
=================  ====================================================================================================

Sources: Kafka, "partition.assignment.strategy"; MetaQ, DefaultLoadBalanceStrategy, ConsisHashStrategy.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

Slot = tuple[str, int]  # topic, partition
Members = Mapping[str, Sequence[str]]  # member -> the topics it wants
Owners = dict[Slot, str]
Strategy = Callable[[Members, Mapping[str, int], Mapping[Slot, str]], Owners]

_POINTS_PER_MEMBER = 100  # shares of 10 members then differ by about a tenth


def range_(members: Members, partitions: Mapping[str, int], _current: Mapping[Slot, str]) -> Owners:
    """Contiguous ranges per topic."""
    owners: Owners = {}
    for topic, count in partitions.items():
        wanting = _wanting(members, topic)
        for rank, member in enumerate(wanting):
            share, more = divmod(count, len(wanting))
            start = rank * share + min(rank, more)
            for number in range(start, start + share + (rank < more)):
                owners[topic, number] = member
    return owners


def round_robin(members: Members, partitions: Mapping[str, int], _current: Mapping[Slot, str]) -> Owners:
    """Dealt out in turn, over all topics; who does not want a topic is passed over."""
    owners: Owners = {}
    turn = cycle(sorted(members))
    wanting = {topic: set(_wanting(members, topic)) for topic in partitions}
    for topic, number in _slots(members, partitions):
        owners[topic, number] = next(member for member in turn if member in wanting[topic])
    return owners


def consistent_hash(members: Members, partitions: Mapping[str, int], _current: Mapping[Slot, str]) -> Owners:
    """The first member on the ring behind the partition's hash."""
    owners: Owners = {}
    for topic, count in partitions.items():
        wanting = _wanting(members, topic)
        ring = sorted((_hash(f"{member}#{point}"), member) for member in wanting for point in range(_POINTS_PER_MEMBER))
        for number in range(count if ring else 0):
            at = bisect_left(ring, (_hash(f"{topic}-{number}"), ""))
            owners[topic, number] = ring[at % len(ring)][1]
    return owners


def sticky(members: Members, partitions: Mapping[str, int], current: Mapping[Slot, str]) -> Owners:
    """As few moves as balance allows: loads differ by at most one where all want the same topics."""
    owners: Owners = {}
    held: dict[str, list[Slot]] = {member: [] for member in sorted(members)}
    free: list[Slot] = []
    for slot in _slots(members, partitions):
        owner = current.get(slot)
        if owner is not None and slot[0] in members.get(owner, ()):
            held[owner].append(slot)
        else:
            free.append(slot)
    wanting = {topic: _wanting(members, topic) for topic in partitions}
    for slot in free:
        held[min(wanting[slot[0]], key=lambda member: (len(held[member]), member))].append(slot)
    _level(members, held)
    for member, slots in held.items():
        owners.update(dict.fromkeys(slots, member))
    return owners


def exclusive(members: Members, partitions: Mapping[str, int], current: Mapping[Slot, str]) -> Owners:
    """Everything to one member: who has most already, else the first by name."""
    held = Counter(owner for (topic, _), owner in current.items() if topic in partitions)
    ranking = sorted(members, key=lambda member: (-held[member], member))
    firsts = {topic: next((member for member in ranking if topic in members[member]), "") for topic in partitions}
    return {slot: firsts[slot[0]] for slot in _slots(members, partitions)}


def _level(members: Members, held: dict[str, list[Slot]]) -> None:
    """Move one partition at a time from who has most to who has least, while that lessens the difference."""
    moved = True
    while moved:
        moved = False
        for rich in sorted(held, key=lambda member: (-len(held[member]), member)):
            for poor in sorted(held, key=lambda member: (len(held[member]), member)):
                if len(held[rich]) - len(held[poor]) < 2:
                    break
                slot = next((slot for slot in reversed(held[rich]) if slot[0] in members[poor]), None)
                if slot is not None:
                    held[rich].remove(slot)
                    held[poor].append(slot)
                    moved = True
                    break
            if moved:
                break


def _wanting(members: Members, topic: str) -> list[str]:
    return sorted(member for member, topics in members.items() if topic in topics)


def _slots(members: Members, partitions: Mapping[str, int]) -> list[Slot]:
    """All partitions that somebody wants, in order of topic and number."""
    return [(topic, n) for topic in sorted(partitions) if _wanting(members, topic) for n in range(partitions[topic])]


def _hash(text: str) -> int:
    # CRC32 of short, similar texts lies close together; its square does not.
    crc = zlib.crc32(text.encode())
    return (crc * crc) >> 16 & 0xFFFFFFFF


STRATEGIES: Mapping[str, Strategy] = {
    "range": range_,
    "round-robin": round_robin,
    "consistent-hash": consistent_hash,
    "sticky": sticky,
    "exclusive": exclusive,
}
