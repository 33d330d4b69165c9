"""Rules L11 and L12 of ``history``: what was acknowledged stands before what began afterwards.

With one broker a transaction has its place when it is acknowledged, and the order holds in the whole partition. In a
cluster a part at another home may get its place later: then the block returned without an offset of it, and only what
shares its key waits for it: transactions of any client, and all that the same client sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.checkers.events import Log, Operation
from tools.checkers.index import Finding, Index, at

Queue = tuple[Log, str | None]  # what is kept in order: a partition, or a key of it


class _Written(NamedTuple):
    operation: Operation
    first: int
    last: int
    is_bound: bool  # whether what begins after its end must stand after it, in this queue


def program_order(index: Index) -> Iterator[Finding]:
    """L11: within a process."""
    last: dict[tuple[str, Queue], tuple[int, str]] = {}
    for operation in sorted(index.operations, key=lambda operation: operation.invoked_ns):
        if operation.status == "fail" or _takes_no_part(index, operation):
            continue
        for queue, written in _written(index, operation):
            before, other = last.get((operation.process, queue), (-1, ""))
            if written.first < before:
                place = at(queue[0], written.first)
                text = f"{operation.id} at {place}, before {other} at {before}, of {operation.process}"
                yield Finding("L11", "nonmonotonic-send", text)
            if written.is_bound:
                last[operation.process, queue] = max((written.last, operation.id), (before, other))


def realtime_order(index: Index) -> Iterator[Finding]:
    """L12, between processes: the greatest offset acknowledged before an operation began is lower than its own."""
    by_queue: dict[Queue, list[_Written]] = defaultdict(list)
    for operation in index.operations:
        if operation.status != "fail":
            for queue, written in _written(index, operation):
                by_queue[queue].append(written)
    for (log, key), items in by_queue.items():
        later = items if key is None else [item for item in items if item.operation.kind != "send"]
        for early, late in _reversed_pairs(items, later):
            name, place = late.operation.id, at(log, late.first)
            text = f"{name} at {place} began after {early.operation.id} at {early.last} ended"
            yield Finding("L12", "realtime-order", text)


def _takes_no_part(index: Index, operation: Operation) -> bool:
    """What a lone broker has yet to be told may become visible after later work of its process."""
    return operation.is_pending and not index.is_cluster


def _written(index: Index, operation: Operation) -> Iterator[tuple[Queue, _Written]]:
    """What it wrote to each partition and, in a cluster, to each key of one."""
    placed = {(send.topic, send.partition) for send in operation.sends if send.offset is not None}
    for log, offsets in index.offsets_of(operation).items():
        is_placed = log in placed if index.is_cluster else not operation.is_pending
        yield (log, None), _Written(operation, min(offsets), max(offsets), is_placed)
        if index.is_cluster:
            for key, found in _by_key(index, operation, log).items():
                yield (log, key), _Written(operation, min(found), max(found), not is_placed)


def _by_key(index: Index, operation: Operation, log: Log) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for send in operation.sends:
        for position in index.positions.get(send.value, ())[:1]:
            if position.log == log:
                found[send.key].append(position.offset)
    return found


def _reversed_pairs(written: Sequence[_Written], late: Sequence[_Written]) -> Iterator[tuple[_Written, _Written]]:
    ended = sorted(
        (item for item in written if item.is_bound and item.operation.status == "ok"),
        key=lambda item: item.operation.completed_ns or 0,
    )
    position = 0
    greatest: list[_Written] = []  # the greatest of all processes, and the greatest of any other process
    for item in sorted(late, key=lambda item: item.operation.invoked_ns):
        began = item.operation.invoked_ns
        while position < len(ended) and (ended[position].operation.completed_ns or 0) < began:
            greatest = _two_greatest([*greatest, ended[position]])
            position += 1
        for early in greatest:
            if early.operation.process != item.operation.process and early.last > item.first:
                yield early, item
                break


def _two_greatest(items: list[_Written]) -> list[_Written]:
    items.sort(key=lambda item: -item.last)
    first = items[0]
    return [first, *[item for item in items[1:] if item.operation.process != first.operation.process][:1]]
