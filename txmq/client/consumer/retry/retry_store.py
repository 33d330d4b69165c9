"""The retry stores: contents of deferred messages, on local disk, or in the topic ``<group>.retry``.

The group's saved offset (``deferred``) decides which messages are deferred. A store keeps their contents, past
retention and restarts. What the offset does not name means nothing: the message comes again by itself, or was
acknowledged elsewhere.

Invariant: a message is acknowledged to the group only after its content is on disk, or in the broker's journal.
"""

# ruff: noqa: S608  statements are put together from constants; values are bound

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from txmq.client.consumer.retry.dead_letters import TopicProducer
from txmq.errors import OffsetOutOfRangeError, TooLargeError, UnknownTopicError
from txmq.model import Message, SendResult
from txmq.runtime.local_store import open_store, storage_errors
from txmq.runtime.threads import Future, Lock, blocking

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.producer.producer import Producer

SIZE_BYTES_MAX = 64 << 20
VERSION = 2
_SCHEMA = """
CREATE TABLE messages (
  group_name TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
  key BLOB, value BLOB, headers TEXT NOT NULL, tag TEXT, timestamp_ms INTEGER NOT NULL, txid TEXT,
  attempts INTEGER NOT NULL, reason TEXT NOT NULL, log TEXT NOT NULL, size_bytes INTEGER NOT NULL,
  PRIMARY KEY (group_name, topic, partition, offset));
"""
_COLUMNS = "group_name, topic, partition, offset, key, value, headers, tag, timestamp_ms, txid, attempts, reason, log"
_ONE = "WHERE group_name = ? AND topic = ? AND partition = ? AND offset = ?"
SUFFIX = ".retry"
RETENTION_MS = 30 * 24 * 3600 * 1000  # if the topic is created here; an operator may alter it
HEADER = "txmq.retry."


class Stored(NamedTuple):
    """One row; ``log``: which log the message is in."""

    group: str
    message: Message
    attempts: int
    reason: str
    log: str = ""


