"""The index over a history, and the broken promise: shared by the rules of ``history`` and ``decisions``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tools.checkers.events import History, Log, Operation, Row


class Finding(NamedTuple):
    """One broken promise."""

    rule: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule} {self.name}: {self.text}"


class LogPosition(NamedTuple):
    """An offset of a partition."""

    log: Log
    offset: int


class Index:
    """The maps that all rules share: the writer of a value, where it is at the end, where readers saw it."""

    def __init__(self, history: History, *, is_cluster: bool = False) -> None:
        self.history, self.is_cluster = history, is_cluster
        self.drain = history.drain or {}
        self.operations = list(history.operations.values())
        self.owner: dict[str, Operation] = {}
        self.row_owner: dict[Row, Operation] = {}
        for operation in self.operations:
            self.owner.update((send.value, operation) for send in operation.sends)
            self.row_owner.update((row, operation) for row in operation.rows)
        self.positions: dict[str, list[LogPosition]] = defaultdict(list)
        for log, drained in self.drain.items():
            for offset, value, _key in drained.messages:
                self.positions[value].append(LogPosition(log, offset))
        self.rows = {Row(resource, rowid) for resource, rows in (history.rows or {}).items() for rowid, _ in rows}
        self.seen: dict[str, tuple[LogPosition, int]] = {}  # the earliest poll that returned the value
        for poll in sorted(history.polls, key=lambda poll: poll.completed_ns):
            for offset, value in poll.messages:
                self.seen.setdefault(value, (LogPosition(poll.log, offset), poll.completed_ns))

    def has_expired(self, position: LogPosition) -> bool:
        """Whether retention has taken what was there."""
        drained = self.drain.get(position.log)
        return drained is not None and position.offset < drained.start

    def messages_there(self, operation: Operation) -> int:
        """How many of its messages are there, or were until retention took them."""
        return sum(
            send.value in self.positions
            or (
                send.partition is not None
                and self.has_expired(LogPosition((send.topic, send.partition), send.offset or 0))
            )
            for send in operation.sends
        )

    def rows_there(self, operation: Operation) -> int:
        """How many of its rows are there."""
        return sum(row in self.rows for row in operation.rows)

    def offsets_of(self, operation: Operation) -> dict[Log, list[int]]:
        """Places of its messages, by partition, in program order; of a duplicate the first place."""
        found: dict[Log, list[int]] = defaultdict(list)
        for send in operation.sends:
            if send.value in self.positions:
                position = self.positions[send.value][0]
                found[position.log].append(position.offset)
        return found


Rule = Callable[[Index], Iterator[Finding]]


def at(log: Log, offset: int) -> str:
    """The place as findings name it."""
    return f"{log[0]}/{log[1]}@{offset}"
