"""What stays in one partition, in order: the changes of a row, of a table, or of a transaction.

A selector sees the event's key and two headers. For the last two kinds all rows of a table in a transaction have the
same partition, so that ``topics`` asks once and not for each row.
"""

from __future__ import annotations

from crc32c import crc32c

from txmq.client.partitioner import KeyHashSelector, PartitionSelector
from txmq.errors import ConfigError
from txmq.model import Message

TABLE_HEADER = "txmq.table"  # database.table
GTID_HEADER = "txmq.gtid"


class TableSelector(PartitionSelector):
    """The changes of a table, in order."""

    def select(self, topic: str, partitions: int, message: Message) -> int:
        return _hashed(message, TABLE_HEADER) % partitions


class TransactionSelector(PartitionSelector):
    """The changes of a transaction, in order. Those of a row by several transactions come in any order."""

    def select(self, topic: str, partitions: int, message: Message) -> int:
        return _hashed(message, GTID_HEADER) % partitions


def selector_of(by: str) -> PartitionSelector:
    """The selector that ``publish.by`` names; ``key`` is the producers' default.

    Raises:
        ConfigError: there is none of that name.
    """
    if by == "key":
        return KeyHashSelector()
    if by == "table":
        return TableSelector()
    if by == "transaction":
        return TransactionSelector()
    raise ConfigError(f"publish.by = {by!r}: expected key, table or transaction")


def _hashed(message: Message, header: str) -> int:
    found: int = crc32c(message.headers[header])
    return found
