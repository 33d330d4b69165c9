"""The reader of the campaign: ``python -m tools.crash.reader DIRECTORY ADDRESS NAME``.

It follows all partitions but the scrap's and writes what it saw to the history; of each message that has a row it looks
for the row, in a new transaction: a visible message implies readable rows.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import txmq
from tools.crash.directory import LAST_RESOURCE, RESOURCE, SCRAP, CampaignDirectory, HistoryFile
from tools.crash.processes import connect
from txmq.runtime.threads import until_terminated

REST_S = 0.02


class Follower:
    """Follows the log from its end at the start, as a newcomer would."""

    def __init__(self, world: CampaignDirectory, client: txmq.Client, history: HistoryFile) -> None:
        self.world, self._client, self.history = world, client, history
        self._next: dict[tuple[str, int], int] = {}
        self.reads = 0

    def run(self, stop: threading.Event) -> None:
        """Rounds over all partitions, until ``stop``."""
        topics = [topic for topic in self.world.partitions if topic != SCRAP]
        while not stop.wait(REST_S):
            self.look(topics)

    def look(self, topics: Sequence[str]) -> bool:
        """A round; whether every partition was read."""
        for topic in topics:
            try:
                for partition in range(self._client.topics.known(topic).config.partitions):
                    self.poll(topic, partition)
            except txmq.TxmqError as error:  # the broker is away: a later poll goes on at the same offset
                sys.stderr.write(f"{topic}: {error!r}\n")
                return False
        return True

    def poll(self, topic: str, partition: int) -> bool:
        """Read a partition; whether there was anything."""
        offset = self._next.get((topic, partition))
        if offset is None:
            offset = self._client.offsets(topic, partition).end
        messages = self._client.fetch(topic, partition, offset, timeout=0.0)
        self._next[topic, partition] = messages[-1].offset + 1 if messages else offset
        if messages:
            found = [(message.offset, text_of(message.value)) for message in messages]
            self.reads += 1
            self.history.write("poll", "ok", f"poll-{self.reads}", [["poll", topic, partition, found]])
            self.look_for_rows([value for _, value in found])
        return bool(messages)

    def look_for_rows(self, values: list[str]) -> None:
        """These messages were seen: are their rows readable?"""
        raise NotImplementedError


class Reader(Follower):
    """Of the campaign with one SQLite file."""

    def look_for_rows(self, values: list[str]) -> None:
        rows = {value.rpartition(".")[0] for value in values if value.rpartition(".")[0].endswith(LAST_RESOURCE)}
        if not rows:
            return
        read = f"{self.history.process}-read-{self.reads}"
        self.history.write("dbread", "invoke", read, [])
        with closing(sqlite3.connect(self.world.database, timeout=10.0)) as connection:
            found = [["read", RESOURCE, row, self._is_there(connection, row)] for row in sorted(rows)]
        self.history.write("dbread", "ok", read, found)

    @staticmethod
    def _is_there(connection: sqlite3.Connection, row: str) -> bool:
        return connection.execute("SELECT 1 FROM orders WHERE rowid_text = ?", (row,)).fetchone() is not None


def text_of(value: bytes | None) -> str:
    """A message's value without its padding."""
    return (value or b"").decode().rstrip(" ")


def follow(reader: type[Follower], world: CampaignDirectory, address: str, name: str) -> None:
    """Read until SIGTERM."""
    stop = threading.Event()
    with until_terminated(stop.set), connect(address, name) as client:
        reader(world, client, HistoryFile(world.histories, name)).run(stop)


if __name__ == "__main__":
    follow(Reader, CampaignDirectory(Path(sys.argv[1])), *sys.argv[2:])
