"""The retry store: contents of deferred messages, on local disk.

A local store (``runtime/local_store.py``): a message is on disk when ``put`` returns. The group's saved offset
(``deferred``) decides which messages are deferred. This file keeps their contents, past retention and restarts, and
lets an operator look at them. A row that the group does not name is stale: its message comes again by itself, or was
acknowledged elsewhere. So is one of another log (``txmq.log.history``): it is of a message that is no longer there.

Invariants:
    * a message is acknowledged to the group only after ``put`` returned;
    * all rows together hold at most ``size_bytes_max``; ``put`` refuses what would pass it;
    * consumers may share a file: rows are a group's, and a partition has one consumer of the group.
"""

# ruff: noqa: S608  statements are put together from constants; values are bound
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from txmq.model import Message
from txmq.runtime.local_store import open_store, storage_errors
from txmq.runtime.threads import Lock, blocking

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


class Stored(NamedTuple):
    """One row; ``log``: which log the message is in."""

    group: str
    message: Message
    attempts: int
    reason: str
    log: str = ""


class RetryStore:
    """See the module's docstring. Thread safety: any thread of the process that opened it.

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
