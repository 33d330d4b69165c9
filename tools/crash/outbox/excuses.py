"""What a restore takes away: a history without that, so that the rules hold for all the rest.

A database that is restored has no rows of the transactions since its backup, as no other program of its owner has. Of
their messages those stand in the topic that had been sent, unit by unit. A broker that is restored has no messages
since its backup; their rows stand in the database, and where they waited no more, they are lost with the broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tools.checkers.events import History, Log, Operation, Send
from tools.crash.outbox.directory import count_of_unit


class DatabaseRestored(NamedTuple):
    """At a time, before services went on.

    Attributes:
        rows: that it lost: the database had them, and the backup has not.
    """

    at_ns: int
    name: str
    rows: frozenset[str]


class BrokerRestored(NamedTuple):
    """At a time, before anybody came in.

    Attributes:
        copied_ns: when it had what it has now.
        values: messages that it has lost, and that wait nowhere.
        ends: of its partitions.
    """

    copied_ns: int
    at_ns: int
    values: frozenset[str]
    ends: Mapping[Log, int]


def excuse(history: History, restores: Iterable[DatabaseRestored | BrokerRestored]) -> None:
    """Take out of a history what these took away."""
    for restored in restores:
        if isinstance(restored, DatabaseRestored):
            _forget_rows(history, restored)
        else:
            _forget_messages(history, restored)


def _forget_rows(history: History, restored: DatabaseRestored) -> None:
    for operation in list(history.operations.values()):
        if operation.status == "fail":
            continue
        if any(row.resource == restored.name and row.rowid in restored.rows for row in operation.rows):
            del history.operations[operation.id]
            history.operations.update((unit.id, unit) for unit in _units(operation))


def _units(operation: Operation) -> Iterator[Operation]:
    """What is left of an operation without rows: units, each sent or not."""
    size = count_of_unit(operation.id)
    for first in range(0, len(operation.sends), size):
        yield Operation(
            f"{operation.id}/{first}", operation.process, "txn", operation.invoked_ns,
            operation.sends[first : first + size], [],
        )  # fmt: skip


def _forget_messages(history: History, restored: BrokerRestored) -> None:
    for operation in history.operations.values():
        operation.sends = _without(operation.sends, restored.values)
    history.polls = [
        poll._replace(messages=[one for one in poll.messages if one[0] < restored.ends[poll.log]])
        if restored.copied_ns < poll.completed_ns < restored.at_ns else poll
        for poll in history.polls
    ]  # fmt: skip


def _without(sends: Sequence[Send], values: frozenset[str]) -> list[Send]:
    return [send for send in sends if send.value not in values]
