"""A search index of a table, kept by the table's change events.

    python examples/binlog_sync/search.py follow shop.shop.items items.db [BOOTSTRAP]
    python examples/binlog_sync/search.py find items.db brass lamp

The index is a file of SQLite (FTS5). It also holds the offset up to which each partition is in it, and both change in
one transaction. So a message that comes again is passed over, whatever was killed, and whichever process writes. The
group's offset in the broker says only where to begin reading: it is never ahead of the index. Delete the file and the
group, and the index is made anew.
"""

from __future__ import annotations

import argparse
import json
import signal
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import txmq
from txmq.binlog.event_json import read_event

BATCH = 500  # messages of one transaction
TABLES = """
CREATE TABLE IF NOT EXISTS places (part INTEGER PRIMARY KEY, next INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS items (id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, part INTEGER NOT NULL, row TEXT);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text);
"""


class SearchIndex:
    """The file. One table, one topic."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        self._connection.executescript(TABLES)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def take(self, messages: Sequence[txmq.Message]) -> None:
        """Bring the index past these messages, which are in order in each partition."""
        with self._transaction():
            for message in messages:
                ((known,),) = self._run("SELECT COALESCE(MAX(next), -1) FROM places WHERE part = ?", message.partition)
                if message.offset >= known:
                    self._apply(message)
                    self._run("INSERT OR REPLACE INTO places VALUES (?, ?)", message.partition, message.offset + 1)

    def find(self, words: Sequence[str]) -> list[str]:
        """The rows that have all the words, the best first."""
        query = " ".join('"' + word.replace('"', '""') + '"' for word in words)
        found = self._run(
            "SELECT row FROM words JOIN items ON items.id = words.rowid WHERE words MATCH ? ORDER BY rank, id", query
        )
        return [row for (row,) in found]

    def _apply(self, message: txmq.Message) -> None:
        event, key = read_event(message.value or b""), (message.key or b"").decode()
        if event.op in ("c", "u", "r", "d"):
            self._drop("key = ?", key)
        elif event.op == "t" or event.fields.get("kind") == "drop":
            self._drop("part = ?", message.partition)  # each partition has the statement, in order with its rows
        if event.after is not None:
            text = {name: value for name, value in event.after.items() if not isinstance(value, bytes)}
            self._run("INSERT INTO items (key, part, row) VALUES (?, ?, ?)", key, message.partition, json.dumps(text))
            words = " ".join(value for value in text.values() if isinstance(value, str))
            self._run("INSERT INTO words (rowid, text) VALUES (last_insert_rowid(), ?)", words)

    def _drop(self, which: str, value: object) -> None:
        self._run(f"DELETE FROM words WHERE rowid IN (SELECT id FROM items WHERE {which})", value)  # noqa: S608 - ours
        self._run(f"DELETE FROM items WHERE {which}", value)  # noqa: S608 - ours

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run("BEGIN IMMEDIATE")  # the offsets are looked at when no other process can write
        try:
            yield
        except BaseException:
            self._run("ROLLBACK")
            raise
        self._run("COMMIT")

    def _run(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters).fetchall()


def follow(topic: str, path: Path, bootstrap: str) -> None:
    """Keep the index until SIGTERM or Ctrl-C."""
    is_stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: is_stopped.append(number))
    with (
        closing(SearchIndex(path)) as index,
        txmq.connect(bootstrap) as client,
        client.consumer(f"search-{topic}", [topic], start="earliest") as consumer,
    ):
        while not is_stopped:
            messages = consumer.poll(max_records=BATCH, timeout=0.5)
            index.take(messages)
            for message in messages:
                message.ack()  # after the commit


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    following, finding = commands.add_parser("follow"), commands.add_parser("find")
    following.add_argument("topic")
    for each in (following, finding):
        each.add_argument("index", type=Path)
    following.add_argument("bootstrap", nargs="?", default="txmq://127.0.0.1:8123")
    finding.add_argument("words", nargs="+")
    given = parser.parse_args()
    if given.command == "follow":
        follow(given.topic, given.index, given.bootstrap)
        return
    with closing(SearchIndex(given.index)) as index:
        sys.stdout.writelines(f"{row}\n" for row in index.find(given.words))


if __name__ == "__main__":
    try:
        main()
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
