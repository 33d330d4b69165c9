"""Retention: segments that are too old, or too many, leave the log.

The new log start is journaled first; the files go when that record is durable (``CommitGroup.unlinked``, ``store``).
"""

from __future__ import annotations

from typing import Protocol

from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.state.state import State
from txmq.redo import entries


class Accepting(Protocol):
    """The core's context, as far as retention needs it."""

    state: State

    def group_with_room(self) -> CommitGroup:
        """The group in the making."""


def retire(context: Accepting, now_ms: int) -> None:
    """Put the new log starts of all partitions into the group in the making."""
    for partition in context.state.all_partitions():
        start, paths = partition.expired_segments(now_ms)
        if paths:
            group = context.group_with_room()
            group.add_entry(entries.encode_log_start(partition.topic_id, partition.number, start))
            partition.set_log_start(start)
            group.unlinked.append((partition, paths))
            group.needs_sync = True
