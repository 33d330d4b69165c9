"""A cache of a table's rows in every process, kept by the table's change events.

    python examples/binlog_sync/cache.py shop.shop.items '{"host": "db", "user": "shop", "passwd": "...", "db": "shop"}'

Reads ids from standard input, and prints name and price of each item: from the cache, or from the database. Whatever
program changes the row, each process that runs this knows the new one when the message comes.

What makes it right:
    * the change's row goes into the cache, a deleted one as None. To forget the row would not do: a change is in the
      binlog a moment before a SELECT sees it, and the old row could be read and kept again;
    * what was read is kept only if no change came meanwhile, and all partitions were listened to;
    * a message that comes again is passed over by its offset: the row before would replace the later one;
    * the cache is empty at a start, and listens from then on.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import MySQLdb

import txmq
from txmq.binlog.event_json import read_event

ITEMS_MAX = 10_000
Item = tuple[str, str] | None  # name and price; None: there is no such row


class ItemCache:
    """Items by id."""

    def __init__(self, client: txmq.Client, topic: str, database: Mapping[str, Any]) -> None:
        self._database = database
        self._partitions = client.topics.describe(topic).partitions
        self._items: OrderedDict[str, Item] = OrderedDict()
        self._next: dict[int, int] = {}
        self._changes = self.hits = 0
        self._lock = threading.Lock()
        self._consumer = client.consumer("item-caches", [topic], broadcast=True)
        threading.Thread(target=lambda: self._consumer.run(self._changed), daemon=True).start()

    def get(self, id_: int) -> Item:
        """An item."""
        key = f"[{id_}]"  # as the messages have it: the JSON array of the primary key's values
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                self.hits += 1
                return self._items[key]
            changes = self._changes
        item = self._read(id_)
        with self._lock:
            if changes == self._changes and len(self._consumer.assignment) == self._partitions:
                self._keep(key, item)
        return item

    def _read(self, id_: int) -> Item:
        with closing(MySQLdb.connect(**self._database)) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("SELECT name, CAST(price AS CHAR) FROM items WHERE id = %s", (id_,))
            found: Item = cursor.fetchone()
            return found

    def _changed(self, message: txmq.Message) -> None:
        event, key = read_event(message.value or b""), (message.key or b"").decode()
        with self._lock:
            if message.offset < self._next.get(message.partition, 0):
                return
            self._next[message.partition] = message.offset + 1
            self._changes += 1
            if event.op in ("c", "u", "r", "d"):
                row = event.after
                self._keep(key, None if row is None else (row["name"], row["price"]))
            elif event.op in ("t", "ddl"):
                self._items.clear()

    def _keep(self, key: str, item: Item) -> None:
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > ITEMS_MAX:
            self._items.popitem(last=False)


def main(topic: str, database: str, bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Answer what is typed, until end of file."""
    with txmq.connect(bootstrap) as client:
        cache = ItemCache(client, topic, json.loads(database))
        for line in sys.stdin:
            hits, item = cache.hits, cache.get(int(line))
            text = "no such item" if item is None else f"{item[0]} {item[1]}"
            print(f"{text} ({'cached' if cache.hits > hits else 'read'})", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(f"usage: {sys.argv[0]} TOPIC CONNECT_ARGUMENTS_AS_JSON [BOOTSTRAP]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
    except (MySQLdb.Error, json.JSONDecodeError) as error:
        sys.exit(f"cannot read the database: {error}")
