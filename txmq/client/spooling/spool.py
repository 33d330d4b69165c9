"""The spool: batches on local disk that wait for their partition, in order, with the sequences they were sent with.

A directory with a local store (``runtime/local_store.py``): a batch is on disk when ``append`` returns. One row is one
encoded batch, kept as it was encoded. Its *assigned sequence* (session, epoch, sequence) is in columns of its own, so
that the same row always gives the same bytes, by which the broker recognises a duplicate. A row without one was
certainly never stored. A sequence is assigned before the batch is sent.

Appending is in two steps, so that many threads share one synced transaction. ``enqueue`` reserves the place in the
order, without I/O. ``wait_synced`` waits for the row: the thread that finds the file free writes for all that wait. So
a thread waits for the transaction under way and for its own, however many threads there are. What touches the file is
``blocking``: strands have a thread do it.

Invariants:
    * Rows of a partition come out in the order in which they went in; parked ones stand aside.
    * One process owns a spool (lock file); others may read it meanwhile.
    * All rows together hold at most ``size_bytes_max``, plus those that may be stored, at most a drain for each
      partition.
    * Counts in memory are those of the file and of what is enqueued. After a write that was cut short they are read
      from the file again.
    * A commit whose sync failed is never repeated: the spool refuses to go on until it is opened anew.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from types import TracebackType
from typing import Self

from txmq.client.producer.core import TopicRef
from txmq.errors import SpoolFullError, StorageError, TxmqError
from txmq.model import ParkedMessage, TopicPartition
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.local_store import open_store, storage_errors
from txmq.runtime.os_disk import OSDisk, OSLock
from txmq.runtime.threads import Lock, blocking

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
SIZE_BYTES_MAX = 1 << 30
FILE_NAME, LOCK_NAME = "spool.sqlite", "lock"
GROUP_MAX = 500  # appends that share one transaction


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


class Spool:
    """Batches on disk; see the module's docstring. Thread safety: any thread of the process that opened it.

    Raises:
        DirectoryInUseError: another process owns it.
        StorageError: the disk or SQLite refused.
    """

    parks_refused = True  # after too many refusals; otherwise a batch stays, and those after it wait

    def __init__(
        self, path: str | Path, *, size_bytes_max: int = SIZE_BYTES_MAX, read_only: bool = False, name: str = FILE_NAME
    ) -> None:
        self.path = Path(path)
        self.size_bytes_max = size_bytes_max
        self._lock = Lock()
        self._counts: dict[TopicPartition, int] = {}
        self._size_bytes = 0
        self._queue_lock = Lock()  # held for a moment
        self._queue: deque[Ticket] = deque()
        self._queued: dict[TopicPartition, int] = {}
        self._failure: str | None = None
        self._disk: OSDisk | None = None
        self._owner: OSLock | None = None
        with ExitStack() as undo:
            undo.callback(self._release)
            if not read_only:
                self._disk = OSDisk(self.path)
                self._owner = self._disk.lock(LOCK_NAME)
            elif not (self.path / name).is_file():
                raise StorageError(f"{self.path} holds no spool")
            self._database = open_store(self.path / name, SCHEMA, VERSION, "spool", read_only=read_only)
            undo.callback(self._database.close)
            if not read_only:
                with storage_errors(self.path):
                    self._database.execute(FORGET_UNNAMED)
            self._recount()
            undo.pop_all()

    # --- writing -----------------------------------------------------------------------------------------------------

    def enqueue(
        self, partition: TopicPartition, content: bytes, now_ms: int, assigned: AssignedSequence | None = None,
        messages: int = 1, topic_id: int = 0,
    ) -> Ticket:  # fmt: skip
        """Queue a batch after all others of its partition, without I/O; ``wait_synced`` waits for it."""
        ticket = Ticket(partition, content, now_ms, assigned, messages, topic_id)
        with self._queue_lock:
            self._queued[partition] = self._queued.get(partition, 0) + messages
            self._queue.append(ticket)
        return ticket

    @blocking
    def wait_synced(self, ticket: Ticket) -> int:
        """Wait until a batch is written; returns its number. The thread that finds the file free writes for all.

        A batch with a sequence finds room even in a full spool: it may be stored, so no caller could get a result.

        Raises:
            SpoolFullError: it was not written.
            StorageError: it was not written, or whether it was is not known; the text says which.
        """
        while not ticket.is_done:
            with self._lock:
                if not ticket.is_done:
                    self._write_queue()
        if ticket.error is not None:
            raise type(ticket.error)(*ticket.error.args)
        crash_point("client.ordered.spooled")
        return ticket.number

    @blocking
    def sync_all(self) -> None:
        """Write what was enqueued and no thread waits for, as after an interrupt."""
        while self._queue:
            with self._lock:
                self._write_queue()

    def append(
        self, partition: TopicPartition, content: bytes, now_ms: int, assigned: AssignedSequence | None = None
    ) -> int:
        """Add a batch after all others of its partition; returns its number. Raises as ``wait_synced``."""
        return self.wait_synced(self.enqueue(partition, content, now_ms, assigned))

    def _write_queue(self) -> None:
        """Write the front of the queue in one transaction; the caller holds the lock."""
        tickets = list(islice(self._queue, GROUP_MAX))
        if not tickets:
            return
        try:
            with self._transaction() as changes:
                for ticket in tickets:
                    self._insert(ticket, changes)
        except StorageError as error:
            for ticket in tickets:
                ticket.error = error
        except BaseException:  # interrupted before or after the commit
            if not self._holds(tickets):
                raise
            self._leave_queue(tickets)
            raise
        self._leave_queue(tickets)

    def _insert(self, ticket: Ticket, changes: list[Change]) -> None:
        size = self._size_bytes + sum(change[2] for change in changes) + len(ticket.content)
        if ticket.assigned is None and size > self.size_bytes_max:
            ticket.error = self._full(size - len(ticket.content), len(ticket.content))
            return
        ticket.error, ticket.number = None, int(self._database.execute(INSERT, ticket.row()).lastrowid or 0)
        changes.append((ticket.partition, ticket.messages, len(ticket.content)))

    def _full(self, size: int, more: int) -> SpoolFullError:
        return SpoolFullError(
            f"{self.path} holds {size} bytes and cannot take {more} more (spool_size_bytes_max {self.size_bytes_max}): "
            "nothing was stored; it empties when its partitions can be written"
        )

    def _holds(self, tickets: Sequence[Ticket]) -> bool:
        """Whether a transaction that was cut short is in the file: all of it or nothing."""
        written = [ticket.number for ticket in tickets if ticket.error is None and ticket.number]
        query = "SELECT 1 FROM batches WHERE number = ?"
        return bool(written) and self._database.execute(query, (written[-1],)).fetchone() is not None

    def _leave_queue(self, tickets: Sequence[Ticket]) -> None:
        """The file counts them from here on."""
        with self._queue_lock:
            for ticket in tickets:
                self._queue.popleft()
                left = self._queued[ticket.partition] - ticket.messages
                self._queued[ticket.partition] = left
                if not left:
                    del self._queued[ticket.partition]
                ticket.is_done = True

    @blocking
    def assign(self, sequences: Sequence[tuple[Entry, AssignedSequence]]) -> None:
        """Note the sequences with which batches are about to be sent."""
        with self._writing():
            self._database.executemany(
                "UPDATE batches SET cluster = ?, home = ?, session = ?, epoch = ?, sequence = ?, floor = ?"
                " WHERE number = ?",
                [(*sequence_row(assigned), entry.number) for entry, assigned in sequences],
            )

    @blocking
    def unassign(self, numbers: Iterable[int]) -> None:
        """Drop the sequences of these rows: they are certainly not stored under them and never will be."""
        with self._writing():
            self._database.executemany(UNASSIGN, [(number,) for number in numbers])

    @blocking
    def done(self, entries: Sequence[Entry]) -> None:
        """Delete batches that the broker has stored."""
        with self._writing() as changes:
            self._database.executemany("DELETE FROM batches WHERE number = ?", [(entry.number,) for entry in entries])
            changes.extend(((entry.topic, entry.partition), -entry.messages, -len(entry.content)) for entry in entries)

    @blocking
    def failed(self, entry: Entry, reason: str) -> None:
        """Count one more refusal of a batch."""
        with self._writing():
            self._database.execute(
                "UPDATE batches SET attempts = attempts + 1, reason = ? WHERE number = ?", (reason, entry.number)
            )

    @blocking
    def park(self, entry: Entry, reason: str, *, renumber: bool) -> None:
        """Park a batch; with ``renumber``, batches after it in its session lose their sequences."""
        with self._writing() as changes:
            changes.append(((entry.topic, entry.partition), -entry.messages, 0))
            if renumber and entry.assigned is not None:
                self._database.execute(
                    UNASSIGN_BEHIND,
                    (entry.topic, entry.partition, entry.number, *sequence_row(entry.assigned)[:4]),
                )
            self._database.execute("UPDATE batches SET parked = 1, reason = ? WHERE number = ?", (reason, entry.number))

    @blocking
    def park_topic(self, entry: Entry, reason: str) -> None:
        """Park the batches of its partition that are meant for the same topic, which is gone."""
        with self._writing() as changes:
            partition = (entry.topic, entry.partition)
            rows = (*partition, entry.topic_id)
            count = self._database.execute(COUNT_OF_TOPIC, rows).fetchone()[0]
            self._database.execute(PARK_TOPIC, (reason, *rows))
            changes.append((partition, -count, 0))

    @blocking
    def unpark(self) -> int:
        """Try parked messages again, at any topic of their topic's name; returns how many.

        A message that may be stored may then be stored twice.
        """
        counts = [((topic, partition), count) for topic, partition, _, count, *_ in self.summary() if count]
        with self._writing() as changes:
            self._database.execute(UNPARK)
            changes.extend((partition, count, 0) for partition, count in counts)
        return sum(count for _, count in counts)

    @blocking
    def remember_topic(self, name: str, topic: TopicRef) -> None:
        """Note a topic's id and how many partitions it has, for times when the broker is away."""
        with self._writing():
            values = (name, topic.partitions, topic.topic_id)
            self._database.execute(REMEMBER_TOPIC, values)

    @blocking
    def remember_session(self, identity: SpoolIdentity, secret: str) -> None:
        """Note a session and its secret, before the first batch is sent in it."""
        with self._writing():
            values = (*identity_row(identity), secret, identity.epoch)
            self._database.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, ?, 0)", values)

    @blocking
    def take_session(self, identity: SpoolIdentity) -> Held:
        """Take over a session of a former process: the higher epoch is on disk before the broker gets it."""
        with self._writing():
            self._database.execute(RAISE_EPOCH, (EPOCH_MAX, *identity_row(identity)))
            row = self._database.execute(HELD, identity_row(identity)).fetchone()
        return Held("", 0) if row is None else Held(*row)

    @blocking
    def needs_session(self, identity: SpoolIdentity) -> bool:
        """Whether a row has a sequence of it."""
        with self._lock:
            return bool(self._database.execute(OF_SESSION, identity_row(identity)).fetchone()[0])

    @blocking
    def forget_session(self, identity: SpoolIdentity) -> None:
        """Nothing of a session can be on its way any more. Its secret stays while a row has a sequence of it."""
        with self._writing():
            self._database.execute(END_SESSION, identity_row(identity))

    @contextmanager
    def _writing(self) -> Iterator[list[Change]]:
        with self._lock, self._transaction() as changes:
            yield changes

    @contextmanager
    def _transaction(self) -> Iterator[list[Change]]:
        """Synced when the block ends; then counts in memory change by what it listed. The caller holds the lock."""
        if self._failure is not None:
            raise StorageError(self._failure)
        changes: list[Change] = []
        try:
            self._database.execute("BEGIN IMMEDIATE")
            yield changes
            self._commit()
            for partition, count, size in changes:
                self._add(partition, count, size)
        except BaseException as error:
            self._roll_back()
            self._recount()
            if isinstance(error, sqlite3.Error):
                raise StorageError(f"{self.path}: {error}; nothing was written") from error
            raise

    def _commit(self) -> None:
        try:
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise  # the last page did not fit, so nothing was committed
            # A failed sync is not repeated: the kernel reports it once, and drops what it could not write.
            self._failure = f"{self.path}: {error}: what the disk holds is not known until the spool is opened anew"
            raise StorageError(self._failure) from error

    def _add(self, partition: TopicPartition, count: int, size: int) -> None:
        self._size_bytes += size
        self._counts[partition] = self._counts.get(partition, 0) + count
        if not self._counts[partition]:
            del self._counts[partition]

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def _recount(self) -> None:
        try:
            rows = self._database.execute(
                "SELECT topic, partition, sum(messages) FROM batches WHERE NOT parked GROUP BY topic, partition"
            ).fetchall()
            size = self._database.execute("SELECT coalesce(sum(length(content)), 0) FROM batches").fetchone()[0]
        except sqlite3.Error as error:
            self._failure = f"{self.path}: {error}"
            raise StorageError(self._failure) from error
        self._counts, self._size_bytes = {(topic, partition): count for topic, partition, count in rows}, size

    # --- reading -----------------------------------------------------------------------------------------------------

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
    def topics(self) -> dict[str, TopicRef]:
        """Topics by name."""
        rows = self._rows("SELECT name, topic_id, partitions FROM topics", ())
        return {name: TopicRef(topic_id, partitions) for name, topic_id, partitions in rows}

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
        return [entry_of(row) for row in self._rows(f"SELECT {COLUMNS} FROM batches {condition}", values)]  # noqa: S608

    def _rows(self, query: str, values: Sequence[object]) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock, storage_errors(self.path):
            return self._database.execute(query, tuple(values)).fetchall()

    def count(self, partition: TopicPartition) -> int:
        """How many messages of a partition wait."""
        # The queue first: the file counts a batch before it leaves the queue.
        return self._queued.get(partition, 0) + self._counts.get(partition, 0)

    @property
    def waiting(self) -> dict[TopicPartition, int]:
        """How many messages wait, for each partition that has any."""
        return {partition: self.count(partition) for partition in (*self._queued.copy(), *self._counts.copy())}

    @property
    def size_bytes(self) -> int:
        """The size of all batches, parked ones included."""
        return self._size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- ends --------------------------------------------------------------------------------------------------------

    @blocking
    def close(self) -> None:
        """Close the file; what is in it stays."""
        with suppress(StorageError):  # the threads that wait get it
            self.sync_all()
        with self._lock:
            self._database.close()
            self._release()

    def abandon(self) -> None:
        """In a forked child: release the lock file, which is the parent's, and leave the database alone."""
        self._release()

    def _release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.release()
        if self._disk is not None:
            self._disk.close()
