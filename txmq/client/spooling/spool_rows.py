"""The rows of a spool: their values, and the SQL that makes and reads them (``spool``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from txmq.errors import TxmqError
from txmq.model import ParkedMessage, TopicPartition

VERSION = 4
EPOCH_MAX = 0x7FFF  # the broker's limit
SCHEMA = """
CREATE TABLE batches (
  number INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, partition INTEGER NOT NULL, content BLOB NOT NULL,
  created_ms INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '',
  parked INTEGER NOT NULL DEFAULT 0, cluster TEXT, home TEXT, session TEXT, epoch INTEGER, sequence INTEGER,
  floor INTEGER, messages INTEGER NOT NULL DEFAULT 1, topic_id INTEGER NOT NULL DEFAULT 0);
CREATE INDEX waiting ON batches (topic, partition, number) WHERE NOT parked;
CREATE TABLE topics (name TEXT PRIMARY KEY, partitions INTEGER NOT NULL, topic_id INTEGER NOT NULL DEFAULT 0)
  WITHOUT ROWID;
CREATE TABLE sessions (cluster TEXT, home TEXT, session TEXT, epoch INTEGER, secret TEXT NOT NULL DEFAULT '',
  held_epoch INTEGER NOT NULL DEFAULT 0, is_over INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (cluster, home, session, epoch)) WITHOUT ROWID;
"""
FORGET_UNNAMED = """
DELETE FROM sessions WHERE is_over AND NOT EXISTS (SELECT 1 FROM batches AS b WHERE b.cluster = sessions.cluster
  AND b.home = sessions.home AND b.session = sessions.session AND b.epoch = sessions.epoch);
"""
_OF_SESSION = " WHERE cluster = ? AND home = ? AND session = ? AND epoch = ?"
REMEMBER_TOPIC = "INSERT OR REPLACE INTO topics (name, partitions, topic_id) VALUES (?, ?, ?)"
RAISE_EPOCH = "UPDATE sessions SET held_epoch = min(held_epoch + 1, ?)" + _OF_SESSION  # noqa: S608  constants
HELD = "SELECT secret, held_epoch FROM sessions" + _OF_SESSION  # noqa: S608
OF_SESSION = "SELECT EXISTS (SELECT 1 FROM batches" + _OF_SESSION + ")"  # noqa: S608
END_SESSION = "UPDATE sessions SET is_over = 1" + _OF_SESSION  # noqa: S608
COLUMNS = (
    "number, topic, partition, content, created_ms, attempts, reason, parked, messages,"
    " cluster, home, session, epoch, sequence, floor, topic_id"
)
INSERT = (
    "INSERT INTO batches (topic, partition, content, created_ms, messages, topic_id, cluster, home, session, epoch,"
    " sequence, floor) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_UNASSIGNED = "cluster = NULL, home = NULL, session = NULL, epoch = NULL, sequence = NULL, floor = NULL"
UNASSIGN = "UPDATE batches SET " + _UNASSIGNED + " WHERE number = ?"  # noqa: S608  constants
UNPARK = "UPDATE batches SET parked = 0, attempts = 0, topic_id = 0, " + _UNASSIGNED + " WHERE parked"  # noqa: S608
UNASSIGN_BEHIND = (
    "UPDATE batches SET " + _UNASSIGNED + " WHERE topic = ? AND partition = ? AND NOT parked AND number > ?"  # noqa: S608
    " AND cluster = ? AND home = ? AND session = ? AND epoch = ?"
)
_OF_TOPIC = " WHERE topic = ? AND partition = ? AND topic_id = ? AND NOT parked"
COUNT_OF_TOPIC = "SELECT coalesce(sum(messages), 0) FROM batches" + _OF_TOPIC  # noqa: S608
PARK_TOPIC = "UPDATE batches SET parked = 1, reason = ?" + _OF_TOPIC  # noqa: S608
Change = tuple[TopicPartition, int, int]  # partition, more messages, more bytes


@dataclass(frozen=True, slots=True)
class SpoolIdentity:
    """A session of one broker; sequences count within it."""

    cluster: int
    home: int
    session: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Held:
    """The means to resume a session.

    Attributes:
        secret: empty if none was noted: the session cannot be resumed.
        epoch: under which this process is bound to it.
    """

    secret: str = field(repr=False)
    epoch: int


@dataclass(frozen=True, slots=True)
class AssignedSequence:
    """The sequence with which a batch is sent, however often it is sent.

    Attributes:
        floor: an offset that the partition had reached before the batch was first sent.
    """

    identity: SpoolIdentity
    sequence: int
    offset_at_least: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: a batch that waits or is parked.

    Attributes:
        topic_id: of the topic that its partition was chosen for; 0 for any of that name.
    """

    number: int
    topic: str
    partition: int
    content: bytes
    created_ms: int
    attempts: int
    reason: str
    is_parked: bool
    messages: int
    topic_id: int
    assigned: AssignedSequence | None

    def as_parked(self) -> ParkedMessage:
        """The row as a producer shows it."""
        return ParkedMessage(
            self.topic, self.partition, self.content, self.messages, self.created_ms, self.attempts, self.reason
        )


class Ticket:
    """A batch that waits to be appended.

    Attributes:
        number: of its row, once it is written.
        error: why it was not written.
    """

    __slots__ = (
        "assigned", "content", "created_ms", "error", "is_done", "messages", "number", "partition", "topic_id",
    )  # fmt: skip

    def __init__(
        self, partition: TopicPartition, content: bytes, created_ms: int, assigned: AssignedSequence | None,
        messages: int, topic_id: int,
    ) -> None:  # fmt: skip
        self.partition, self.content, self.created_ms = partition, content, created_ms
        self.assigned, self.messages, self.topic_id = assigned, messages, topic_id
        self.number, self.is_done = 0, False
        self.error: TxmqError | None = None

    def row(self) -> tuple[object, ...]:
        """The values of ``INSERT``."""
        stated = (*self.partition, self.content, self.created_ms, self.messages, self.topic_id)
        return *stated, *sequence_row(self.assigned)


def identity_row(identity: SpoolIdentity) -> tuple[str, str, str, int]:
    """The columns of an identity."""
    return f"{identity.cluster:x}", f"{identity.home:x}", f"{identity.session:x}", identity.epoch


def sequence_row(assigned: AssignedSequence | None) -> tuple[object, ...]:
    """The columns of an assigned sequence."""
    return (
        (None,) * 6
        if assigned is None
        else (*identity_row(assigned.identity), assigned.sequence, assigned.offset_at_least)
    )


def entry_of(row: tuple) -> Entry:  # type: ignore[type-arg]
    """An entry from the columns ``COLUMNS``."""
    number, topic, partition, content, created_ms, attempts, reason, parked, messages, *columns, topic_id = row
    assigned = None
    if columns[0] is not None:
        cluster, home, session, epoch, sequence, offset_at_least = columns
        identity = SpoolIdentity(int(cluster, 16), int(home, 16), int(session, 16), epoch)
        assigned = AssignedSequence(identity, sequence, offset_at_least)
    return Entry(
        number, topic, partition, content, created_ms, attempts, reason, bool(parked), messages, topic_id, assigned
    )
