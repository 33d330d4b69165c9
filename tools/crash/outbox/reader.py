"""The reader of the outbox campaign: ``python -m tools.crash.outbox.reader DIRECTORY ADDRESS NAME``.

Of each message that it sees it looks for the row. Of each unit that it sees in part, the rest must be there when every
partition has been read once more: what it lacks then is told.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import txmq
from tools.crash.directory import HistoryFile
from tools.crash.outbox.directory import OutboxCampaignDirectory, count_of_unit, database_of, operation_of
from tools.crash.reader import Follower, follow

# In the first it begins at the partitions' ends, one after another: at different sides of a page, of which it sees no
# more than a part, with the second at the latest. What it saw of in these is not judged.
_FIRST_ROUNDS: Final = 2


class OutboxReader(Follower):
    """Follows the log; a database that is away is asked again later, about what was seen meanwhile."""

    world: OutboxCampaignDirectory

    def __init__(self, world: OutboxCampaignDirectory, client: txmq.Client, history: HistoryFile) -> None:
        super().__init__(world, client, history)
        self._places = world.places
        self._due: dict[str, set[str]] = {name: set() for name in self._places}
        self._in_part: dict[str, set[str]] = defaultdict(set)
        self._rounds = 0
        self._seen_first: set[str] = set()

    def look(self, topics: Sequence[str]) -> bool:
        before = set(self._in_part)
        if not super().look(topics):
            return False
        if self._rounds < _FIRST_ROUNDS:
            self._rounds += 1
        for operation in before & self._in_part.keys():
            found = self._in_part.pop(operation)
            self.history.write("unit", "ok", operation, [sorted(found), count_of_unit(operation)])
        self._look_for_due()
        return True

    def poll(self, topic: str, partition: int) -> bool:
        while super().poll(topic, partition):
            pass
        return False

    def look_for_rows(self, values: list[str]) -> None:
        for value in values:
            operation = operation_of(value)
            if (name := database_of(operation)) in self._due:
                self._due[name].add(f"{operation}/0")
            if self._rounds < _FIRST_ROUNDS:
                self._seen_first.add(operation)
            elif count_of_unit(operation) > 1 and operation not in self._seen_first:
                self._note_part(operation, value)

    def _note_part(self, operation: str, value: str) -> None:
        found = self._in_part[operation]
        found.add(value)
        if len(found) == count_of_unit(operation):
            del self._in_part[operation]

    def _look_for_due(self) -> None:
        for name, place in self._places.items():
            due = sorted(self._due[name])
            if not due:
                continue
            self.reads += 1
            read = f"{self.history.process}-read-{self.reads}"
            self.history.write("dbread", "invoke", read, [])
            marks = ", ".join("?" * len(due))
            try:
                rows = place.ask(f"SELECT rowid_text FROM orders WHERE rowid_text IN ({marks})", due)
            except place.error as error:
                sys.stderr.write(f"{read}: {error!r}\n")
                self.history.write("dbread", "ok", read, [])
                continue
            there = {str(row) for (row,) in rows}
            self._due[name].clear()
            self.history.write("dbread", "ok", read, [["read", name, row, row in there] for row in due])


if __name__ == "__main__":
    follow(OutboxReader, OutboxCampaignDirectory(Path(sys.argv[1])), *sys.argv[2:])
