"""What stays in one partition, in order: the changes of a row, of a table, or of a transaction.

A selector sees the event's key and two headers. For the last two kinds all rows of a table in a transaction have the
same partition, so that ``topics`` asks once and not for each row.

Keys that most collations take for one row's, because they differ in case, accents or spaces alone, have one partition.
"""

from __future__ import annotations

import unicodedata

from crc32c import crc32c

from txmq.client.partitioner import PartitionSelector
from txmq.errors import ConfigError
from txmq.model import Message

TABLE_HEADER = "txmq.table"  # database.table
GTID_HEADER = "txmq.gtid"

_FOLDING = 2  # of ``_folded``; 1 was without it


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
