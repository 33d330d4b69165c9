"""Which offsets are read, by whom: pure arithmetic over ranges of offsets.

Offsets have no holes, so ``end - start`` is the number of messages. How many bytes a part of a range takes is taken to
be its share: the broker tells what a whole partition takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Range:
    """Messages of one partition, ``start <= offset < end``, about ``size_bytes`` in all.

    ``log``: in which they count (``txmq.log.history.log_name``); empty if that is not known.
    """

    topic: str
    topic_id: int
    partition: int
    start: int
    end: int
    size_bytes: int
    log: str = ""

    @property
    def count(self) -> int:
        """How many messages."""
        return self.end - self.start

    def cut(self, start: int, end: int) -> Range:
        """A part of it, with its share of the bytes."""
        size_bytes = self.size_bytes * (end - start) // max(self.count, 1)
        return replace(self, start=start, end=end, size_bytes=size_bytes)


def split(ranges: Sequence[Range], tasks_min: int, task_size_bytes: int) -> list[Range]:
    """Cut ranges into parts for tasks: at least ``tasks_min`` if there are so many messages, none empty.

    Args:
        task_size_bytes: about the most a part may have.
    """
    total = sum(each.count for each in ranges)
    parts = []
    for each in ranges:
        by_size = -(-each.size_bytes // task_size_bytes)
        by_share = -(-each.count * tasks_min // max(total, 1))
        pieces = min(max(by_size, by_share, 1), each.count)
        bounds = [each.start + each.count * number // max(pieces, 1) for number in range(pieces + 1)]
        parts += [each.cut(start, end) for start, end in pairwise(bounds)]
    return parts


def pack(parts: Sequence[Range], rows: int) -> list[tuple[Range, ...]]:
    """Put small parts together, in order, up to about ``rows`` messages: thousands of small ones make few tasks."""
    packs: list[list[Range]] = []
    count = 0
    for part in parts:
        if not packs or count + part.count > rows:
            packs.append([])
            count = 0
        packs[-1].append(part)
        count += part.count
    return [tuple(pack) for pack in packs]


def share(wanted: Mapping[K, int], allowed: int) -> dict[K, int]:
    """Divide ``allowed`` among the partitions in proportion; together never more, none more than wanted.

    Each partition gets one message if possible: no partition starves because of one with a large backlog. The largest
    remainders are rounded up, the first of equals first: the same question has the same answer.
    """
    if sum(wanted.values()) <= allowed:
        return dict(wanted)
    waiting = sum(want > 0 for want in wanted.values())
    first = 1 if waiting <= allowed else 0
    more = {key: max(want - first, 0) for key, want in wanted.items()}
    total, left = sum(more.values()), allowed - first * waiting
    given = {key: min(want, first) + more[key] * left // total for key, want in wanted.items()}
    by_remainder = sorted(wanted, key=lambda key: -(more[key] * left % total))
    for key in by_remainder[: allowed - sum(given.values())]:
        given[key] += 1
    return given


def admit(available: Mapping[K, Range], rows_max: int | None, size_bytes_max: int | None) -> dict[K, int]:
    """How far to read: the end of each range's part that fits both limits; at least one message if there is any."""
    counts = {key: each.count for key, each in available.items()}
    allowed = total = sum(counts.values())
    if rows_max is not None:
        allowed = min(allowed, rows_max)
    size_bytes = sum(each.size_bytes for each in available.values())
    if size_bytes_max is not None and size_bytes > size_bytes_max:
        allowed = min(allowed, max(total * size_bytes_max // size_bytes, 1))
    given = share(counts, allowed)
    return {key: each.start + given[key] for key, each in available.items()}
