"""Files that go: segments below a log start, and the directories of deleted topics.

Theory of operation. The files that applied groups let go of are queued, in their order, and removed while everything
else goes on: nothing is written to such a file any more. A checkpoint waits for it: only the journal after it makes the
next start look for files that are left.

Invariants:
    * a removal is journaled and durable before it begins, so that a crash in between leaves files, never holes: the
      next start finds them below the log start, or under no topic, and removes them;
    * a segment is archived when its bytes are forced, under a name that nothing replaces;
    * a file that is removed early, to make room, is removed once more in its turn: a group that waited for room
      writes it again;
    * a file leaves the queue when it is removed: a failure for want of descriptors or space is tried again.

Thread safety: one thread queues, one carries out.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from txmq.log.file_cache import FileCache
from txmq.log.partition import Partition
from txmq.model import RetentionPolicy
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Disk


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
