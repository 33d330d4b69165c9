"""Look for a batch in the log, if its session can no longer tell whether it is stored.

A session that has ended (410), or a partition that does not know its sequences (its topic was created anew), takes
nothing more under that sequence. So the log is the whole truth, once all that it holds is visible. Batches keep
producer id, epoch, sequence and CRC in the log. A batch that is not found in a log that goes back to before its first
sending was never stored. If retention has removed that part, the answer is unknown.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from txmq.client.spooling.spool_rows import Entry
from txmq.client.spooling.spool_sessions import stamped
from txmq.errors import RemoteProtocolError
from txmq.log import records
from txmq.log.batch import HEADER

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.spooling.spool_homes import SpoolHome

READ_SIZE_BYTES = 1 << 20


class StoredInLog(enum.Enum):
    """Whether the log holds a batch."""

    STORED = "stored"
    ABSENT = "absent"
    UNKNOWN = "unknown"


def broker_epoch(home: SpoolHome) -> str:
    """The number of the broker's incarnation: another one after each restart.

    Raises:
        TxmqError: the broker does not tell it now.
    """
    for line in home.stats().splitlines():
        if line.startswith("epoch "):
            return line
    raise RemoteProtocolError("the broker's stats tell no epoch")


def look_up(client: Client, entry: Entry) -> StoredInLog:
    """Read the partition from the offset that it had reached before the batch was first sent.

    Raises:
        UnknownTopicError: the partition is gone, with all it held.
        TxmqError: it cannot be read now.
    """
    assert entry.assigned is not None
    wanted = _identity(stamped(entry.content, entry.assigned))
    held = client.offsets(entry.topic, entry.partition)
    # An end below it: the topic was created anew under its name.
    offset_at_least = entry.assigned.offset_at_least if entry.assigned.offset_at_least <= held.end else 0
    offset = max(held.start, offset_at_least)
    while offset < held.end:
        body = client.fetch_raw(entry.topic, entry.partition, offset, READ_SIZE_BYTES)
        if not body:
            return StoredInLog.UNKNOWN
        for raw in records.decode_raw(body, entry.topic, entry.partition):
            if _identity(raw.content) == wanted:
                return StoredInLog.STORED
            offset = raw.end_offset
    return StoredInLog.ABSENT if held.start <= offset_at_least else StoredInLog.UNKNOWN


def _identity(batch: bytearray | memoryview) -> tuple[int, ...]:
    fields = HEADER.unpack_from(batch)
    return fields[4], *fields[9:12]  # CRC, producer id, epoch, sequence
