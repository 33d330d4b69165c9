"""The reader of the campaign: ``python -m tests.crash.reader DIRECTORY ADDRESS NAME``.

It follows all partitions but the scrap's and writes what it saw to the history; of each message that has a row it looks
for the row, in a new transaction: a visible message implies readable rows.
"""

from __future__ import annotations

import signal
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path

import txmq
from tests.crash.processes import connect
from tests.crash.world import LAST_RESOURCE, PARTITIONS, RESOURCE, SCRAP, HistoryFile, World

REST_S = 0.02


class Reader:
    """Follows the log from its end at the start, as a newcomer would."""

    def __init__(self, world: World, client: txmq.Client, history: HistoryFile) -> None:
        self._world, self._client, self._history = world, client, history
        self._next: dict[tuple[str, int], int] = {}
        self._reads = 0

    def run(self, stop: threading.Event) -> None:
        """Rounds over all partitions, until ``stop``."""
        logs = [(topic, number) for topic, count in PARTITIONS.items() for number in range(count) if topic != SCRAP]
        while not stop.wait(REST_S):
            for topic, partition in logs:
                try:
                    self._poll(topic, partition)
                except txmq.TxmqError as error:  # the broker is away: a later poll goes on at the same offset
                    sys.stderr.write(f"{topic}/{partition}: {error!r}\n")
                    break

    def _poll(self, topic: str, partition: int) -> None:
        offset = self._next.get((topic, partition))
        if offset is None:
            offset = self._client.offsets(topic, partition).end
        messages = self._client.fetch(topic, partition, offset, timeout=0.0)
        self._next[topic, partition] = messages[-1].offset + 1 if messages else offset
        if messages:
            found = [(message.offset, text_of(message.value)) for message in messages]
            self._reads += 1
            self._history.write("poll", "ok", f"poll-{self._reads}", [["poll", topic, partition, found]])
            self._look_for_rows([value for _, value in found])

    def _look_for_rows(self, values: list[str]) -> None:
        rows = {value.rpartition(".")[0] for value in values if value.rpartition(".")[0].endswith(LAST_RESOURCE)}
        if not rows:
            return
        read = f"{self._history.process}-read-{self._reads}"
        self._history.write("dbread", "invoke", read, [])
        with closing(sqlite3.connect(self._world.database, timeout=10.0)) as connection:
            found = [["read", RESOURCE, row, self._is_there(connection, row)] for row in sorted(rows)]
        self._history.write("dbread", "ok", read, found)

    @staticmethod
    def _is_there(connection: sqlite3.Connection, row: str) -> bool:
        return connection.execute("SELECT 1 FROM orders WHERE rowid_text = ?", (row,)).fetchone() is not None


def text_of(value: bytes | None) -> str:
    """A message's value without its padding."""
    return (value or b"").decode().rstrip(" ")


def main(directory: str, address: str, name: str) -> None:
    """Read until SIGTERM."""
    world, stop = World(Path(directory)), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with connect(address, name) as client:
        Reader(world, client, HistoryFile(world.histories, name)).run(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