class RetryStore:
    """The store on local disk (``runtime/local_store.py``): a message is on disk when ``put`` returns.

    An operator may look at it.

    A row that the group does not name is stale. So is one of another log (``txmq.log.history``): it is of a message
    that is no longer there.

    Invariants:
        * all rows together hold at most ``size_bytes_max``; ``put`` refuses what would pass it;
        * consumers may share a file: rows are a group's, and a partition has one consumer of the group.

    Thread safety: any thread of the process that opened it.

    Raises:
        StorageError: from every method: the disk or SQLite refused.
    """

    def __init__(self, path: str | Path, *, size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self.path, self.size_bytes_max = Path(path), size_bytes_max
        self._lock = Lock()
        self._database = open_store(self.path, _SCHEMA, VERSION, "retry store")

    @blocking
    def put(self, rows: Sequence[Stored]) -> list[int | None] | None:
        """Keep messages, all or none; again, their newest numbers of attempts. None where the store is full.

        Durability: on disk when this returns.
        """
        with self._lock, storage_errors(self.path), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            for row in rows:
                self._database.execute(f"DELETE FROM messages {_ONE}", _place(row))
                self._database.execute(f"INSERT INTO messages VALUES ({', '.join('?' * 14)})", _row(row))
            held: int = self._database.execute("SELECT sum(size_bytes) FROM messages").fetchone()[0]
            if held > self.size_bytes_max:
                self._database.execute("ROLLBACK")
                return None
        return [None] * len(rows)

    @blocking
    def update(self, row: Stored) -> None:
        """Replace number of attempts and reason, as ``put``; a store that is full keeps the former ones."""
        self.put([row])

    @blocking
    def remove(self, group: str, topic: str, partition: int, offset: int) -> bool:
        """Forget a message; whether it was there."""
        with self._lock, storage_errors(self.path):
            cursor = self._database.execute(
                f"DELETE FROM messages {_ONE}",
                (group, topic, partition, offset),
            )
            return cursor.rowcount > 0

    @blocking
    def read(self, group: str | None = None) -> list[Stored]:
        """The rows of one group or of all, in order of topic, partition, offset."""
        where, arguments = ("", ()) if group is None else ("WHERE group_name = ?", (group,))
        with self._lock, storage_errors(self.path):
            rows = self._database.execute(
                f"SELECT {_COLUMNS} FROM messages {where} ORDER BY 1, 2, 3, 4",
                arguments,
            ).fetchall()
        return [_stored(row) for row in rows]

    @blocking
    def partition(self, group: str, topic: str, partition: int) -> dict[int, Stored]:
        """The rows of one partition, by offset."""
        with self._lock, storage_errors(self.path):
            rows = self._database.execute(
                f"SELECT {_COLUMNS} FROM messages WHERE group_name = ? AND topic = ? AND partition = ?",
                (group, topic, partition),
            ).fetchall()
        return {row[3]: _stored(row) for row in rows}

    @blocking
    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()


def _place(stored: Stored) -> tuple[str, str, int, int]:
    return stored.group, stored.message.topic, stored.message.partition, stored.message.offset


def _row(stored: Stored) -> tuple[object, ...]:
    message = stored.message
    headers = json.dumps({name: value.hex() for name, value in message.headers.items()})
    return (
        *_place(stored), message.key, message.value, headers, message.tag, message.timestamp_ms, message.txid,
        stored.attempts, stored.reason[:1000], stored.log, _size(message),
    )  # fmt: skip


def _size(message: Message) -> int:
    headers = sum(len(name) + len(value) for name, value in message.headers.items())
    return 200 + len(message.value or b"") + len(message.key or b"") + headers


def _stored(row: tuple[object, ...]) -> Stored:
    group, topic, partition, offset, key, value, headers, tag, timestamp_ms, txid, attempts, reason, log = row
    found = {name: bytes.fromhex(text) for name, text in json.loads(str(headers)).items()}
    message = Message(topic, partition, offset, key, value, found, tag, timestamp_ms, txid)  # type: ignore[arg-type]
    return Stored(str(group), message, int(str(attempts)), str(reason), str(log))


class RetryTopic:
    """``retry_store="topic"``: copies in the topic ``<group>.retry``, for containers without a disk.

    A copy has the message's key, value, headers and tag, and headers that say where it came from and how often it had
    failed. No consumer reads the topic: the group's saved offset names each copy. Contents are read from the message's
    own partition, and from the copy if retention has removed the message.

    Invariant: nothing is lost with the host; a process that dies between copy and saved offset leaves a copy without a
    name, and its message is delivered again from its own partition.

    Thread safety: any thread.
    """

    def __init__(self, client: Client, group: str, member: str) -> None:
        self._client, self.topic, self._member = client, group + SUFFIX, member
        self._producer = TopicProducer(client, self.topic, storage="disk", retention_ms=RETENTION_MS)

    def put(self, rows: Sequence[Stored]) -> list[int | None] | None:
        """Send copies; where in the topic each is, None for one that is too large: it is in the log alone.

        Raises:
            TxmqError: the broker refused, or cannot be reached.

        Durability: in the broker's journal when this returns.
        """
        futures = self._producer.run(lambda made: [self._sent(made, row) for row in rows])
        return [None if future is None else _offset(future) for future in futures]

    def _sent(self, producer: Producer, row: Stored) -> Future[SendResult] | None:
        message = row.message
        try:
            future = producer.send_async(
                self.topic, message.value or b"", key=message.key, tag=message.tag, partition=0,
                headers={**message.headers, **self._origin(row)},
            )  # fmt: skip
        except TooLargeError:
            return None
        return future

    def _origin(self, row: Stored) -> dict[str, bytes]:
        message = row.message
        fields = {
            "topic": message.topic, "partition": message.partition, "offset": message.offset,
            "timestamp": message.timestamp_ms, "txid": message.txid or "", "attempts": row.attempts,
            "reason": row.reason[:1000], "member": self._member, "null": int(message.value is None), "log": row.log,
        }  # fmt: skip
        return {HEADER + name: str(value).encode() for name, value in fields.items()}

    def read(self, topic: str, partition: int, offset: int, copy: int, log: str) -> Message | None:
        """The message that a copy is of; None where it is gone, or one of the topics is another one by now.

        Raises:
            TxmqError: the broker cannot be reached.
        """
        try:
            found = self._client.fetch(self.topic, 0, copy)
        except (OffsetOutOfRangeError, UnknownTopicError):
            return None
        message = original(found[0]) if found and found[0].headers.get(HEADER + "log") == log.encode() else None
        return message if message is not None and _message_place(message) == (topic, partition, offset) else None

    def update(self, row: Stored) -> None:
        """Do nothing: the group's saved offset has the number of failures."""

    def remove(self, group: str, topic: str, partition: int, offset: int) -> bool:
        """Do nothing: a copy that the group does not name goes with retention."""
        return False

    def partition(self, group: str, topic: str, partition: int) -> dict[int, Stored]:
        """Return nothing: contents are read one by one."""
        return {}

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()


def _offset(future: Future[SendResult]) -> int | None:
    try:
        return future.result().offset
    except TooLargeError:
        return None


def original(copy: Message) -> Message | None:
    """The message that a copy is of; None if it is not a copy."""
    fields = {name.removeprefix(HEADER): text for name, text in copy.headers.items() if name.startswith(HEADER)}
    try:
        place = fields["topic"].decode(), int(fields["partition"]), int(fields["offset"])
        timestamp_ms, txid = int(fields["timestamp"]), fields["txid"].decode() or None
        value = None if int(fields["null"]) else copy.value
    except (KeyError, ValueError):
        return None
    headers: Mapping[str, bytes] = {n: text for n, text in copy.headers.items() if not n.startswith(HEADER)}
    return Message(*place, copy.key, value, headers, copy.tag, timestamp_ms, txid)


def _message_place(message: Message) -> tuple[str, int, int]:
    return message.topic, message.partition, message.offset
