"""Topics of tables: named, made when the first change comes, and the partitions of changes in them.

Two tables whose names ``config.escaped`` makes one are refused.

What stays in one partition, in order, is the changes of a row, of a table, or of a transaction (``publish.by``): each
has a selector, which sees the event's key and two headers. For the last two kinds all rows of a table in a transaction
have the same partition, so that it is asked once and not for each row. Keys that most collations take for one row's,
because they differ in case, accents or spaces alone, have one partition.

Invariant: a topic has for this reader the number of partitions that it had when its first change came, so that a key
stays in its partition. More partitions count from the reader's next start.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable

from crc32c import crc32c

from txmq.binlog.config import PublishSettings, escaped, topic_of, topics_named
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import BinlogError
from txmq.client.partitioner import PartitionSelector, checked
from txmq.errors import ConfigError
from txmq.model import Message

TABLE_HEADER = "txmq.table"  # database.table
GTID_HEADER = "txmq.gtid"

_FOLDING = 2  # of ``_folded``; 1 was without it


# --- what stays in one partition --------------------------------------------------------------------------------------


class RowSelector(PartitionSelector):
    """The changes of a row, in order."""

    def select(self, topic: str, partitions: int, message: Message) -> int:
        return self.partition_of(message.key or b"", partitions)

    @staticmethod
    def partition_of(key: bytes, partitions: int) -> int:
        """As ``select``, for a key."""
        found: int = crc32c(_folded(key) if b'"' in key else key) % partitions
        return found


class TableSelector(PartitionSelector):
    """The changes of a table, in order."""

    def select(self, topic: str, partitions: int, message: Message) -> int:
        return _hashed(message, TABLE_HEADER) % partitions


class TransactionSelector(PartitionSelector):
    """The changes of a transaction, in order. Those of a row by several transactions come in any order."""

    def select(self, topic: str, partitions: int, message: Message) -> int:
        return _hashed(message, GTID_HEADER) % partitions


def selector_of(by: str) -> PartitionSelector:
    """The selector that ``publish.by`` names.

    Raises:
        ConfigError: there is none of that name.
    """
    if by == "key":
        return RowSelector()
    if by == "table":
        return TableSelector()
    if by == "transaction":
        return TransactionSelector()
    raise ConfigError(f"publish.by = {by!r}: expected key, table or transaction")


def placing_of(by: str) -> str:
    """Names how changes get their partitions: if it is another one than before, those of a row may get another one."""
    return f"{by}-{_FOLDING}" if by == "key" else by


def _folded(key: bytes) -> bytes:
    """A key with texts, without case, accents and spaces."""
    if key.isascii():
        return key.lower().replace(b" ", b"")
    text = unicodedata.normalize("NFKD", key.decode("utf-8", "replace").casefold())
    return "".join([one for one in text if not (unicodedata.combining(one) or one.isspace())]).encode()


def _hashed(message: Message, header: str) -> int:
    found: int = crc32c(message.headers[header])
    return found


# --- the topics -------------------------------------------------------------------------------------------------------


class TablePlace:
    """Where a table's changes go: a topic, and in it the partition of each key."""

    __slots__ = ("fixed", "partitions", "table", "topic")

    def __init__(self, table: TableName, topic: str, partitions: int) -> None:
        self.table, self.topic, self.partitions = table, topic, partitions
        self.fixed: int | None = None  # the partition of all changes of this transaction

    def partition_of(self, key: bytes) -> int:
        """The partition of a change."""
        return RowSelector.partition_of(key, self.partitions) if self.fixed is None else self.fixed


class Topics:
    """The places of all tables. Used by one thread.

    Args:
        make: makes a topic if it is missing; returns how many partitions it has.
        names: lists all topics of the broker.
    """

    def __init__(
        self, settings: PublishSettings, name: str, make: Callable[[str], int], names: Callable[[], Iterable[str]]
    ) -> None:  # fmt: skip
        self._pattern, self._name, self._make, self._names = settings.topic, name, make, names
        self._is_by_key, self._selector = settings.by == "key", selector_of(settings.by)
        self._places: dict[TableName, TablePlace] = {}
        self._pieces: dict[str, TableName] = {}
        self._partitions: dict[str, int] = {}

    def place(self, table: TableName, gtid: str) -> TablePlace:
        """The place of a table's changes in one transaction.

        Raises:
            BinlogError: its topic cannot be named, or is that of another table.
            TxmqError: the topic cannot be made.
        """
        place = self._places.get(table)
        if place is None:
            place = self._places[table] = self._new_place(table)
        if not self._is_by_key:
            headers = {TABLE_HEADER: str(table).encode(), GTID_HEADER: gtid.encode()}
            shown = Message(place.topic, -1, -1, None, None, headers, None, 0, None)
            found = self._selector.select(place.topic, place.partitions, shown)
            place.fixed = checked(found, place.topic, place.partitions)
        return place

    def concerned(self, tables: Iterable[TableName], gtid: str) -> dict[str, TableName]:
        """The topics that a statement concerns, each with the table that it named first.

        A table without a name stands for all tables of its database that have a topic.
        """
        found: dict[str, TableName] = {}
        for table in tables:
            of_table = [self.place(table, gtid).topic] if table.name else self._of_database(table.database)
            for topic in of_table:
                found.setdefault(topic, table)
        return found

    def any_exists(self, tables: Iterable[TableName]) -> bool:
        """Whether any of these tables has a topic."""
        names = set(self._names())
        return any(topic_of(self._pattern, self._name, table) in names for table in tables)

    def _of_database(self, database: str) -> list[str]:
        named = topics_named(self._pattern, name=self._name, database=escaped(database))
        return sorted(topic for topic in self._names() if named.match(topic))

    def partitions(self, topic: str) -> int:
        """How many a topic has; it is made if it is missing."""
        known = self._partitions.get(topic)
        if known is None:
            known = self._partitions[topic] = self._make(topic)
        return known

    def _new_place(self, table: TableName) -> TablePlace:
        pieces = f"{escaped(table.database)}.{escaped(table.name)}"
        other = self._pieces.setdefault(pieces, table)
        topic = topic_of(self._pattern, self._name, table)
        if other != table:
            raise BinlogError(f"{table} and {other} would share the topic {topic!r}: source.exclude one of them")
        return TablePlace(table, topic, self.partitions(topic))
