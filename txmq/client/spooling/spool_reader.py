"""What a spool's file holds, as its owner and other processes read it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from txmq.client.producer.batches import MeantTopic
from txmq.client.spooling.spool_rows import Entry, SpoolIdentity, entry_of
from txmq.errors import StorageError
from txmq.model import TopicPartition
from txmq.runtime.threads import Lock, blocking


class SpoolReader:
    """The reading half of ``spool.Spool``, which opens the file. Thread safety: any thread.

    Raises:
        StorageError: the disk or SQLite refused.
    """

    path: Path
    _database: sqlite3.Connection
    _lock: Lock
    _columns: str

    @blocking
    def head(self, partition: TopicPartition, limit: int, size_bytes_max: int = 1 << 30) -> list[Entry]:
        """The first batches of a partition that wait: up to ``size_bytes_max`` together, and at least one."""
        front = "WHERE topic = ? AND partition = ? AND NOT parked ORDER BY number LIMIT ?"
        sizes = self._rows(f"SELECT length(content) FROM batches {front}", (*partition, limit))  # noqa: S608  a constant
        count = sum(1 for total in accumulate(size for (size,) in sizes) if total <= size_bytes_max)
        return self._read(front, (*partition, max(count, min(1, limit))))

    @blocking
    def parked(self, limit: int = 1000) -> list[Entry]:
        """Batches that are parked."""
        return self._read("WHERE parked ORDER BY number LIMIT ?", (limit,))

    @blocking
    def entries(self, limit: int = 1000) -> list[Entry]:
        """All batches, in order of arrival."""
        return self._read("ORDER BY number LIMIT ?", (limit,))

    @blocking
    def summary(self) -> list[tuple[str, int, int, int, int, int]]:
        """For each partition: topic, partition, messages waiting, parked, bytes, time of the oldest in ms."""
        return self._rows(
            "SELECT topic, partition, sum(messages * NOT parked), sum(messages * parked), sum(length(content)),"
            " min(created_ms) FROM batches GROUP BY topic, partition ORDER BY topic, partition", (),
        )  # fmt: skip

    @blocking
    def topics(self) -> dict[str, MeantTopic]:
        """Topics by name."""
        rows = self._rows("SELECT name, topic_id, partitions FROM topics", ())
        return {name: MeantTopic(topic_id, partitions) for name, topic_id, partitions in rows}

    @blocking
    def sessions(self) -> list[SpoolIdentity]:
        """Sessions whose batches may still be on their way."""
        rows = self._rows("SELECT cluster, home, session, epoch FROM sessions WHERE NOT is_over", ())
        return [
            SpoolIdentity(int(cluster, 16), int(home, 16), int(session, 16), epoch)
            for cluster, home, session, epoch in rows
        ]

    def _read(self, condition: str, values: Sequence[object]) -> list[Entry]:
        # The text is a constant; what comes from outside are values.
        return [entry_of(row) for row in self._rows(f"SELECT {self._columns} FROM batches {condition}", values)]  # noqa: S608

    def _rows(self, query: str, values: Sequence[object]) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock:
            try:
                return self._database.execute(query, tuple(values)).fetchall()
            except sqlite3.Error as error:
                raise StorageError(f"{self.path}: {error}") from error
