"""Retention: segments that are too old, or too many, leave the log; and the files that go with that.

The new log start is journaled first; the files go when that record is durable (``CommitGroup.unlinked``,
``data_directory``).

Theory of operation. *The clock.* What a clock that is wrong has removed does not come back. A broker that was started
with a clock years ahead follows the corrected one at half the speed of time (``runtime/clocks.py``), so for
years; messages would be old when they arrive. ``RetentionClock`` therefore never shows a later time than the machine's.
The other way round, a broker that was started with a clock years behind would remove nothing for years: a machine's
clock that has been later for ``ADOPTED_AFTER_S`` is taken as it is.

*The files* that applied groups let go of, segments below a log start and the directories of deleted topics, are queued
(``Removals``), in their order, and removed while everything else goes on: nothing is written to such a file any more. A
checkpoint waits for it: only the journal after it makes the next start look for files that are left.

Invariants:
    * a removal is journaled and durable before it begins, so that a crash in between leaves files, never holes: the
      next start finds them below the log start, or under no topic, and removes them;
    * a segment is archived when its bytes are forced, under a name that nothing replaces;
    * a file that is removed early, to make room, is removed once more in its turn: a group that waited for room
      writes it again;
    * a file leaves the queue when it is removed: a failure for want of descriptors or space is tried again.

Thread safety: one thread queues removals, one carries them out.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.state.state import State
from txmq.log.file_cache import FileCache
from txmq.log.partition import Partition
from txmq.model import RetentionPolicy
from txmq.redo import entries
from txmq.runtime.clocks import SteadyClock
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Disk

ADOPTED_AFTER_S: Final = 86_400.0  # longer than a wrong clock goes unnoticed, shorter than most retention
DIFFERS_MS: Final = 60_000  # less is of no consequence


class RetentionClock:
    """The time by which messages are old; see the module's docstring."""

    def __init__(self, clock: SteadyClock) -> None:
        self._clock = clock
        self._behind_since: float | None = None

    def now_ms(self) -> int:
        """Ms since 1970-01-01 UTC; asked for now and then."""
        ahead_ms, now = self._clock.ahead_ms(), self._clock.monotonic()
        if ahead_ms >= -DIFFERS_MS:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        is_adopted = self._behind_since is not None and now - self._behind_since >= ADOPTED_AFTER_S
        steady_ms = self._clock.now_ms()
        return steady_ms - ahead_ms if ahead_ms > 0 or is_adopted else steady_ms


def retire(state: State, group_with_room: Callable[[], CommitGroup], now_ms: int) -> None:
    """Put the new log starts of all partitions into the group in the making."""
    for partition in state.all_partitions():
        start, paths = partition.expired_segments(now_ms)
        if paths:
            group = group_with_room()
            group.add_entry(entries.encode_log_start(partition.topic_id, partition.number, start))
            partition.set_log_start(start)
            group.unlinked.append((partition, paths))
            group.needs_sync = True


class Removals:
    """Removes and archives files of one data directory; what is absent already is fine."""

    def __init__(self, disk: Disk, files: FileCache) -> None:
        self._disk, self._files = disk, files
        self._queue: deque[Callable[[], None]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether everything that was queued is done."""
        return not self._queue

    def queue_segments(self, partition: Partition, paths: list[str]) -> None:
        """Delete or archive segments later."""
        self._queue.append(partial(self.drop_segments, partition, paths))

    def queue_partitions(self, partitions: list[Partition]) -> None:
        """Remove partitions of deleted topics later."""
        self._queue.append(partial(self.drop_partitions, partitions))

    def carry_out(self) -> None:
        """Do everything that is queued."""
        while self._queue:
            self._queue[0]()
            self._queue.popleft()

    def drop_segments(self, partition: Partition, paths: Iterable[str]) -> None:
        """Delete or archive segments below a journaled log start."""
        crash_point("retention.journaled")
        for path in paths:
            if not self._disk.exists(path):
                continue
            if partition.config.retention_policy is RetentionPolicy.ARCHIVE:
                self._archive(path)
            else:
                self._files.unlink(path)
        crash_point("retention.unlinked")

    def _archive(self, path: str) -> None:
        target = "archive" + path[len("log") :]
        if self._disk.exists(target):
            self._files.unlink(path)  # archived before a crash; the file that redo made anew is not whole
        else:
            self._files.archive(path, target)

    def drop_partitions(self, partitions: Iterable[Partition]) -> None:
        """Remove partitions of deleted topics, and their topics' directories when nothing is left in them."""
        topics = set()
        for partition in partitions:
            topics.add(f"log/{partition.topic_id}")
            self._drop_directory(f"log/{partition.topic_id}/{partition.number}")
        for directory in topics:
            self._drop_if_empty(directory)

    def drop_topic(self, directory: str) -> None:
        """Remove the directory of a topic that is not known any more."""
        for number in self._disk.list_directory(directory):
            self._drop_directory(f"{directory}/{number}")
        self._disk.remove_directory(directory)

    def _drop_directory(self, directory: str) -> None:
        """Remove a partition's directory with the files in it."""
        for name in self._disk.list_directory(directory):
            self._files.unlink(f"{directory}/{name}")
        self._drop_if_empty(directory)

    def _drop_if_empty(self, directory: str) -> None:
        """It is not if a group that waited for space has written the file again meanwhile: then the file goes in its
        turn."""
        try:
            if self._disk.exists(directory):
                self._disk.remove_directory(directory)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
