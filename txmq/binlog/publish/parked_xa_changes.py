"""The changes of prepared XA transactions, read back from the parked topic, or from the notes of a spool."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from txmq.binlog.errors import BinlogError
from txmq.binlog.publish.change_messages import KEY_HEADER, PARTITION_HEADER, TOPIC_HEADER, Outgoing, parked_key
from txmq.binlog.publish.published import ParkedRows
from txmq.client import Client
from txmq.log import records
from txmq.model import Message
from txmq.runtime.ports import Clock

_WAIT_S = 30.0  # for messages of another home's partition to appear
_ENVELOPE = {TOPIC_HEADER, PARTITION_HEADER, KEY_HEADER}


class ParkedTopic:
    """The parked topic, in which only the reader writes.

    Args:
        flush: publishes what is gathered: it may hold the changes that must be read.
    """

    def __init__(self, client: Client, topic: str, clock: Clock, flush: Callable[[], None]) -> None:
        self._client, self._topic, self._clock, self._flush = client, topic, clock, flush

    def read(self, xid: str, rows: ParkedRows) -> Iterator[Outgoing]:
        """The changes of a prepared transaction, in order, each with its destination.

        Raises:
            BinlogError: they are not all there.
            TxmqError: the broker is away.
        """
        self._flush()
        key, left, offset = parked_key(xid, rows.gtid), rows.rows, rows.offset
        deadline = self._clock.monotonic() + _WAIT_S
        while left:
            messages = self._client.fetch(self._topic, 0, offset, timeout=1.0)
            for message in messages:
                if message.key == key and left:
                    left -= 1
                    yield opened(message)
            if messages:
                offset = messages[-1].offset + 1
            elif self._clock.monotonic() > deadline:
                raise BinlogError(
                    f"{left} of {rows.rows} changes of the prepared transaction {xid} are missing in {self._topic}, "
                    f"from offset {rows.offset} on: were they deleted?"
                )


class ParkedNotes:
    """The changes that an ordered reader keeps as notes in its spool.

    Args:
        notes: gives those of a name.
        flush: as for ``ParkedTopic``.
    """

    def __init__(self, notes: Callable[[str], Iterator[bytes]], topic: str, flush: Callable[[], None]) -> None:
        self._notes, self._topic, self._flush = notes, topic, flush

    def read(self, xid: str, rows: ParkedRows) -> Iterator[Outgoing]:
        """As ``ParkedTopic.read``."""
        self._flush()
        left = rows.rows
        for content in self._notes(note_name(xid, rows.gtid)):
            left -= 1
            yield opened(records.decode(bytearray(content), self._topic, 0)[0])
        if left:
            raise BinlogError(f"{left} of {rows.rows} changes of the prepared transaction {xid} are not in the spool")


def note_name(xid: str, gtid: str) -> str:
    """The name of the notes that have a prepared transaction's changes."""
    return f"parked {xid} {gtid}"


def opened(message: Message) -> Outgoing:
    """A parked change with its destination."""
    headers = message.headers
    topic, partition = headers[TOPIC_HEADER].decode(), int(headers[PARTITION_HEADER])
    kept = [(name, value) for name, value in headers.items() if name not in _ENVELOPE]
    return topic, partition, headers[KEY_HEADER], message.value or b"", kept, message.timestamp_ms
